"""A pause of the fleet over a real etcd: it holds back whoever leads, and ends on time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Nodes
from .worlds import World

LOOPING = str(Path(__file__).with_name("looping.py"))
PAUSE_S = 30.0  # a lease runs out in it, another node leads, and there is time to look
OFF_S = 3600.0


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(3, weight=16) as nodes:
        made = World(nodes)
        made.ahead_s = {1: OFF_S}
        made.start_store()
        yield made


def test_it_holds_back_both_nodes_and_the_next_leader_and_ends_by_itself(world: World) -> None:
    for number in (0, 1):
        world.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts",
                     "3", "--preload", "none", LOOPING, str(world.shared))
    world.all_places(1, 2)
    world.wait(lambda: len(list(world.shared.glob("*.json"))) == 2)
    leader = world.led_by()
    other = 1 - leader
    status = world.answer(1, "/api/v1/status")
    assert status["now_wall_s"] - time.time() > OFF_S / 2, "its clock is not off"

    begun_s = time.monotonic()
    asked = world.ask(other, "pause", "--fleet", "--for", f"{PAUSE_S:.0f}s", "--reason", "switch")
    assert asked.returncode == 0, asked.stderr + world.said()
    for number in (0, 1):
        said = world.wait(lambda number=number: (
            one := world.get(number, "/api/v1/status")) and one["fleet_paused"] and one, 20.0)
        left_s = said["fleet_paused_until_wall_s"] - time.time() - (OFF_S if number else 0.0)
        least_s = PAUSE_S - (time.monotonic() - begun_s)  # had it begun before it was asked for
        assert least_s - 1.0 < left_s < PAUSE_S + 1.0

    # A rank dies: the leader, whom nobody told but the store, does nothing about it.
    (rank,) = world.all_ranks(other).values()
    os.kill(rank["pid"], signal.SIGKILL)
    world.wait(lambda: any(one["fault"] == "rank_killed" for number in (0, 1)
                           for one in world.incidents(number)), 60.0)

    # Nor does the next one.
    leader = world.led_by()
    other = 1 - leader
    agent = world.agent_pid(leader)
    os.kill(agent, signal.SIGSTOP)
    world.wait(lambda: world.leader() == other, 60.0)
    os.kill(agent, signal.SIGCONT)

    def is_over() -> bool:
        generations = {world.generation(number) for number in (0, 1)}
        if time.monotonic() - begun_s < PAUSE_S - 1.0:
            assert generations <= {0, 1}, world.said()
        return generations == {2}

    world.wait(is_over, PAUSE_S + 60.0)
    took_s = time.monotonic() - begun_s
    assert PAUSE_S - 1.0 < took_s < PAUSE_S + 45.0, world.said()
    for number in (0, 1):
        world.wait(lambda number=number: (
            one := world.get(number, "/api/v1/status")) and not one["fleet_paused"])
    (world.shared / "end").write_text("")
    assert [world.processes[number].wait(60) for number in (0, 1)] == [0, 0], world.said()
