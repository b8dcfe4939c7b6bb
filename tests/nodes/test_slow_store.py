"""An etcd whose every answer takes seconds, under a run over two nodes."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from .harness import Nodes
from .worlds import ANSWER_S, World, output

SLOW_SERVER = str(Path(__file__).parents[1] / "slow_server.py")
LEASE_S = 10.0  # as shipped: a renewal may take a third of it
PORT = 2390
STEPS = 2500  # more than the hurts take


class SlowStore(World):
    """Each member is reached through a port where its answers come late."""

    def slow(self, least_s: float, most_s: float) -> None:
        (self.shared / "late").write_text(f"{least_s} {most_s}")

    def start_carriers(self) -> None:
        for number in self.members:
            node = self.nodes[number]
            node.start([sys.executable, SLOW_SERVER, str(PORT), f"{node.address}:2379",
                        str(self.shared / "late")], output="late.out")
            self.wait(lambda node=node: "ready" in node.said("late.out"), 20.0)

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self.nodes[one].address}:{PORT}" for one in self.members)

    def word(self, number: int) -> str:
        """Of the store, as `holdfast status` prints it."""
        text = " ".join(self.ask(number, "status").stdout.split())
        found = re.search(r"store (up|down|slow: up to [0-9.]+ s for an answer)", text)
        return found[0] if found else ""


def test_a_run_over_a_slow_etcd_begins_trains_and_gets_a_killed_rank_back() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(3, weight=16) as nodes:
        world = SlowStore(nodes, members=(0, 1, 2), lease_s=LEASE_S)
        world.slow(1.0, 2.0)
        world.start_store()
        world.start_carriers()
        world.train(range(2), 2, STEPS)
        world.wait(lambda: min(world.step(number) for number in range(2)) >= 3)
        took_s = world.wait(lambda: re.fullmatch(
            r"store slow: up to ([0-9.]+) s for an answer", world.word(0)), ANSWER_S)
        assert float(took_s[1]) >= 1.0, world.said()

        # It trains on over several leases' renewals, and no store is lost in between.
        before, pids = world.step(0), {n: world.all_ranks(n)[n]["pid"] for n in range(2)}
        world.wait(lambda: world.step(0) > before + 20)
        assert [world.wait(lambda number=number: world.generation(number))
                for number in range(2)] == [1, 1], world.said()

        # A killed rank comes back by a plan that the slow store has to take; the other one stays.
        os.kill(pids[1], signal.SIGKILL)
        world.wait(lambda: world.generation(0) == world.generation(1) == 2)
        step = world.step(0)
        world.wait(lambda: min(world.step(number) for number in range(2)) > step + 2)
        assert world.all_ranks(0)[0]["pid"] == pids[0], world.said()
        told = "".join(output(world.nodes[number]) for number in range(2))
        assert "planned generation 2 from the survivors' memory" in told, world.said()

        world.slow(0.0, 0.0)
        world.wait(lambda: world.word(0) == "store up", 60.0)
        assert [world.processes[number].wait(200) for number in range(2)] == [0, 0], world.said()
        assert "generation 3" not in "".join(output(one) for one in nodes.all[:2]), world.said()
