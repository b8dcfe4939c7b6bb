"""A run over more nodes than each is near to, with real agents: nobody is stale, and who dies is
known to all."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from holdfast.agent.peers.choice import ALL_NEAR

from .harness import Nodes
from .worlds import World

LOOPING = str(Path(__file__).with_name("looping.py"))
COUNT = ALL_NEAR + 3  # of nodes with an agent; two of each one's others, at the least, are far
BEGIN_S, KNOWN_S = 120.0, 30.0  # two processors carry everything here
CALM_LEASES = 5.0


def unaware(world: World, of: int, among: list[int]) -> list[int]:
    """Whose agent has not said that this node is lost."""
    logs = {number: next((world.nodes[number].home / "state").rglob("agent.log"))
            for number in among}
    return [number for number, log in logs.items() if f"n{of} is lost" not in log.read_text()]


def test_all_of_many_know_who_dies_and_hold_everybody_else_for_alive() -> None:
    with Nodes(COUNT + 1, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        for number in range(COUNT):
            world.launch(number, "run", "--nnodes", str(COUNT), "--nproc-per-node", "1",
                         "--preload", "none", "--no-python", sys.executable, LOOPING,
                         str(world.shared))
        world.wait(lambda: len(world.places(1)) == COUNT, BEGIN_S)
        calm_s = time.monotonic() + CALM_LEASES * world.lease_s

        def trains_on() -> bool:
            assert " is lost" not in world.said() and "not heard of" not in world.said()
            return time.monotonic() > calm_s

        world.wait(trains_on)
        unknown = [one for one in world.incidents(world.led_by()) if one["fault"] == "host_unknown"]
        assert not unknown, unknown
        assert len(world.places(1)) == COUNT
        lost = next(number for number in range(COUNT) if number != world.led_by())
        others = [number for number in range(COUNT) if number != lost]
        begun_s = time.monotonic()
        world.power_off(lost)
        world.wait(lambda: not unaware(world, lost, others), KNOWN_S)
        print("known to all after", round(time.monotonic() - begun_s, 2))
        alive = [number for number in others if unaware(world, number, others) != others]
        assert not alive, alive
