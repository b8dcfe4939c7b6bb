"""A node whose link loses packets while a trainer runs: nobody is lost, and no step is redone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from .harness import Nodes
from .test_runs import digest_of
from .worlds import CLI, ROOT, SMALL, World, output

# An agent's words take seconds to get through, and silence for one and a half of these is a loss by
# its own right: what is tried here is that nobody is called dead before.
LEASE_S = 30.0
STEPS = 400
ON, SOME = 10, 40  # steps
# Readings of TCP's counters come each two seconds, not each fifteen.
READ_OFTEN = "fast_s = 2.0\nslow_s = 2.0\n"
HURT_S = 150.0  # four readings in a row, of a share that chance moves
MEND_S = 200.0  # what TCP waits before it sends again doubles each time
AGAIN = "tcp_retransmits_high"


def lossy_link(nodes: Nodes, number: int, percent: int) -> None:
    """Of what passes between one node and any other, in both directions."""
    nodes.loss(number, percent)
    for other in nodes:
        if other.number != number:
            nodes.loss(other.number, percent, number)


def acted(world: World) -> list[dict[str, Any]]:
    """What any node found that was more than a warning."""
    return [one for number in world.processes for one in world.incidents(number)
            if one["severity"] not in ("warn", "unknown")]


def up(world: World) -> bool:
    """Whether two ranks train."""
    assert all(one.poll() is None for one in world.processes.values()), world.said()
    found = world.places(1)
    return len(found) == 2 and min(map(world.step, found.values())) >= ON


class Calm:
    """The nodes and ranks of a run's first generation: what packets alone may not change."""

    def __init__(self, world: World) -> None:
        self.world, self.places = world, world.all_places(1, 2)
        self.leader = world.led_by()

    def holds(self) -> bool:
        """Nobody was called lost or taken out, and nobody else has their ranks."""
        world, said = self.world, self.world.said()
        assert " is lost" not in said and "not heard of" not in said, said
        excluded = [key for key, text in world.documents().items()
                    if "/node/" in key and json.loads(text).get("excluded")]
        assert not excluded, excluded
        (spare,) = set(world.processes) - set(self.places.values())
        return not world.ranks(spare)

    def step(self) -> int:
        return max(self.world.step(number) for number in self.places.values())

    def go_on(self, steps: int, limit_s: float) -> None:
        wanted = self.step() + steps
        self.world.wait(lambda: self.holds() and min(
            self.world.step(number) for number in self.places.values()) >= wanted, limit_s)


def test_a_link_that_loses_packets_costs_time_and_nothing_else() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    words = (f"steps={STEPS}", *SMALL, "checkpoint.every=100000")
    with Nodes(4, weight=16) as nodes:
        world = World(nodes, lease_s=LEASE_S)
        world.readings = READ_OFTEN
        world.start_store()
        for number in range(3):
            world.launch(number, "train", "--nnodes", "2", f"work_dir={world.shared}/work", *words)
        world.wait(lambda: up(world))
        calm = Calm(world)
        hurt = next(one for one in calm.places.values() if one != calm.leader)

        # One packet in twenty: the ranks do not even know.
        lossy_link(nodes, hurt, 5)
        calm.go_on(SOME, MEND_S)
        assert calm.holds() and world.all_places(1, 2) == calm.places
        assert not acted(world), acted(world)

        # Nearly a third, each way: hardly a step is done, and whose link it is is told.
        lossy_link(nodes, hurt, 30)
        world.wait(lambda: calm.holds() and [
            one for one in world.incidents(hurt) if one["fault"] == AGAIN], HURT_S)

        nodes.heal()
        calm.go_on(ON, MEND_S)
        assert world.led_by() == calm.leader
        assert [one.wait(200) for one in world.processes.values()] == [0] * 3, world.said()
        told = "".join(output(nodes[number]) for number in world.processes)
        assert set(re.findall(r"(\d+) steps? lost", told)) <= {"0"}, told
        # A rank is ended for it only where waiting costs more, and never for another's silence.
        assert "it is the only rank" not in world.said(), world.said()
        clean = nodes[hurt].run(
            [*CLI, "train", "--run", "clean", "--nproc-per-node", "2", "--standby", "0",
             f"work_dir={world.shared}/work", f"checkpoint.dir={world.shared}/clean", *words],
            {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=240.0)
        assert clean.returncode == 0, clean.stderr
        assert digest_of(told) == digest_of(clean.stdout + clean.stderr)
