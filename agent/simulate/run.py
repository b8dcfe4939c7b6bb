"""Runs one seed of a storm: build, break, heal, and judge whether all goes on.

Owns the course of a simulation and its report.  `run_storm` is the API that `holdfast simulate`
and the tests use; a broken invariant is part of the report, never an exception of the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from ..core.model import node_subject
from .cluster import Cluster, Shape, build
from .faults import FAULTS, heal
from .job import Job
from .launcher import Launcher
from .loop import InvariantBroken
from .monitor import excluded
from .storms import MANY, RUNBOOKS, SINGLE, STORMS, Storm

LIVE_STEPS = 3  # new steps after the storm that count as going on
LOOK_EVERY_S = 4.0
RESTARTS = 3  # what a launcher of the simulator asks for; one more generation is the first
SPOILT = 2  # checkpoints may be refused as bad: that costs no restart
# Faults that are answered by a new generation without charging the run's restarts.
UNCHARGED = ("operator", "launcher_killed", "node_crashed", "node_gone", "node_fatal",
             "common_cause", "commit_spoilt")

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


def run_storm(seed: int, storm: str | Storm = "default", *, shape: Shape | None = None,
              dropped_wakes: float | None = None, hook: Hook | None = None,
              sink: Callable[[str], None] | None = None) -> Report:
    """Run `seed` of `storm`.  `hook` may alter the built world (mutants do); `sink` gets every
    trace line as it happens."""
    kind = STORMS[storm] if isinstance(storm, str) else storm
    rng = random.Random(seed * 104729 + 7)
    where = kind.shape(rng) if shape is None else shape
    single = where.members + where.spares == 1
    cluster = build(seed, where, SINGLE if single else MANY, RUNBOOKS, sink)
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
        _settle(cluster, kind)
    except InvariantBroken as broken:
        report.ok, report.invariant, report.detail = False, broken.invariant, broken.detail
        report.trace = cluster.loop.trace.lines()
    _fill(report, cluster)
    return report


def _settle(cluster: Cluster, storm: Storm) -> None:
    """After the storm every run must go on, or be over for a stated reason, within `calm_s`."""
    end_s = cluster.loop.now_s
    marks = {name: job.best for name, job in cluster.jobs.items()}
    while cluster.loop.now_s < end_s + storm.calm_s:
        cluster.loop.run_until(cluster.loop.now_s + LOOK_EVERY_S)
        if all(_settled(cluster, job, marks[name]) for name, job in cluster.jobs.items()):
            return
    for name, job in cluster.jobs.items():
        if not _settled(cluster, job, marks[name]):
            raise InvariantBroken("all_goes_on", f"{name} stands still {storm.calm_s:.0f} s after "
                                  f"the storm: {_why(cluster, job)}")


def _settled(cluster: Cluster, job: Job, mark: int) -> bool:
    how = standing(cluster, job)
    if how.startswith(("finished", "waiting")):
        return True
    return how == "progress" and job.best >= mark + LIVE_STEPS


def standing(cluster: Cluster, job: Job) -> str:
    """ "finished N", "waiting for nodes" (rightly), "progress" or "still"."""
    truth = cluster.monitor.runs.get(job.name)
    newest = max(truth.plans, default=0) if truth is not None else 0
    plan = truth.plans[newest] if truth is not None and truth.plans else None
    if plan is not None and plan.finished >= 0:
        return f"finished {plan.finished}" if plan.reason and not _still_there(cluster, job) \
            else "still"
    alive = cluster.launchers(job.name)
    gone = [each for each in everyone(cluster, job) if each.exit_code is not None]
    few = len(alive) < cluster.shape.members  # a rest cannot train: the run was ended
    if few and gone and all(each.exit_reason for each in gone):
        return f"finished {max(each.exit_code or 0 for each in gone)}"
    if _short_of_nodes(cluster, job, alive):
        return "waiting for nodes"
    gang = job.newest()
    late_s = cluster.loop.now_s - job.last_progress_s
    current = gang is not None and gang.generation == newest and not gang.broken
    return "progress" if current and late_s < 3 * job.step_s + 1 else "still"


def _short_of_nodes(cluster: Cluster, job: Job, alive: list[Launcher]) -> bool:
    """Truly fewer fit nodes than the run needs, and somebody says so."""
    docs = cluster.store.docs
    fit = [each for each in alive if each.machine.up and not each.machine.fatal
           and not ((doc := docs.get(node_subject(each.machine.name))) and excluded(doc.body))]
    said = any(run == job.name and ("waiting for nodes" in why or "no spare" in why)
               for edge in cluster.edges.values() for run, why in edge.decision.reasons)
    return len(fit) < cluster.shape.members and said


def _still_there(cluster: Cluster, job: Job) -> bool:
    return any(rank.state != "ended" for launcher in cluster.launchers(job.name)
               for rank in launcher.ranks.values())


def everyone(cluster: Cluster, job: Job) -> list[Launcher]:
    """Every launcher that this run ever had."""
    now = [edge.launchers[job.name] for edge in cluster.edges.values()
           if job.name in edge.launchers]
    return now + [each for each in cluster.left if each.job is job]


def _why(cluster: Cluster, job: Job) -> str:
    said = []
    for name, edge in cluster.edges.items():
        for run, reason in edge.decision.reasons:
            if run == job.name:
                said.append(f"{name} says: {reason}")
    states = [f"{rank.rank}@{launcher.machine.name}:{rank.state}"
              for launcher in cluster.launchers(job.name) for rank in launcher.ranks.values()]
    return f"best step {job.best}; ranks {' '.join(states) or 'none'}; {'; '.join(said)}"


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
        report.outcomes[name] = standing(cluster, job)
