"""Agents that stand still for long on nodes that live, and nodes that are cut off: who is lost."""

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
STILL_S = 62.0  # its observers ask for it some 120 times each meanwhile
KNOWN_S = 30.0  # two processors carry everything here; alone it takes about one second


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(5) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def lost(world: World, number: int) -> bool:
    """Whether any agent has said so of this node."""
    return f"n{number} is lost" in world.said()


def known_after(world: World, number: int) -> float:
    begun_s = time.monotonic()
    world.nodes.blackhole(number)
    world.wait(lambda: lost(world, number), KNOWN_S)
    return time.monotonic() - begun_s


def test_a_stopped_agents_node_is_not_lost_and_one_that_is_cut_off_soon_is(world: World) -> None:
    for number in range(4):
        world.launch(number, "run", "--nnodes", "4", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(world.shared))
    world.all_places(1, 4)
    leader = world.led_by()
    stopped, cut = [number for number in range(4) if number != leader][:2]
    os.kill(world.agent_pid(stopped), signal.SIGSTOP)
    still_s = time.monotonic() + STILL_S

    def over() -> bool:
        assert not lost(world, stopped), world.said()
        return time.monotonic() > still_s

    world.wait(over)
    # A living agent's node, and the one whose agent has stood still all the time.
    took_s = [known_after(world, number) for number in (cut, stopped)]
    print("known after", [round(one, 2) for one in took_s])
