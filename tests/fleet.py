"""A simulated fleet: a pre-flight driven over nodes and links of which some are hurt.

Owns what a world's faults make of each test; `Flight` drives the generator as the coordinator does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from holdfast.agent.core.checks import preflight
from holdfast.agent.core.checks.judge import BROKEN, SLOW
from holdfast.agent.core.checks.pairing import Pair, pair
from holdfast.agent.core.checks.preflight import COMPUTE, REACH, Member, Outcome, Report, Trial

Place = str | Pair


class World(NamedTuple):
    """`network`, `compute`: node or link -> share that is left, 0 = broken.  `dies`: node -> after
    how many of its tests.  `load`: the chance that a test is disturbed and looks slow."""

    network: dict[Place, float] = {}
    compute: dict[str, float] = {}
    wrong: tuple[str, ...] = ()
    dies: dict[str, int] = {}
    dark: tuple[str, ...] = ()  # nothing answers there
    slow_rails: dict[str, float] = {}  # label -> share
    frozen: tuple[str, ...] = ()  # who dies stands still: its machine answers
    load: float = 0.0


def names(count: int) -> list[str]:
    return [f"n{number:03}" for number in range(count)]


class Flight:
    def __init__(self, count: int, world: World, seed: int = 0, size: int = 0,
                 absent: dict[str, str] | None = None, machine: str = "", cores: int = 1,
                 expected_rate: float = 0.0, rails: int = 0,
                 nodes: Sequence[str] = (), groups: bool = True) -> None:
        self.world, self.noise = world, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.batches: list[tuple[Trial, ...]] = []
        absent, all_of_them = absent or {}, list(nodes) or names(count)
        members = [Member(name, machine or name, cores, "cpu", devices=max(1, rails))
                   for name in all_of_them if name not in absent]
        steps = preflight.preflight(all_of_them, members, absent, size, all_of_them[0],
                                    expected_rate=expected_rate, rails=bool(rails),
                                    groups=groups)
        outcomes = None
        while True:
            try:
                batch = steps.send(outcomes)  # type: ignore[arg-type]
            except StopIteration as ended:
                self.report: Report = ended.value
                break
            self.batches.append(batch)
            outcomes = [self._outcome(test) for test in batch]

    def _outcome(self, test: Trial) -> Outcome:
        world = self.world
        for node in test.nodes if test.kind != REACH else test.nodes[:1]:
            self.done[node] += 1
            if self.done[node] > world.dies.get(node, 1 << 30):
                return Outcome(test, False, error=f"{node} left", ran=False, gone=node,
                               still=node in world.frozen)
        if test.kind == REACH:
            cut = world.network.get(pair(*test.nodes), 1.0) == 0.0  # type: ignore[arg-type]
            return Outcome(test, test.nodes[1] not in world.dark and not cut)
        busy = 0.5 if self.noise.random() < world.load else 1.0
        if test.kind == COMPUTE:
            (node,) = test.nodes
            if node in world.wrong:
                return Outcome(test, False, 1e9, "cpu: a product of integers is not the host's")
            rate = 50e9 * world.compute.get(node, 1.0) * busy * self.noise.uniform(0.95, 1.05)
            return Outcome(test, True, rate)
        links = [pair(a, b) for a, b in combinations(test.nodes, 2)]
        places: list[Place] = [*test.nodes, *links]
        left = min([world.slow_rails.get(test.label, 1.0),
                    *(world.network.get(one, 1.0) for one in places)])
        if not left:
            return Outcome(test, False, error="no answer from the other side")
        return Outcome(test, True, 1e9 * left * busy * self.noise.uniform(0.97, 1.03))

    def named(self) -> dict[Place, str]:
        found: dict[Place, str] = {one.nodes: one.state for one in self.report.links}
        return found | {one.node: one.state for one in self.report.rows
                        if one.state in (SLOW, BROKEN)}

    def state(self, node: str) -> str:
        return next(one.state for one in self.report.rows if one.node == node)

    def reason(self, node: str) -> str:
        return next(one.reason for one in self.report.rows if one.node == node)
