"""A node that a hang puts under suspicion is tested over real links before the next generation."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from .harness import Nodes
from .test_peer_gate import ALL, CABLE_MBIT, STORE, reports
from .worlds import World

HALTING = str(Path(__file__).with_name("halting.py"))
HANG_LIMIT_S = 20.0  # costs more than tests are expected to take
STEPS = 6  # that every rank has done before it is hurt


def trains(world: World, generation: int, count: int) -> dict[int, int]:
    """Rank -> node, once all of a generation have done some steps."""
    places = world.all_places(generation, count)
    world.wait(lambda: all(world.step(number) >= STEPS for number in places.values()))
    return places


def test_a_hang_has_its_node_tested_a_crash_none_and_who_is_slow_is_excluded() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(STORE + 1, cable_mbit=CABLE_MBIT, weight=8) as nodes:
        world = World(nodes, lease_s=10.0)
        world.gate = (f'[]\npeers = ["links"]\npeers_limit_s = 60\nsuspects_limit_s = 60\n'
                      f'python = "{sys.executable}"')
        world.start_store()
        for number in ALL:
            world.launch(number, "run", "--nnodes", "3:4", "--nproc-per-node", "1", "--preload",
                         "none", "--max-restarts", "5", "--hang-limit", str(HANG_LIMIT_S),
                         HALTING, str(world.shared))
        places = trains(world, 1, 4)
        leader = world.led_by()
        rank, hurt = next(one for one in places.items() if one[1] != leader)
        os.kill(world.ranks(hurt)[rank]["pid"], signal.SIGKILL)
        rank = next(rank for rank, node in trains(world, 2, 4).items() if node == hurt)
        assert len(reports(world)) == 1  # that of the start

        nodes.rate(hurt, 0.5 * CABLE_MBIT)
        (world.shared / f"{rank}.1").touch()
        places = trains(world, 3, 3)
        assert sorted(places.values()) == [one for one in ALL if one != hurt]
        name = nodes[hurt].name
        made = reports(world)[-1]
        assert made["suspects"] == [name] and [one["node"] for one in made["hurt"]] == [name]
        document = json.loads(world.documents()[f"/holdfast/main/node/{name}"])
        assert document["excluded"] and document["fault"] == "check_failed", document
        (one,) = [one for one in world.own_incidents(leader) if one["fault"] == "rank_hung"]
        lines = [text for _, text in one["timeline"]]
        assert any(text.startswith(f"{name}, under suspicion, is tested with ") for text in lines)
        assert any(text.startswith(f"{name}: check peers: slow with ")
                   and text.endswith("; it is excluded") for text in lines), lines
        (world.shared / "end").touch()
        assert [world.processes[one].wait(120) for one in places.values()] == [0] * 3, world.said()
