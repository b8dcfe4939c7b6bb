"""A run over real links whose leader has its nodes tested first: who is hurt is left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Nodes
from .worlds import World, output

LOOPING = str(Path(__file__).with_name("looping.py"))
CABLE_MBIT = 400  # so that the cables decide over rates, not the processors that nodes share
ALL, HURT, STORE = range(4), 2, 4


@pytest.fixture()
def world() -> Iterator[World]:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(STORE + 1, cable_mbit=CABLE_MBIT, weight=8) as nodes:
        made = World(nodes, lease_s=10.0)
        made.gate = f'[]\npeers = ["links"]\npeers_limit_s = 60\npython = "{sys.executable}"'
        made.start_store()
        yield made


def launch(world: World) -> Path:
    """On all four; three are enough.  Where each rank that begins writes a file."""
    folder = world.shared / str(len(list(world.shared.iterdir())))
    folder.mkdir()
    for number in ALL:
        world.launch(number, "run", "--nnodes", "3:4", "--nproc-per-node", "1", "--preload",
                     "none", LOOPING, str(folder))
    return folder


def ends(world: World, folder: Path, numbers: list[int]) -> None:
    (folder / "end").write_text("")
    assert [world.processes[number].wait(120) for number in numbers] == [0] * len(numbers), (
        world.said())


def reports(world: World) -> list[dict[str, Any]]:
    """What the leaders wrote into the store, the oldest first."""
    rows = world.etcdctl(STORE, world.endpoints, "get", "--prefix", "--print-value-only",
                         "/holdfast/main/tested/").splitlines()
    return sorted((one for row in rows if row for one in json.loads(row)),
                  key=lambda one: one["wall_s"])


def test_a_node_with_a_slow_cable_is_left_out_until_it_is_mended(world: World) -> None:
    world.nodes.rate(HURT, 0.5 * CABLE_MBIT)
    first = launch(world)
    assert world.processes[HURT].wait(120) == 75, world.said()
    said = output(world.nodes[HURT])
    assert "n2 starts no run: check peers: slow with " in said, said
    assert "n2: " in said and "MB/s" in said and "--ignore-check peers" in said
    world.wait(lambda: len(list(first.glob("*.json"))) == 3, 120.0)
    others = [number for number in ALL if number != HURT]
    # Who leads names it: one of the others in an incident, or the node itself, which then leaves.
    named = "n2 takes no ranks of it: check peers: slow with "
    world.wait(lambda: named in said or any(
        one["fault"] == "check_failed" and one["reason"].startswith(named)
        for number in others for one in world.incidents(number)), 30.0)
    ends(world, first, others)

    world.nodes.heal()
    second = launch(world)
    world.wait(lambda: len(list(second.glob("*.json"))) == 4, 120.0)
    ends(world, second, list(ALL))
    made = reports(world)
    assert [[hurt["node"] for hurt in one.get("hurt", ())] for one in made] == [["n2"], []], made
    assert all(0.0 < one["took_s"] < 30.0 for one in made)
