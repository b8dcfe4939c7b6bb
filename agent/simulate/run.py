"""Runs one seed of a storm: build, break, heal, and judge whether all goes on.

Owns the course of a simulation and its report.  `run_storm` is the API that `holdfast simulate`
and the tests use; a broken invariant is part of the report, never an exception of the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from . import liveness
from .cluster import Cluster, Shape, build
from .faults import FAULTS, heal
from .loop import InvariantBroken
from .storms import SINGLE, STORMS, Storm, shipped

RESTARTS = 3  # what a launcher of the simulator asks for; one more generation is the first
SPOILT = 2  # checkpoints may be refused as bad: that costs no restart
# Faults that are answered by a new generation without charging the run's restarts.
UNCHARGED = ("operator", "launcher_killed", "node_crashed", "node_gone", "node_fatal",
             "common_cause", "commit_spoilt", "folder_moved", "drained", "peers_cut",
             "leader_and_another", "joins", "replaced_unseen", "unfit_unseen")

Hook = Callable[[Cluster], None]


@dataclass
class Report:
    """What became of one seed.  `losses_s` is node-seconds by ledger category."""

    seed: int
    storm: str
    ok: bool = True
    invariant: str = ""
    detail: str = ""
    trace: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    events: int = 0
    ettr: float = 0.0  # share of run-seconds spent on steps that were kept
    losses_s: dict[str, float] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    struck: int = 0  # ranks that a fault found running and ended
    generations: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)  # run -> how it stands

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """What a failing seed prints: the seed, the invariant, the last events."""
        head = f"seed {self.seed} of storm {self.storm}: "
        if self.ok:
            return head + ", ".join(f"{run} {how}" for run, how in self.outcomes.items())
        again = f"python -m holdfast.agent.simulate --storm {self.storm} --seed {self.seed} --trace"
        return "\n".join([head + f"{self.invariant} does not hold: {self.detail}",
                          *self.trace, f"again: {again}"])


def shape_of(seed: int, storm: str | Storm) -> Shape:
    """The world of one seed."""
    kind = STORMS[storm] if isinstance(storm, str) else storm
    return kind.shape(_rng(seed))


def _rng(seed: int) -> random.Random:
    return random.Random(seed * 104729 + 7)


def run_storm(seed: int, storm: str | Storm = "default", *, shape: Shape | None = None,
              dropped_wakes: float | None = None, hook: Hook | None = None,
              sink: Callable[[str], None] | None = None) -> Report:
    """Run `seed` of `storm`.  `hook` may alter the built world (mutants do); `sink` gets every
    trace line as it happens."""
    kind = STORMS[storm] if isinstance(storm, str) else storm
    rng = _rng(seed)
    where = kind.shape(rng) if shape is None else shape
    single = where.nodes == 1
    cluster = build(seed, where, SINGLE if single else kind.many, shipped(), sink)
    drops = kind.dropped_wakes if dropped_wakes is None else dropped_wakes
    if hook is not None:
        hook(cluster)
    report = Report(seed, kind.name)
    for when_s, name, u, v in kind.draw(rng):
        report.faults[name] = report.faults.get(name, 0) + 1
        cluster.loop.at(when_s, partial(FAULTS[name], cluster, u, v))
    free = sum(report.faults.get(name, 0) for name in UNCHARGED)
    for job in cluster.jobs.values():
        job.patience = RESTARTS + 1 + SPOILT + free
    try:
        cluster.weather.dropped_wakes = drops
        cluster.loop.run_until(kind.storm_s)
        heal(cluster)
        cluster.weather.dropped_wakes = drops
        liveness.settle(cluster, kind)
    except InvariantBroken as broken:
        report.ok, report.invariant, report.detail = False, broken.invariant, broken.detail
        report.trace = cluster.loop.trace.lines()
    _fill(report, cluster)
    return report


def _fill(report: Report, cluster: Cluster) -> None:
    report.virtual_s = cluster.loop.now_s
    report.events = cluster.loop.events
    useful = sum(job.useful_s for job in cluster.jobs.values())
    report.ettr = useful / max(1e-9, report.virtual_s * len(cluster.jobs))
    report.struck = cluster.struck
    report.generations = sum(cluster.monitor.restarts.values())
    for edge in cluster.edges.values():
        for category, seconds in edge.decision.ledger:
            report.losses_s[category] = report.losses_s.get(category, 0.0) + seconds
    for name, job in cluster.jobs.items():
        report.outcomes[name] = liveness.standing(cluster, job)
