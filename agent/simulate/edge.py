"""The agent's shell on a virtual node: observes, steps the real core, hands on what it asks.

Owns what the daemon owns in the real agent, and what it sees of the world: levels and the store;
wake-ups may get lost, and it may be killed at any moment.  What was asked is performed by
agent/actions/performer.py itself, permits are renewed by the agent's own part, and the others are
heard through peers.py.  Must not decide anything: that is the core's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from ..actions.performer import LauncherId, Performer
from ..core.actions import CLOSE_INCIDENT
from ..core.model import (
    FATAL,
    TRAINER,
    Beat,
    CheckVerdict,
    Decision,
    Documents,
    Effect,
    EffectOutcome,
    Event,
    Lease,
    Now,
    Observed,
    Plan,
    Readings,
    Request,
    Runbook,
    Settings,
    StoreView,
    StoreWrite,
    readings_of,
)
from ..core.model.subject import INCIDENT, LEASE, Subject, subject_of
from ..core.node import Node
from ..daemon.parts.permits import Permits
from ..history.journal import Answered, Memory
from ..peers.conversation import Told
from .job import RUN, START
from .journal import Kept, VirtualJournal
from .launcher import Launcher
from .loop import InvariantBroken, Loop
from .machine import Machine, Process
from .outgoing import BEFORE_INTENT, SAFE, Network, Outgoing, Weather
from .peers import VirtualPeers
from .store import OWN_ID, VirtualStore

decode_plan = msgspec.json.Decoder(Plan).decode
COMMIT_S = 0.006  # of a record to the disk, at most
LEAST_GAP_S = 0.01  # at most one step in 10 ms
NOTHING_READ = Readings()  # the very same, as between two looks of a collector


class Edge:
    """One node's agent process, its journal and its connections."""

    def __init__(self, loop: Loop, machine: Machine, store: VirtualStore, network: Network,
                 settings: Settings, runbooks: Mapping[str, Runbook], seed: int) -> None:
        self.loop, self.machine, self.store, self.network = loop, machine, store, network
        self.settings, self.runbooks = settings, runbooks
        self.rng = random.Random(seed)
        self.wake_rng = random.Random(seed + 1)  # apart, so that dropping one changes no draw
        self.weather = Weather()
        self.launchers: dict[str, Launcher] = {}
        self.peers: list[Edge] = []
        self.kept = Kept()
        self.cluster_id = OWN_ID  # as STATE/store.json says; lost with the disk
        self.journal_stalled = False  # its disk takes no writes
        self.was_late = False  # its machine froze with a plan in its hand
        self.mount_dead_s: float | None = None  # since when a mount does not answer; None: it does
        self.asked_s: dict[str, float] = {}  # request without an answer -> when it came
        self.born_s = 0.0  # of this life of the agent
        self.life = 0
        self.node: Node | None = None
        self.decision = Decision()
        self.steps = 0
        self.on_step: Callable[[Edge, Now, Observed, Decision], None] = lambda *_: None
        self.on_effect: Callable[[Edge, Effect], None] = lambda *_: None
        self.on_leave: Callable[[Edge, Effect], None] = lambda *_: None
        self.filter: Callable[[Edge, Observed], Observed] | None = None  # mutants only
        self._forget()

    def _forget(self) -> None:
        """What lives in the process' memory alone."""
        self.words = VirtualPeers(self, self.peers, self.settings.lease_s)
        self.checks: dict[str, CheckVerdict] = {}
        self.performed: set[str] = set()
        self.raw_beats: tuple[Beat, ...] = ()  # of the latest observation, as they came
        self.docs = Documents()
        self.holders: tuple[tuple[str, str], ...] = ()
        self.own_leases: dict[str, float] = {}
        self.store_up = False
        self.store_said_s: dict[str, float] = {}  # document -> when the store answered with it last
        self._due_s = -1.0
        self._settled: set[str] = set()  # requests that this life answered

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the agent process with what its journal holds."""
        if self.node is not None or not self.machine.up:
            return
        self.life += 1
        self.born_s = self.loop.now_s
        self.loop.note(self.machine.name, "agent starts, life %d", self.life)
        self.process = Process(self.machine)
        self.process.run(self._begin)

    def _begin(self) -> None:
        self._forget()
        self.outgoing = out = Outgoing(self)
        self.journal = VirtualJournal(
            self.kept, self.process, lambda: self.rng.uniform(0.001, COMMIT_S),
            lambda: self.journal_stalled, out.committed)
        self.performer = Performer(
            self.journal, out, out.order, lambda _: self.wake(), self._wrong, self._launcher_of,
            out.node_order, out.check, lambda: self.machine.now().wall_s, self.machine.boot_s)
        self.performer.elsewhere, self.performer.tests = out.elsewhere, out.tests
        self.performer.many_nodes = not self.alone
        self.node = Node(self.machine.name, self.settings, self.runbooks, self.kept.memory)
        for run, launcher in self.launchers.items():
            launcher.wake = self.wake
            for outcome in launcher.outcomes.values() if launcher.alive else ():
                out.hear(run, outcome)  # it says its last ones again
        out.reborn()
        self._poll()
        self._tick()
        self.words.begin()
        if self.node is not None and not self.alone:
            permits = Permits(self.machine.name, lambda: self.settings.lease_s,
                              lambda: self.decision.plans, out, self, self.words,
                              self.machine.boot_s)
            self.process.start(permits.run())

    def kill(self, why: str) -> None:
        """kill -9: nothing in memory stays, what was sent goes its way."""
        if self.node is None:
            return
        self.node = None
        self.process.kill()
        self.loop.note(self.machine.name, "agent dies: %s", why)
        self.machine.after(0.3 + 2.0 * self.rng.random(), self.start)  # systemd, or the launcher

    def thaw(self) -> None:
        """Its machine goes on."""
        self.network.changes += 1
        self.machine.thaw()

    def lose_disk(self) -> None:
        """Nothing is left for the next life."""
        self.kept, self.asked_s = Kept(), {}

    # ------------------------------------------------------------ stepping

    def _tick(self) -> None:
        self._poll()
        self.step()
        if self.node is not None:
            delay_s = min(1.0, max(0.1, self.decision.next_step_s))
            self.process.later(delay_s, self._tick)

    def wake(self) -> None:
        """Something urgent arrived: step soon, unless this wake-up is one that gets lost."""
        if self.node is None or self._due_s >= self.loop.now_s:
            return
        drop = self.weather.dropped_wakes
        if drop and self.wake_rng.random() < drop:
            return
        self._due_s = self.loop.now_s + LEAST_GAP_S
        self.process.later(LEAST_GAP_S, self._woken)

    def _woken(self) -> None:
        self._due_s = -1.0
        self.step()

    def observe(self) -> Observed:
        """All levels, as this node sees them now."""
        runs = tuple(each.view(self.born_s) for each in self.launchers.values() if each.alive)
        self.raw_beats = self.words.heard()
        leases = tuple(
            Lease(run, who, self.own_leases.get(run, 0.0) if who == self.machine.name else 0.0)
            for run, who in self.holders)
        return Observed(
            runs=runs, events=self._kernel_log(),
            beats=self.raw_beats,
            store=StoreView(self.store_up, self.docs, leases),
            outcomes=self.performer.outcomes(
                (effect.id for effect in self.decision.effects), self.process.time()),
            requests=tuple(self.kept.requests[one] for one in self.kept.requests
                           if one not in self._settled),
            journal_stalled=self.journal.stalled, samples=self._samples(),
            checks=tuple(self.checks.values()),
        )

    def _samples(self) -> Readings:
        if self.mount_dead_s is None:
            return NOTHING_READ
        waits_s = self.loop.now_s - self.mount_dead_s
        return readings_of((("host_mount_waiting_seconds", "mount=/data,fstype=nfs4", waits_s,
                             self.machine.boot_s()),))

    def _kernel_log(self) -> tuple[Event, ...]:
        """What the kernel of a machine with broken hardware says; again after each boot."""
        fatal, cursor = self.machine.fatal, self.machine.fatal_cursor
        if not fatal:
            return ()
        return (Event(source="host", code=fatal, class_="hardware", bucket="watch",
                      severity=FATAL, text=f"virtual: {fatal}", fault=fatal, cursor=cursor),)

    def close_incidents(self, why: str) -> None:
        """A person who repaired the hardware says so."""
        for one in self.decision.incidents:
            if one.fault == self.machine.was_fatal and one.state in ("open", "acted"):
                name = f"close-{one.id}-{self.loop.now_s:.3f}"
                self.ask(Request(id=name, action=CLOSE_INCIDENT, reason=why, by="storm",
                                 subject=str(Subject(INCIDENT, one.id))))

    def ask(self, request: Request) -> None:
        """A person asks this agent for something; it stays a level until it is answered."""
        self.kept.requests[request.id] = request
        self.asked_s[request.id] = self.loop.now_s
        self.wake()

    def step(self) -> None:
        """Observe, decide, journal, perform."""
        if self.node is None:
            return
        now, observed = self.machine.now(), self.observe()
        if self.filter is not None:
            observed = self.filter(self, observed)
        self.decision = decision = self.node.step(now, observed)
        for verdict in decision.verdicts:
            if verdict.fault == "run_not_judged":
                raise RuntimeError(verdict.reason)  # a simulation is there to find these
        self.steps += 1
        self.on_step(self, now, observed, decision)
        if not self.alone:
            self.words.say(decision)
        self._told()
        doomed = bool(decision.effects) and self.rng.random() < self.weather.kill_mid_effect
        self.outgoing.doom = self.rng.randrange(SAFE) if doomed else SAFE
        if self.outgoing.doom == BEFORE_INTENT:
            self.kill("before the intent was journalled")
        else:
            self._follow(now, decision)

    def _told(self) -> None:
        """What the disk knows to be over is over for the core."""
        pending = self.node.kept.in_flight.pending if self.node is not None else ()
        for one in pending:
            if one in self.kept.finished:
                raise InvariantBroken("outcomes_told", f"{self.machine.name}: {one}")

    def _follow(self, now: Now, decision: Decision) -> None:
        """As the daemon does: effects with the memory that knows them, then answers; whoever asked
        is told that it is taken once no restart forgets it."""
        assert self.node is not None
        fresh = self.performer.fresh(decision.effects)
        for effect in fresh:
            self.performed.add(effect.id)
            if subject_of(effect.subject).kind != LEASE:  # renewals would fill the trace
                self.loop.note(self.machine.name, "effect %s %s: %s", effect.kind, effect.subject,
                               effect.reason)
            self.on_effect(self, effect)
        self.outgoing.decided(fresh)
        memory = self.node.memory() if fresh or decision.answers else None
        self.performer.perform(fresh, memory)
        if memory is not None and decision.answers:
            answered = (Answered(one.id, one.ok, one.text, now.wall_s) for one in decision.answers)
            self.journal.append(*(() if fresh else (Memory(memory),)), *answered)
            for answer in decision.answers:
                self._settled.add(answer.id)
                self.asked_s.pop(answer.id, None)

    # ------------------------------------------------------------ performing

    @property
    def alone(self) -> bool:
        return not self.peers

    @property
    def alive(self) -> bool:
        return self.node is not None

    def leaves(self, effect: Effect) -> None:
        """An order is on its way to its launcher."""
        self.on_leave(self, effect)

    def computes(self) -> str:
        """A run of which ranks compute here; "" = none."""
        return next((run for run, launcher in self.launchers.items() if launcher.alive and any(
            rank.state in (START, RUN) for rank in launcher.ranks.values())), "")

    def sites(self) -> dict[str, Edge]:
        """Every node of the world, as tests between them meet it."""
        return {one.machine.name: one for one in (self, *self.peers)}

    def carry(self, effect: Effect, node: str, back: Callable[[EffectOutcome], None]) -> None:
        """To another node's agent and back, as agent/daemon/other_nodes.py does; either way may be
        cut."""
        name = self.machine.name

        def arrive(asked: Edge) -> None:
            if asked.node is not None and self.network.open(name, node):
                there = replace(effect, id=f"{effect.id}@{name}",
                                body=replace(effect.body, node=""))
                asked.obey(there, name, answered)

        def answered(outcome: EffectOutcome) -> None:
            if self.network.open(node, name):
                back(outcome)

        for peer in self.peers:
            if peer.machine.name == node:
                peer.machine.after(self.delay_s(0.004), partial(arrive, peer))

    def obey(self, effect: Effect, node: str, back: Callable[[EffectOutcome], None]) -> None:
        """Another node asks for this: who leads the run may."""
        async def obeyed() -> None:
            back(await self.performer.obey(effect))

        if (subject_of(effect.subject).run, node) not in self.holders:
            back(EffectOutcome(effect.id, False, f"{node} does not lead the run"))
            return
        self.outgoing.decided([effect])
        self.process.start(obeyed())

    def joined(self, launcher: Launcher) -> None:
        """A launcher connects."""
        launcher.wake = self.wake
        self.launchers[launcher.job.name] = launcher
        if self.node is not None:
            self.process.run(lambda: self.performer.launcher_came(launcher.job.name))
        self.wake()

    def _launcher_of(self, run: str) -> LauncherId:
        launcher = self.launchers.get(run)
        return (0, 0.0) if launcher is None else (1, launcher.registered_boot_s)

    def _wrong(self, part: str, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            raise error

    def written(self, write: StoreWrite, sent_boot_s: float) -> None:
        """The store took it, and its answer arrived."""
        name, (kind, run, _) = self.machine.name, subject_of(write.key)
        if kind == LEASE:
            self.own_leases[run] = sent_boot_s + self.settings.lease_s
            self.holders = (*(each for each in self.holders if each[0] != run), (run, name))
        else:
            self._poll()

    def delay_s(self, least_s: float) -> float:
        """How long a message takes."""
        return least_s + self.rng.random() * (0.01 + self.weather.slow_s)

    # ------------------------------------------------------------ the store and the peers

    def _poll(self) -> None:
        name = self.machine.name
        if not (self.store.available and self.network.open(name, "store")
                and self.network.open("store", name)) or self.store.refused(self.cluster_id):
            self.store_up = False
            return
        stale_s = self.weather.stale_s * self.rng.random() if self.weather.stale_s else 0.0
        self.docs, self.holders = self.store.read(stale_s)
        self.store_up = True

    def changed(self) -> None:
        """The store's watch: something was written."""
        if self.node is not None:
            self.process.later(self.delay_s(0.005), self._watched)

    def _watched(self) -> None:
        before = self.docs
        self._poll()
        if self.docs is not before:
            self.wake()

    @property
    def lost(self) -> frozenset[str]:
        """Whom this node holds lost."""
        return self.words.lost

    def beats_came(self, told: Told, is_news: bool) -> None:
        """Another node's word changed something."""
        if is_news:
            self.wake()

    def nodes_lost(self, nodes: frozenset[str]) -> None:
        """Nodes are lost, or back."""
        self.wake()

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        """Virtual agents ask one another for nothing but by `carry`."""
        return {"refused": f"{node} asks {question!r}"}

    # ------------------------------------------------------------ permits

    def scripts(self) -> list[tuple[str, int]]:
        """(run, generation that runs) of each script here."""
        return [(run, launcher.generation) for run, launcher in self.launchers.items()
                if launcher.alive and launcher.job.grade != TRAINER]

    def order(self, run: str, fields: dict[str, object]) -> str:
        """A packet to a launcher that is no effect: its permit."""
        launcher = self.launchers.get(run)
        if launcher is None or not launcher.alive:
            return "no launcher"
        generation, until_ns = fields["generation"], fields["until_ns"]
        assert isinstance(generation, int) and isinstance(until_ns, int)
        self.machine.after(self.delay_s(0.002),
                           partial(launcher.renew_permit, generation, until_ns))
        return ""
