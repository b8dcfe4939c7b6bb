"""Runs over several nodes: one world, and what becomes of it when parts of it are hurt for real."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Nodes
from .worlds import ANSWER_S, CLI, LEASE_S, ROOT, SMALL, World, output

STEPS = 600  # more than the hurts take
LOOPING = str(Path(__file__).with_name("looping.py"))


@pytest.fixture()
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """So many nodes as the test asks for, and one for the store."""
    with Nodes(request.param + 1, weight=16) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stand_for(world: World, seconds: float, condition) -> None:  # type: ignore[no-untyped-def]
    """The condition holds at every look for so long."""
    end_s = time.monotonic() + seconds

    def over() -> bool:
        assert condition(), world.said()
        return time.monotonic() > end_s

    world.wait(over)


@pytest.mark.parametrize("world", [3], indirect=True)
def test_a_script_over_three_nodes_is_one_world_and_outlives_its_store(world: World) -> None:
    folder = world.shared
    for number, node_rank in enumerate((1, 0, 2)):
        world.launch(number, "run", "--nnodes", "3", "--nproc-per-node", "2", "--node-rank",
                     str(node_rank), "--preload", "none", LOOPING, str(folder))
    world.wait(lambda: len(list(folder.glob("*.json"))) == 6)
    said = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    for rank, seen in sorted(said.items()):
        group, local = divmod(rank, 2)
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["GROUP_RANK"]) == (
            str(rank), str(local), str(group))
        assert (seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"], seen["GROUP_WORLD_SIZE"]) == (
            "6", "2", "3")
        assert (seen["ROLE_RANK"], seen["ROLE_WORLD_SIZE"]) == (str(rank), "6")
        assert seen["MASTER_ADDR"] == world.nodes[1].address
        assert seen["MASTER_PORT"] == said[0]["MASTER_PORT"] != "0"
        assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == "eth0"
        assert (seen["TORCHELASTIC_RUN_ID"], seen["TORCHELASTIC_RESTART_COUNT"]) == ("job", "0")
    pids = {rank: int(seen["pid"]) for rank, seen in said.items()}

    # Every permit is renewed by the others' word while the store is away.
    os.kill(world.etcd[3].pid, signal.SIGKILL)
    stand_for(world, 2 * LEASE_S, lambda: all(map(alive, pids.values())))
    world.start_store()

    # A node that stood still as a whole finds itself fenced when it wakes up.
    world.nodes.freeze(2)
    stand_for(world, LEASE_S + 1.0, lambda: all(alive(pids[rank]) for rank in range(4)))
    world.nodes.freeze(2, on=False)
    world.wait(lambda: not alive(pids[4]) and not alive(pids[5]), 30.0)
    # One more where the agent there is late once more when its ranks have ended.
    world.wait(lambda: all(world.generation(number) in (2, 3) for number in range(3)))
    (folder / "end").write_text("")
    assert [world.processes[number].wait(60) for number in range(3)] == [0, 0, 0], world.said()


def test_an_agent_that_starts_while_the_store_is_away_keeps_a_scripts_permits() -> None:
    """It cannot ask the store who and where the others are, and each permit needs its word."""
    lease_s = 10.0  # the product's: a start takes some seconds
    with Nodes(3, weight=16) as nodes:
        world = World(nodes, lease_s=lease_s)
        world.start_store()
        for number in range(2):
            world.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--preload",
                         "none", LOOPING, str(world.shared))
        world.wait(lambda: len(list(world.shared.glob("*.json"))) == 2)
        pids = [int(json.loads(file.read_text())["pid"]) for file in world.shared.glob("*.json")]
        world.wait(lambda: all(any(f'"n{1 - number}":' in file.read_text() for file in
                                   world.nodes[number].home.rglob("peers.json"))
                               for number in range(2)))
        os.kill(world.etcd[2].pid, signal.SIGKILL)
        before = world.agent_pid(1)
        os.kill(before, signal.SIGKILL)
        stand_for(world, 2.5 * lease_s, lambda: all(map(alive, pids)))
        assert world.agent_pid(1) != before
        world.start_store()
        (world.shared / "end").write_text("")
        assert [world.processes[number].wait(60) for number in range(2)] == [0, 0], world.said()


@pytest.mark.parametrize("world", [3], indirect=True)
def test_no_two_generations_of_a_script_compute_at_once(world: World) -> None:
    """A node that hears no other, but the store, would renew its permits until the next plan, and
    compute for one more lease where it loses the store just then."""
    folder = world.shared
    for number in range(3):
        world.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(folder))
    places = world.all_places(1, 2)
    (spare,) = {0, 1, 2} - set(places.values())
    leader = world.led_by()
    cut = next(number for number in places.values() if number != leader)
    (pid,) = (seen["pid"] for seen in world.all_ranks(cut).values())
    for other in {0, 1, 2} - {cut}:
        world.nodes.partition(cut, other)
    begun_s = time.monotonic()
    world.wait(lambda: not alive(pid), 30.0)
    ended_s = time.monotonic() - begun_s
    assert world.generation(spare) == 0, world.said()  # the next one has not begun
    world.nodes.blackhole(cut)
    world.wait(lambda: len(world.places(2)) == 2 and world.ranks(spare), 60.0)
    print(f"its rank ended {ended_s:.2f} s after the cut, the spare's was there after "
          f"{time.monotonic() - begun_s:.2f} s")
    world.nodes.heal()
    (folder / "end").write_text("")
    assert [world.processes[number].wait(60) for number in range(3)] == [0, 0, 0], world.said()


def cut_off(world: World, node: int, generation: int, one_way: bool) -> None:
    """The spare takes the node's place; once it is heard of again it has no ranks."""
    (spare,) = {0, 1, 2, 3} - set(world.all_places(generation - 1, 3).values())
    if one_way:
        world.nodes.loss(node, 100)
    else:
        world.nodes.blackhole(node)
    world.wait(lambda: len(world.places(generation)) == 3 and world.ranks(spare))
    step = world.step(spare)
    world.wait(lambda: world.step(spare) > step + 2)
    world.nodes.heal()
    world.wait(lambda: not world.ranks(node))


def digest_of(text: str) -> str:
    found = re.search(r'"digest": "([^"]+)"', text)
    assert found, text
    return found[1]


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_trainer_outlives_a_rank_a_frozen_leader_and_a_node(world: World) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    world.train(range(4), 3, STEPS)
    world.wait(lambda: max(world.step(number) for number in range(4)) >= 3)
    places = world.all_places(1, 3)
    assert sorted(places) == [0, 1, 2]
    pids = {rank: world.all_ranks(number)[rank]["pid"] for rank, number in places.items()}

    # A rank is killed: the others keep their processes.
    os.kill(pids[1], signal.SIGKILL)
    world.wait(lambda: world.generation(places[0]) == 2)
    step = world.step(places[0])
    world.wait(lambda: world.step(places[0]) > step + 2)
    now = {rank: world.all_ranks(number)[rank]["pid"] for rank, number in places.items()}
    assert now[0] == pids[0] and now[2] == pids[2] and now[1] != pids[1]

    # The leader's agent stands still: another leads, and he is fenced when he wakes up.
    leader = world.led_by()
    agent = world.agent_pid(leader)
    os.kill(agent, signal.SIGSTOP)
    world.wait(lambda: world.leader() not in (-1, leader), 60.0)
    victim = next(rank for rank, number in places.items() if number != leader)
    os.kill(now[victim], signal.SIGKILL)
    watched = next(number for number in places.values() if number != leader)
    world.wait(lambda: world.generation(watched) == 3)
    os.kill(agent, signal.SIGCONT)
    step = world.step(watched)
    world.wait(lambda: world.step(watched) > step + 2 and len(world.places(3)) == 3)
    # An agent that is silent for longer than lease and margin has lost its ranks to the spare:
    # of the older generation nothing runs there any more.
    world.wait(lambda: not world.places(2))

    # Nothing that a node sends arrives; then nothing in either direction.
    cut_off(world, world.all_places(3, 3)[1], 4, one_way=True)
    cut_off(world, world.all_places(4, 3)[0], 5, one_way=False)

    # A node goes: known, named, and whoever is spare by now takes its place.
    places = world.all_places(5, 3)
    lost = places[2]
    (spare,) = {0, 1, 2, 3} - set(places.values())
    begun_s = time.monotonic()
    world.power_off(lost)
    world.wait(lambda: 2 in world.ranks(spare), 60.0)
    took_s = time.monotonic() - begun_s
    assert f"n{lost} is lost" in world.said()
    living = [number for number in range(4) if number != lost]
    assert [world.processes[number].wait(200) for number in living] == [0, 0, 0], world.said()
    told = "".join(output(world.nodes[number]) for number in living)
    assert "planned generation 6 from the survivors' memory" in told, world.said()
    print(f"the spare was in after {took_s:.2f} s")

    # The same world on one node, and no fault: the same weights to the last bit.
    clean = world.nodes[spare].run(
        [*CLI, "train", "--run", "clean", "--standby", "0",
         "--nproc-per-node", "3", f"work_dir={world.shared}/work",
         f"checkpoint.dir={world.shared}/clean", f"steps={STEPS}", *SMALL],
        {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=240.0)
    assert clean.returncode == 0, clean.stderr
    assert digest_of(told) == digest_of(clean.stdout + clean.stderr)


@pytest.mark.parametrize("world", [2], indirect=True)
def test_two_runs_whose_private_agents_share_nodes_speak_to_their_own(world: World) -> None:
    runs = [world, World(world.nodes, "other")]
    runs[1].etcd = world.etcd
    for run in runs:
        (world.shared / run.name).mkdir()
        for number in range(2):
            run.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--preload", "none",
                       LOOPING, str(world.shared / run.name))

    def address(number: int) -> dict[str, Any]:
        node = world.nodes[number]
        asked = json.loads(world.etcdctl(number, world.endpoints, "get", "-w", "json",
                                         f"/holdfast/main/address/{node.name}"))
        (row,) = asked.get("kvs") or [{}]
        return {"version": row.get("version"),
                **json.loads(base64.b64decode(row.get("value", "")) or b"{}")}

    # Each node's document has both, and nobody writes it any more.
    for run in runs:
        run.wait(lambda run=run: len(run.places(1)) == 2)
    for number in range(2):
        world.wait(lambda number=number: set(address(number).get("runs", ())) == {"job", "other"})
    before = [address(number) for number in range(2)]
    pids = {run.name: {rank: seen["pid"] for number in range(2)
                       for rank, seen in run.all_ranks(number).items()} for run in runs}

    # What happens to one run is heard of by its own agents, and not by the other's.
    os.kill(pids["job"][1], signal.SIGKILL)
    world.wait(lambda: len(world.places(2)) == 2)
    stand_for(world, 2.5, lambda: not runs[1].places(2))
    world.wait(lambda: {rank: seen["pid"] for number in range(2)
                        for rank, seen in runs[1].ranks(number).items()} == pids["other"], ANSWER_S)
    assert [address(number) for number in range(2)] == before
    for run in runs:
        (world.shared / run.name / "end").write_text("")
        assert [run.processes[number].wait(60) for number in range(2)] == [0, 0], run.said()


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_run_whose_nodes_all_lost_power_goes_on_where_it_is_queued_again(world: World) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    world.train((0, 1), 2, STEPS)
    world.wait(lambda: world.step(0) > 12)
    for number in (0, 1):
        world.power_off(number)
    world.train((2, 3), 2, STEPS)  # the plan names neither
    assert [world.processes[number].wait(200) for number in (2, 3)] == [0, 0], world.said()
    assert "planned generation 2 from" in "".join(
        output(world.nodes[number]) for number in (2, 3)), world.said()
