"""Agents that are not of the cluster, and stores that are not its: named, refused, and no harm."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from .harness import Nodes
from .test_one_after_another import SIZES, goes_on, pid_on
from .test_runs import LOOPING, stand_for
from .worlds import ANSWER_S, LEASE_S, World, output

TOKENS = '[cluster]\ntoken_file = "{home}/token"\n'
STRANGER, STORE = 2, 3  # the nodes


def joins(world: World) -> None:
    """The stranger's launcher, of a run of the same name."""
    world.launch(STRANGER, "run", "--nnodes", "1:2", "--nproc-per-node", "1", "--preload", "none",
                 LOOPING, str(world.shared))


def leaves(world: World) -> None:
    """It loses power, and is installed anew."""
    node = world.nodes[STRANGER]
    node.kill()
    world.processes.pop(STRANGER, None)
    shutil.rmtree(node.home / "state")


def told(world: World, number: int) -> dict[str, Any]:
    return dict(world.get(number, "/api/v1/status") or {})


def seen_by(world: World, number: int) -> set[str]:
    """The nodes that this one tells of."""
    return {row["node"] for row in world.answer(number, "/api/v1/fleet/status")["nodes"]}


def replace_store(world: World, data: Path, aside: Path, back: Path | None = None) -> None:
    """Another etcd at the old address: with nothing in it, or with what was put `back`."""
    world.etcd[STORE].kill()
    world.etcd[STORE].wait()
    data.rename(aside)
    if back is not None:
        back.rename(data)
    world.start_member(STORE)


def test_strangers_are_named_and_what_trains_goes_on() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4, weight=16) as nodes:
        world, other = World(nodes), World(nodes, cluster="other")
        for one in (world, other):
            one.settings = TOKENS
        for node in nodes:
            token = node.home / "token"
            token.write_text("the cluster's word")
            token.chmod(0o600)
        world.start_store()
        other.etcd = world.etcd
        world.train((0, 1), *SIZES)
        goes_on(world, {0, 1}, 1)
        pids, documents = [pid_on(world, number) for number in (0, 1)], world.documents()

        story(world, other)
        assert world.documents() == documents
        assert [pid_on(world, number) for number in (0, 1)] == pids
        assert not [one for number in (0, 1) for one in world.own_incidents(number)], world.said()
        os.kill(pids[1], signal.SIGKILL)  # it is their own store, and is used
        goes_on(world, {0, 1}, 2)


def story(world: World, other: World) -> None:
    nodes, names = world.nodes, {"n0", "n1"}

    # A cluster of another name in the same etcd has a run of the same name.
    joins(other)
    other.wait(lambda: other.places(1) == {0: STRANGER})
    goes_on(world, {0, 1}, 1)
    assert seen_by(world, 0) == names and seen_by(other, STRANGER) == {"n2"}
    assert len(told(other, STRANGER)["runs"]) == len(told(world, 0)["runs"]) == 1
    assert {one["node"] for one in world.status(0)["nodes"]} == names
    assert world.leader() in (0, 1) and other.leader() == STRANGER
    leaves(other)

    # One of this cluster, but for its token.
    (nodes[STRANGER].home / "token").write_text("another word")
    joins(world)
    why = "holds another cluster token than this node, and no word of it is taken here: set the "
    for number, refused in ((0, {"n2"}), (1, {"n2"}), (STRANGER, names)):
        word = world.wait(lambda number=number, refused=refused: (
            found := told(world, number).get("refused_nodes", {})).keys() == refused and found)
        assert all(f"{name} (10.99.0." in word[name] and why in word[name] for name in refused)
    world.wait(lambda: why in output(nodes[STRANGER]))
    stand_for(world, LEASE_S, lambda: not world.ranks(STRANGER))
    assert world.spares(0) == set()
    leaves(world)
    (nodes[STRANGER].home / "token").write_text("the cluster's word")
    goes_on(world, {0, 1}, 1)

    # The store comes back empty: whose it was wait, and a node that knew none makes it its own.
    data = nodes[STORE].home / "etcd"
    theirs, its = data.with_name("theirs"), data.with_name("its")
    replace_store(world, data, theirs)
    for number in (0, 1):
        world.wait(lambda number=number: "came back empty: this node knows it as " in told(
            world, number).get("store_problem", ""), ANSWER_S)
    goes_on(world, {0, 1}, 1)
    joins(world)
    for number in (0, 1):
        world.wait(lambda number=number: "is another than this node knows: " in told(
            world, number).get("store_problem", ""), ANSWER_S)
    world.wait(lambda: told(world, STRANGER).get("store_up"))

    # Their own is back: now that node is of another cluster, which has the same name.
    replace_store(world, data, its, theirs)
    for number in (0, 1):
        world.wait(lambda number=number: told(world, number).get("store_up"), ANSWER_S)
    word = world.wait(lambda: "is another than this node knows: " in (
        word := told(world, STRANGER).get("store_problem", "")) and word)
    assert "Set store.url to the right one" in word and "holdfast store forget" in word, word
    leaves(world)
    goes_on(world, {0, 1}, 1)
