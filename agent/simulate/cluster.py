"""A virtual cluster, drawn from a seed: machines, runs, launchers, agents and a store.

Owns how a world is built and wired.  Worlds are small by default (one machine, or a few members
with spares), because most faults of a protocol show with three nodes; `Shape` makes them as
large as wanted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ..core.model import SCRIPT, TRAINER, Plan, Resume, Runbook, Settings, run_subject
from .edge import Edge, decode_plan
from .job import RUN, Gang, Job, Rank
from .launcher import Launcher
from .loop import Loop, Trace
from .machine import Machine
from .monitor import Monitor
from .outgoing import Network, Weather
from .store import VirtualStore

UP_DAYS_MAX = 30.0  # machines were booted at any time within this


@dataclass(frozen=True)
class Shape:
    """How large a world is."""

    members: int = 1
    spares: int = 0
    runs: int = 1
    nproc: int = 2
    least: int = 0  # nodes with which a run goes on; 0 = all its members
    idle: int = 0  # nodes that no run is on
    gpus: bool = False  # each node has as many as one run takes there

    @property
    def nodes(self) -> int:
        return self.members + self.spares + self.idle

    @property
    def need(self) -> int:
        return self.least or self.members


@dataclass
class Cluster:
    """Everything of one simulated world."""

    loop: Loop
    shape: Shape
    store: VirtualStore
    network: Network
    monitor: Monitor
    settings: Settings
    weather: Weather
    rng: random.Random
    machines: dict[str, Machine] = field(default_factory=dict)
    edges: dict[str, Edge] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    left: list[Launcher] = field(default_factory=list)
    struck: int = 0  # ranks that a fault ended; one drawn before any rank runs ends none

    @property
    def single(self) -> bool:
        """One node is a world of one member: no leases, no beats."""
        return self.settings.single_node

    def launchers(self, run: str) -> list[Launcher]:
        """Every launcher of `run` that still lives."""
        found = (edge.launchers.get(run) for edge in self.edges.values())
        return [each for each in found if each is not None and each.alive]

    def restarts(self, run: str) -> int:
        """What the caller of `run` allows."""
        return max((each.max_restarts for edge in self.edges.values()
                    for name, each in edge.launchers.items() if name == run), default=0)

    def ranks(self) -> list[tuple[Job, Rank]]:
        """Every living rank, in a fixed order."""
        return [(launcher.job, rank) for name in self.jobs for launcher in self.launchers(name)
                for rank in launcher.ranks.values() if rank.state != "ended"]

    def computing(self, job: Job) -> set[str]:
        """The nodes on which ranks of a run are running."""
        return {rank.machine.name for which, rank in self.ranks()
                if which is job and rank.state == RUN}

    def scripts_over_nodes(self) -> bool:
        """Scripts over several nodes are fenced by permits, which need a clock that runs."""
        return not self.single and any(job.grade != TRAINER for job in self.jobs.values())

    def launch(self, job: Job, edge: Edge) -> Launcher:
        """The caller starts `holdfast run` on a machine."""
        old = edge.launchers.get(job.name)
        if old is not None:
            self.left.append(old)
        launcher = Launcher(job, edge.machine, self.shape.nproc, self.rng, self.shape.members,
                            self.shape.need)
        launcher.devices = tuple(
            f"gpu-{number}" for number in range(self.shape.nproc) if self.shape.gpus)
        launcher.on_start = self.monitor.starting
        launcher.on_delete = self.monitor.deleted
        edge.joined(launcher)
        return launcher

    def cut(self, ways: set[tuple[str, str]], for_s: float) -> None:
        """Nothing passes these ways, each from one to the other, for so long."""
        self.loop.note("STORM", f"network: cut {sorted(ways)[:4]}")
        self.monitor.disturbed_s = max(self.monitor.disturbed_s, self.loop.now_s + for_s)
        self.network.cut |= ways
        self.network.changes += 1

        def mend() -> None:
            self.network.cut.difference_update(ways)
            self.network.changes += 1

        self.loop.after(for_s, mend)

    def cut_at_write(self, job: Job, nodes: set[str], for_s: float, more: int) -> None:
        """Cuts these nodes off from the store and all others in the moment in which a document of
        the run is written whose generation is at least that much higher: they do not read it."""
        until_s, key = self.loop.now_s + for_s, str(run_subject(job.name))
        before = self.store.docs[key]
        wanted = decode_plan(before.body).generation + more

        def written() -> None:
            doc = self.store.docs[key]
            if doc.version > before.version and decode_plan(doc.body).generation >= wanted:
                self.store.watchers.remove(written)
                rest = ("store", *(one for one in self.machines if one not in nodes))
                self.cut({pair for a in nodes for b in rest for pair in ((a, b), (b, a))},
                         max(0.0, until_s - self.loop.now_s))

        self.store.watchers.insert(0, written)

    def changed(self) -> None:
        """The store tells whoever watches that something was written."""
        for edge in self.edges.values():
            edge.changed()

    # ------------------------------------------------------------ what jobs report

    def broke(self, job: Job, gang: Gang, culprit: Rank | None, why: str) -> None:
        """A generation broke: tell the launchers that can notice, each when it can."""
        for launcher in self.launchers(job.name):
            here = [rank for rank in launcher.ranks.values() if rank.gang is gang]
            if not here:
                continue
            near = culprit is not None and culprit.machine is launcher.machine
            delay_s = self.rng.uniform(0.01, 0.06) if near else self.rng.uniform(0.05, 0.4)
            launcher.machine.after(delay_s, partial(launcher.leave_generation, gang, why))

    def snapshot(self, job: Job, gang: Gang) -> None:
        """Each launcher holds the shards of its own ranks."""
        machines = {rank.machine.name for rank in gang.ranks.values()}
        for launcher in self.launchers(job.name):
            if launcher.machine.name in machines:
                launcher.snapshot = (gang.generation, gang.step)

    def load_snapshot(self, job: Job, gang: Gang) -> bool:
        """Do the launchers of this gang hold the snapshot that the plan names?"""
        wanted = (gang.resume.generation, gang.resume.step)
        names = {rank.machine.name for rank in gang.ranks.values()}
        held = {each.machine.name for each in self.launchers(job.name) if each.snapshot == wanted}
        return names <= held

    def level(self, job: Job) -> None:
        """A level of a run changed."""
        for launcher in self.launchers(job.name):
            if launcher.startup_s == 0.0 and job.newest() is not None and launcher.ranks:
                launcher.first_step()
            launcher.wake()


def build(seed: int, shape: Shape, settings: Settings, runbooks: dict[str, Runbook],
          sink: Callable[[str], None] | None = None) -> Cluster:
    """A world with its agents started and its runs registered."""
    rng = random.Random(seed * 7919 + 13)
    loop = Loop(Trace(sink))
    store = VirtualStore(loop, settings.lease_s, 1.0 + rng.uniform(-0.01, 0.01))
    cluster = Cluster(loop, shape, store, Network(), Monitor(loop, store, settings.single_node),
                      settings, Weather(), rng)
    names = [f"node-{number}" for number in range(shape.nodes)]
    for name in names:
        machine = Machine(loop, name, rng.uniform(-0.005, 0.005), rng.uniform(-30, 30),
                          rng.uniform(60.0, UP_DAYS_MAX * 86400.0))
        edge = Edge(loop, machine, store, cluster.network, settings, runbooks, rng.getrandbits(40))
        edge.weather = cluster.weather
        edge.on_step = cluster.monitor.decided
        edge.on_leave = cluster.monitor.leaves
        cluster.machines[name], cluster.edges[name] = machine, edge
    edges = list(cluster.edges.values())
    for edge in edges:
        edge.peers = [each for each in edges if each is not edge]
    cluster.monitor.edges = cluster.edges
    cluster.monitor.network = cluster.network
    store.watchers.append(cluster.changed)
    for number in range(shape.runs):
        _add_run(cluster, f"run-{number}", names[:shape.members + shape.spares], shape)
    for edge in edges:
        loop.after(rng.uniform(0.0, 0.5), edge.start)
    return cluster


def _add_run(cluster: Cluster, run: str, names: list[str], shape: Shape) -> None:
    rng = cluster.rng
    grade = TRAINER if rng.random() < 0.75 else SCRIPT
    job = Job(cluster.loop, rng, run, grade)
    job.reachable = lambda a, b: cluster.network.open(a.name, b.name)
    job.on_break = lambda gang, rank, why: cluster.broke(job, gang, rank, why)
    job.on_snapshot = lambda gang: cluster.snapshot(job, gang)
    job.load_snapshot = lambda gang: cluster.load_snapshot(job, gang)
    job.on_commit = lambda which, _generation, _step: cluster.monitor.chain(which)
    job.on_step = cluster.monitor.stepped
    job.on_resume = cluster.monitor.resumed
    job.on_level = cluster.level
    cluster.jobs[run] = cluster.monitor.jobs[run] = job
    if not cluster.single:
        _register(cluster, run, names, shape)
    for name in names:
        cluster.launch(job, cluster.edges[name])


def _register(cluster: Cluster, run: str, names: list[str], shape: Shape) -> None:
    """The run's first document: who may lead it, and how wide it is."""
    members = tuple(names[:shape.members])
    ranks = tuple((number, members[number // shape.nproc])
                  for number in range(shape.members * shape.nproc))
    # Spares come along later as often as not, and must be named before they may lead.
    spares = tuple(names[shape.members:]) if cluster.rng.random() < 0.5 else ()
    plan = Plan(run=run, generation=0, members=members, ranks=ranks, resume=Resume("fresh"),
                reason="registered", spares=spares)
    cluster.store.seed(run_subject(run), msgspec.json.encode(plan))
