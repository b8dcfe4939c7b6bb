"""The agent's shell on a virtual node: observes, steps the real core, performs what it asks.

Owns what daemon, journal, performer and the store's client own in the real agent, with their
faults: killed between any two of them, wake-ups dropped, requests and acknowledgements lost,
outcomes late or twice.  Must not decide anything: every decision is the core's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from ..core.actions import CLOSE_INCIDENT
from ..core.model import (
    FATAL,
    Beat,
    CheckVerdict,
    Decision,
    Documents,
    Effect,
    EffectOutcome,
    Event,
    Lease,
    NodeOrder,
    NodeTests,
    Now,
    Observed,
    Plan,
    Readings,
    Request,
    Runbook,
    RunCheck,
    Settings,
    Stop,
    StoreView,
    StoreWrite,
    TakeEvidence,
    readings_of,
)
from ..core.model.checked import CRITICAL, OK
from ..core.model.subject import INCIDENT, LEASE, Subject, run_subject, subject_of
from ..core.node import Node
from ..core.run import fences
from ..store.base import Conflict, StoreError
from .launcher import Launcher
from .loop import Loop
from .machine import Machine
from .store import VirtualStore

decode_plan = msgspec.json.Decoder(Plan).decode
LEAST_GAP_S = 0.01  # at most one step in 10 ms
OUTCOMES_KEPT = 64
CHECK_S = 1.0  # a round of checks
SILENT_S = 0.6  # without a word, nor an answer of its kernel: a node is not reached
RESENT_S = 20.0  # a request into a cut connection may still arrive this late


@dataclass(slots=True)
class Weather:
    """What goes wrong between an edge and the rest, while it does; set by the storm."""

    lost_ack: float = 0.0  # chance that a performed write's answer is lost
    lost_request: float = 0.0
    lost_beats: float = 0.0
    slow_s: float = 0.0  # extra delay of every message, up to
    stale_s: float = 0.0  # reads may be this far behind
    twice: float = 0.0  # chance that an outcome comes a second time
    dropped_wakes: float = 0.0
    freeze_at_put_s: float = 0.0  # the next plan leaves its machine this late, and freezes it
    kill_mid_effect: float = 0.0  # chance that a step with effects is the agent's last

    def clear(self) -> None:
        """Fair again."""
        for name in self.__slots__:
            setattr(self, name, 0.0)


class Network:
    """Who can reach whom; "store" is a place like any other."""

    def __init__(self) -> None:
        self.cut: set[tuple[str, str]] = set()
        self.changes = 0  # of ways, and of machines at their ends

    def open(self, source: str, target: str) -> bool:
        """Does a message from `source` arrive at `target`?"""
        return (source, target) not in self.cut


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
        self.journal = b""
        self.journal_stalled = False
        self.was_late = False  # its machine froze with a plan in its hand
        self.mount_dead_s: float | None = None  # since when a mount does not answer; None: it does
        self.requests: tuple[Request, ...] = ()
        self.asked_s: dict[str, float] = {}  # request without an answer -> when it came
        self.born_s = 0.0  # of this life of the agent
        self.life = 0
        self.node: Node | None = None
        self.decision = Decision()
        self.steps = 0
        self.on_step: Callable[[Edge, Now, Observed, Decision], None] = lambda *_: None
        self.on_effect: Callable[[Edge, Effect], None] = lambda *_: None
        self.filter: Callable[[Edge, Observed], Observed] | None = None  # mutants only
        self._forget()

    def _forget(self) -> None:
        """What lives in the process' memory alone."""
        self.beats: dict[tuple[str, str], Beat] = {}
        self.silent_s: dict[str, float] = {}  # peer -> since when it does not reach this node
        self.lost: frozenset[str] = frozenset()
        self.outcomes: dict[str, EffectOutcome] = {}
        self.checks: dict[str, CheckVerdict] = {}
        self.performed: set[str] = set()
        self.raw_beats: dict[tuple[str, str], Beat] = {}
        self.docs = Documents()
        self.holders: tuple[tuple[str, str], ...] = ()
        self.own_leases: dict[str, float] = {}
        self.store_up = False
        self._due_s = -1.0
        self._said: dict[str, tuple[object, ...]] = {}

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the agent process with what its journal holds."""
        if self.node is not None or not self.machine.up:
            return
        self.life += 1
        self.born_s = self.loop.now_s
        self._forget()
        self.node = Node(self.machine.name, self.settings, self.runbooks, self.journal)
        for launcher in self.launchers.values():
            launcher.wake = self.wake
            if launcher.alive:
                self.outcomes.update(launcher.outcomes)
        self.loop.note(self.machine.name, "agent starts, life %d", self.life)
        self._poll()
        self._tick(self.life)

    def kill(self, why: str) -> None:
        """kill -9: nothing in memory stays, what was sent goes its way."""
        if self.node is None:
            return
        self.node = None
        self.loop.note(self.machine.name, "agent dies: %s", why)
        self.machine.after(0.3 + 2.0 * self.rng.random(), self.start)  # systemd, or the launcher

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in this life of the agent, on this machine."""
        life = self.life

        def fire() -> None:
            if self.life == life and self.node is not None:
                action()

        self.machine.after(delay_s, fire)

    # ------------------------------------------------------------ stepping

    def _tick(self, life: int) -> None:
        if self.life != life or self.node is None:
            return
        self._poll()
        self._look_around()
        self.step()
        self._tell_peers(False)
        if self.node is not None:
            delay_s = min(1.0, max(0.1, self.decision.next_step_s))
            self.later(delay_s, lambda: self._tick(life))

    def wake(self) -> None:
        """Something urgent arrived: step soon, unless this wake-up is one that gets lost."""
        if self.node is None or self._due_s >= self.loop.now_s:
            return
        drop = self.weather.dropped_wakes
        if drop and self.wake_rng.random() < drop:
            return
        self._due_s = self.loop.now_s + LEAST_GAP_S
        self.later(LEAST_GAP_S, self._woken)

    def _woken(self) -> None:
        self._due_s = -1.0
        self.step()
        self._tell_peers(True)

    def observe(self) -> Observed:
        """All levels, as this node sees them now."""
        runs = tuple(each.view(self.born_s) for each in self.launchers.values() if each.alive)
        self.raw_beats = dict(self.beats)
        leases = tuple(
            Lease(run, who, self.own_leases.get(run, 0.0) if who == self.machine.name else 0.0)
            for run, who in self.holders)
        return Observed(
            runs=runs, events=self._kernel_log(),
            beats=tuple(replace(beat, lost=True) if beat.node in self.lost else beat
                        for beat in self.beats.values()),
            store=StoreView(self.store_up, self.docs, leases),
            outcomes=tuple(self.outcomes.values()), requests=self.requests,
            journal_stalled=self.journal_stalled, samples=self._samples(),
            checks=tuple(self.checks.values()),
        )

    def _samples(self) -> Readings:
        if self.mount_dead_s is None:
            return Readings()
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
        self.requests = (*self.requests, request)
        self.asked_s[request.id] = self.loop.now_s
        self.wake()

    def truth_beats(self) -> list[Beat]:
        """The beats of the latest observation, as they came."""
        return list(self.raw_beats.values())

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
        doomed = bool(decision.effects) and self.rng.random() < self.weather.kill_mid_effect
        point = self.rng.randrange(3) if doomed else 3
        if point == 0:
            self.kill("before the intent was journalled")
            return
        settled = {answer.id for answer in decision.answers}
        # As the daemon does: whoever asked is told that it is taken once no restart forgets it.
        if (decision.effects or settled) and not self.journal_stalled:
            self.journal = self.node.memory()
        self.requests = tuple(each for each in self.requests if each.id not in settled)
        for each in settled:
            self.asked_s.pop(each, None)
        if point == 1:
            self.kill("after the intent, before the effect")
            return
        for effect in decision.effects:
            if effect.id not in self.performed:
                self.performed.add(effect.id)
                self._perform(effect)
        if point == 2:
            self.kill("in mid effect")

    # ------------------------------------------------------------ performing

    def _perform(self, effect: Effect) -> None:
        if subject_of(effect.subject).kind != LEASE:  # renewals would fill the trace
            self.loop.note(self.machine.name, "effect %s %s: %s", effect.kind, effect.subject,
                           effect.reason)
        self.on_effect(self, effect)
        if isinstance(effect.body, StoreWrite):
            self._put(effect, effect.body)
            return
        if isinstance(effect.body, NodeOrder):  # virtual nodes have no root
            self._outcome(self.life, EffectOutcome(effect.id, False, "no unit takes it"))
            return
        if isinstance(effect.body, NodeTests):  # nor links of their own
            self._outcome(self.life, EffectOutcome(effect.id, False, "virtual links carry nothing"))
            return
        if isinstance(effect.body, RunCheck) and not effect.body.run:
            self._check(effect, effect.body)
            return
        run = effect.body.run
        node = effect.body.node if isinstance(effect.body, (Stop, TakeEvidence)) else ""
        life = self.life
        if node:
            self._ask_elsewhere(effect, run, node)
            return
        launcher = self.launchers.get(run)

        def deliver() -> None:
            if launcher is None or not launcher.alive:
                self._outcome(life, EffectOutcome(effect.id, False, "launcher is gone"))
                return
            launcher.perform(effect, lambda outcome: self._come_back(life, outcome))

        self.machine.after(self._delay_s(0.002), deliver)

    def _check(self, effect: Effect, body: RunCheck) -> None:
        """A round of checks finds the truth, and takes a moment."""
        life = self.life

        def over() -> None:
            broken, now = self.machine.fatal, self.machine.now()
            for name in body.checks:
                self.checks[name] = CheckVerdict(
                    check=name, status=CRITICAL if broken else OK, confirmed=bool(broken),
                    reason=f"virtual: {broken or 'fit'}", wall_s=now.wall_s)
            self._outcome(life, EffectOutcome(effect.id, True))

        self.machine.after(self._delay_s(CHECK_S), over)

    def _ask_elsewhere(self, effect: Effect, run: str, node: str) -> None:
        """An order for another node's launcher, by way of its agent; either way may be cut."""
        life, name = self.life, self.machine.name
        asked = next((one for one in self.peers if one.machine.name == node), None)

        def back(outcome: EffectOutcome) -> None:
            if self.network.open(node, name):
                self._come_back(life, outcome)

        def arrive() -> None:
            if asked is None or asked.node is None or not self.network.open(name, node):
                return
            launcher = asked.launchers.get(run)
            if (run, name) not in asked.holders or launcher is None or not launcher.alive:
                back(EffectOutcome(effect.id, False, "refused there"))
                return
            there = replace(effect, id=f"{effect.id}@{name}")
            launcher.perform(there, lambda said: back(replace(said, id=effect.id)))

        def deliver() -> None:
            if asked is not None:
                asked.machine.after(self._delay_s(0.002), arrive)

        self.machine.after(self._delay_s(0.002), deliver)

    def _come_back(self, life: int, outcome: EffectOutcome) -> None:
        self.machine.after(self._delay_s(0.002), lambda: self._outcome(life, outcome))
        if self.rng.random() < self.weather.twice:
            self.machine.after(self.rng.uniform(0.5, 5.0), lambda: self._outcome(life, outcome))

    def _outcome(self, life: int, outcome: EffectOutcome) -> None:
        if self.life != life or self.node is None:
            return
        if not outcome.ok:
            self.loop.note(self.machine.name, "outcome %s: %s", outcome.id, outcome.error)
        self.outcomes.pop(outcome.id, None)
        self.outcomes[outcome.id] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]
        self.wake()

    def _delay_s(self, least_s: float) -> float:
        return least_s + self.rng.random() * (0.01 + self.weather.slow_s)

    def _put(self, effect: Effect, write: StoreWrite) -> None:
        """A write over the network: the request, the answer or both may get lost."""
        name, life = self.machine.name, self.life
        sent_boot_s = self.machine.boot_s()
        lost = self.rng.random() < self.weather.lost_request
        held = self.rng.random() < 0.5
        sent_s = self.loop.now_s
        ack_lost = self.rng.random() < self.weather.lost_ack
        answered: list[bool] = []

        def arrive() -> None:
            if lost:
                return
            if not self.network.open(name, "store"):
                if held and self.loop.now_s < sent_s + RESENT_S:  # TCP sends it again, and again
                    self.loop.after(0.5, arrive)
                return
            error = ""
            try:
                self.store.put(name, write)
            except Conflict as refused:
                error = str(refused)
            except StoreError:
                error = "unavailable: the store has no leader"
            if not ack_lost and self.network.open("store", name):
                self.machine.after(self._delay_s(0.002), lambda: back(not error, error))

        def back(ok: bool, error: str) -> None:
            if answered or self.life != life or self.node is None:
                return
            answered.append(True)
            kind, run, _ = subject_of(write.key)
            if ok and kind == LEASE:
                self.own_leases[run] = sent_boot_s + self.settings.lease_s
                mine = tuple(each for each in self.holders if each[0] != run)
                self.holders = (*mine, (run, name))
            elif ok:
                self._poll()
            self._outcome(life, EffectOutcome(effect.id, ok, error))

        frozen_s, stalls = self.weather.freeze_at_put_s, bool(subject_of(write.key).run)
        if frozen_s and stalls:
            self.weather.freeze_at_put_s, self.was_late = 0.0, True
            self.loop.note("STORM", "%s: its plan arrives %.1f s late", name, frozen_s)
            if self.peers and held:
                self.machine.freeze(False)
                self.loop.after(frozen_s, self.machine.thaw)
            self.loop.after(frozen_s, arrive)
        else:
            self.loop.after(self._delay_s(0.001), arrive)
        timeout_s = min(2.0, effect.deadline_s) if effect.deadline_s > 0 else 2.0
        self.machine.after(timeout_s, lambda: back(False, "timeout: it may have been performed"))

    # ------------------------------------------------------------ the store and the peers

    def _poll(self) -> None:
        name = self.machine.name
        sent_boot_s = self.machine.boot_s()
        if not (self.store.available and self.network.open(name, "store")
                and self.network.open("store", name)):
            self.store_up = False
            return
        stale_s = self.weather.stale_s * self.rng.random() if self.weather.stale_s else 0.0
        self.docs, self.holders = self.store.read(stale_s)
        self.store_up = True
        if stale_s:
            return
        for launcher in self.launchers.values():
            if launcher.permit_s and self._stands(launcher):
                launcher.renew_permit(sent_boot_s)

    def _stands(self, launcher: Launcher) -> bool:
        doc = self.docs.get(run_subject(launcher.job.name))
        plan = decode_plan(doc.body) if doc.body else None
        return plan is not None and plan.generation == launcher.generation \
            and fences.may_renew(plan, self.machine.name)

    def changed(self) -> None:
        """The store's watch: something was written."""
        if self.node is not None:
            self.later(self._delay_s(0.005), self._watched)

    def _watched(self) -> None:
        before = self.docs
        self._poll()
        if self.docs is not before:
            self.wake()

    def _tell_peers(self, only_news: bool) -> None:
        if not self.peers or self.node is None:
            return
        for beat in self.decision.beats:
            news = (beat.generation, beat.fatal, *((rank.rank, rank.state) for rank in beat.ranks))
            if only_news and self._said.get(beat.run) == news:
                continue
            urgent = self._said.get(beat.run) != news
            self._said[beat.run] = news
            self.loop.after(self._delay_s(0.001), partial(self._send, beat, urgent))

    def _look_around(self) -> None:
        """Who is lost, as agent/peers/failure_detector.py finds it: silent, its kernel does not
        answer either, and a second node that is heard says the same."""
        now_s, name = self.loop.now_s, self.machine.name
        gone = [peer.machine.name for peer in self.peers if not self._reaches(peer)]
        self.silent_s = {peer: self.silent_s.get(peer, now_s) for peer in gone}
        others = [peer for peer in self.peers if peer.node is not None and not peer.machine.frozen
                  and self.network.open(peer.machine.name, name)]
        self.lost = frozenset(
            peer for peer in self.unreached()
            if any(peer in other.unreached() for other in others if other.machine.name != peer))

    def _reaches(self, peer: Edge) -> bool:
        """Whether its words arrive, or its kernel answers."""
        here, there = self.machine.name, peer.machine
        if not there.up or there.frozen or not self.network.open(there.name, here):
            return False
        return peer.node is not None or self.network.open(here, there.name)

    def unreached(self) -> list[str]:
        """Whom this node tells the others that it does not reach."""
        return [peer for peer, since_s in self.silent_s.items()
                if self.loop.now_s - since_s >= SILENT_S]

    def _send(self, beat: Beat, urgent: bool) -> None:
        name = self.machine.name
        for peer in self.peers:
            if peer.node is None or not peer.machine.up:
                continue
            if not self.network.open(name, peer.machine.name):
                continue
            if self.weather.lost_beats and self.rng.random() < self.weather.lost_beats:
                continue
            peer.machine.after(0.0, partial(peer.hear, beat, urgent))

    def hear(self, beat: Beat, urgent: bool) -> None:
        """A peer's beat arrives."""
        if self.node is None:
            return
        self.beats[beat.node, beat.run] = replace(beat, boot_s=self.machine.boot_s())
        if urgent:
            self.wake()
