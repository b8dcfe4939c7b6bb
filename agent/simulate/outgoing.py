"""What leaves a virtual agent and what comes back: orders, writes to the store, checks.

Owns the ways between the performer, which is the real one, and the virtual world, with their
faults: the agent killed between any two effects, requests and answers lost, slow, late or twice.
It holds what leaves, and what a new life knows, against what is on the disk at that moment, and
performs nothing itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from ..actions.performer import JOURNAL_WAIT_S, OUTCOMES_MAX, Performer
from ..core.model import (
    CheckVerdict,
    Doc,
    Effect,
    EffectOutcome,
    NodeOrder,
    NodeTests,
    RunCheck,
    Stop,
    StoreWrite,
    TakeEvidence,
)
from ..core.model.checked import CRITICAL, OK
from ..core.model.subject import LEASE, subject_of
from ..history.journal import needs_sync
from ..launchers.protocol import Outcome
from ..store.base import Conflict, StoreError
from . import node_tests
from .journal import Kept, VirtualJournal
from .launcher import Launcher, order_of
from .loop import InvariantBroken, Loop
from .machine import Machine, Process
from .node_tests import Site
from .store import VirtualStore

Answer = TypeVar("Answer")
CHECK_S = 1.0  # a round of checks
TESTS_S = 4.0  # of tests between nodes
ANSWER_S = 2.0  # the store's client waits so long for a write
READ_S = 1.2  # and for a document: as much less than a lease as etcd's client (CALL_S)
START = "/start/"  # in the id of one
RESENT_S = 20.0  # a request into a cut connection may still arrive this late
BEFORE_INTENT, BEFORE_EFFECT, MID_EFFECT, SAFE = range(4)  # when a step's agent is killed


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
        self.heals = 0

    def heal(self) -> None:
        """Every way is open, and stays so."""
        self.cut.clear()
        self.heals += 1
        self.changes += 1

    def open(self, source: str, target: str) -> bool:
        """Does a message from `source` arrive at `target`?"""
        return (source, target) not in self.cut


class Shell(Protocol):
    """What is needed of agent/simulate/edge.py."""

    loop: Loop
    machine: Machine
    store: VirtualStore
    network: Network
    weather: Weather
    rng: random.Random
    launchers: dict[str, Launcher]
    checks: dict[str, CheckVerdict]
    kept: Kept
    cluster_id: str
    store_said_s: dict[str, float]
    process: Process
    journal: VirtualJournal
    performer: Performer
    was_late: bool

    @property
    def alone(self) -> bool: ...

    def kill(self, why: str) -> None: ...

    def leaves(self, effect: Effect) -> None: ...

    def thaw(self) -> None: ...

    def delay_s(self, least_s: float) -> float: ...

    def sites(self) -> Mapping[str, Site]: ...

    def written(self, write: StoreWrite, sent_boot_s: float) -> None: ...

    def carry(self, effect: Effect, node: str, back: Callable[[EffectOutcome], None]) -> None: ...


class Outgoing:
    """The ways of one life of an agent.  It is the performer's store, too."""

    def __init__(self, edge: Shell) -> None:
        self.edge, self.process, self.kept = edge, edge.process, edge.kept
        self.doom = SAFE
        self._decided: dict[str, tuple[Effect, float]] = {}  # what the performer was given, when
        self._writes: dict[int, str] = {}  # identity of a body -> effect

    # ------------------------------------------------------------ judged

    def decided(self, effects: Iterable[Effect]) -> None:
        """These are about to be performed."""
        for effect in effects:
            self._decided.setdefault(effect.id, (effect, self.process.time()))
            self._writes[id(effect.body)] = effect.id

    def committed(self) -> None:
        """What was queued lasts from now on."""
        if self.doom == BEFORE_EFFECT:
            self.edge.kill("after the intent, before the effect")

    def _leaves(self, id: str) -> None:
        """The promises of the performer, held against the disk."""
        edge, kept, name = self.edge, self.kept, self.edge.machine.name
        effect, decided_s = self._decided[id]
        waited_s = self.process.time() - decided_s
        if subject_of(effect.subject).kind == LEASE:
            if waited_s > 0.0:
                raise InvariantBroken("leases_first", f"{name}: {id} waited {waited_s:.3f} s")
            return
        lasts = id in kept.intents
        excused = edge.journal.stalled or waited_s > JOURNAL_WAIT_S - 1e-6
        if not lasts and (needs_sync(effect) or not excused):
            raise InvariantBroken("intent_first", f"{name}: {id} leaves, and no intent is kept")
        if id in kept.left:
            raise InvariantBroken("effect_twice", f"{name}: {id} leaves a second time")
        if lasts:
            kept.left.add(id)

    def _left(self) -> None:
        if self.doom == MID_EFFECT:
            self.edge.kill("in mid effect")

    # ------------------------------------------------------------ launchers

    def order(self, run: str, fields: dict[str, object]) -> str:
        """One packet to a launcher; why it could not be sent, or ""."""
        launcher = self.edge.launchers.get(run)
        if launcher is None or not launcher.alive:
            return "no launcher"
        if self.process.alive:
            effect = order_of(run, fields)
            self._leaves(effect.id)
            self.edge.leaves(effect)
            self.edge.machine.after(self.edge.delay_s(0.002),
                                    partial(self._arrive, run, launcher, effect, fields))
            self._left()
        return ""

    def _arrive(
        self, run: str, launcher: Launcher, effect: Effect, fields: dict[str, object]
    ) -> None:
        if launcher.alive:
            launcher.perform(effect, partial(self._answered, run), fields)

    def _answered(self, run: str, outcome: EffectOutcome) -> None:
        edge = self.edge
        back = partial(self.hear, run, outcome)
        self.process.later(edge.delay_s(0.002), back)
        if edge.rng.random() < edge.weather.twice:
            self.process.later(edge.rng.uniform(0.5, 5.0), back)

    def hear(self, run: str, outcome: EffectOutcome) -> None:
        """A launcher says what became of an order."""
        performer, name = self.edge.performer, self.edge.machine.name
        started = self.kept.started.setdefault(run, set())
        if outcome.ok and START in outcome.id:
            started.add(_generation(outcome.id))
        performer.launcher_outcome(
            run, Outcome(outcome.id, outcome.ok, outcome.error, outcome.detail))
        counted = sum(count for (what, labels), count in performer.counters.items()
                      if what == "restarts" and labels[0] == run)
        if counted > len(started):
            raise InvariantBroken("restarts_counted", f"{name}: {counted:g} restarts of {run}, "
                                  f"and generations {sorted(started)} were started")

    def reborn(self) -> None:
        """This life has begun, and every launcher has said its last outcomes again: what they and
        the disk know, the performer tells, and has counted."""
        performer, name = self.edge.performer, self.edge.machine.name
        told = {one.id: one.ok for one in performer.outcomes((), self.process.time())}
        known = {id: one.ok for id, one in self.kept.finished.items()}
        for launcher in self.edge.launchers.values():
            known |= {id: one.ok for id, one in launcher.outcomes.items() if launcher.alive
                      and id in self.kept.intents and id not in known}
        newest = list(known.items())[-OUTCOMES_MAX // 2:]
        for id, ok in newest:
            if told.get(id) is not ok:
                raise InvariantBroken("outcomes_kept", f"{name}: {id} ended "
                                      f"{'well' if ok else 'badly'}, told is {told.get(id)}")
        starts = {self.kept.intents[id].subject: id for id, ok in newest if ok and START in id}
        for subject, id in starts.items():
            key = "restarted_to", (subject_of(subject).run,)
            if performer.counters.get(key, 0.0) < _generation(id):
                raise InvariantBroken("restarts_counted", f"{name}: {id} is counted nowhere")

    # ------------------------------------------------------------ other nodes

    async def elsewhere(self, effect: Effect) -> EffectOutcome:
        """By way of another node's agent."""
        assert isinstance(effect.body, (Stop, TakeEvidence))
        answer: asyncio.Future[EffectOutcome] = self.process.create_future()
        if self.process.alive:
            self._leaves(effect.id)
            self.edge.carry(effect, effect.body.node, lambda said: self.process.later(
                self.edge.delay_s(0.002), partial(_settle, answer, said)))
            self._left()
        try:
            async with asyncio.timeout(effect.deadline_s):
                said = await answer
        except TimeoutError:
            return EffectOutcome(effect.id, False, f"{effect.body.node}: no answer")
        return replace(said, id=effect.id)

    async def tests(self, effect: Effect, body: NodeTests) -> EffectOutcome:
        """As agent/daemon/peer_rounds.py arranges them: who cannot be asked is unknown."""
        edge, sites = self.edge, self.edge.sites()
        if self.process.alive:
            self._leaves(effect.id)
            self._left()
        name = edge.machine.name
        away = {one: why for one in body.nodes
                if (why := node_tests.comes(sites[one], name, edge.network))}
        await asyncio.sleep(edge.delay_s(TESTS_S))
        if len(away) > len(body.nodes) - 2:
            return EffectOutcome(effect.id, False, "; ".join(away.values()))
        found = node_tests.tested(sites, body.nodes, away, edge.network, edge.rng)
        return EffectOutcome(effect.id, True, "", msgspec.json.encode(found).decode())

    # ------------------------------------------------------------ the node

    async def node_order(self, effect: Effect, body: NodeOrder) -> str:
        """Virtual nodes have no root."""
        return "no unit takes it"

    async def check(self, effect: Effect, body: RunCheck) -> str:
        """A round of checks finds the truth, and takes a moment."""
        edge = self.edge
        if self.process.alive:
            self._leaves(effect.id)
            self._left()
        await asyncio.sleep(edge.delay_s(CHECK_S))
        broken, now = edge.machine.fatal, edge.machine.now()
        for name in body.checks:
            edge.checks[name] = CheckVerdict(
                check=name, status=CRITICAL if broken else OK, confirmed=bool(broken),
                reason=f"virtual: {broken or 'fit'}", wall_s=now.wall_s)
        return ""

    # ------------------------------------------------------------ the store

    async def put(self, write: StoreWrite) -> int:
        """A write over the network: the request, the answer or both may get lost."""
        answer: asyncio.Future[int] = self.process.create_future()
        sent_boot_s = self.edge.machine.boot_s()
        if self.process.alive:
            self._leaves(self._writes[id(write)])
            self._send(write, answer)
            self.process.later(ANSWER_S, partial(
                _settle, answer, TimeoutError("it may have been performed")))
            self._left()
        version = await answer
        self.edge.written(write, sent_boot_s)
        return version

    async def read(self, key: str) -> Doc:
        """One document as the store has it now."""
        edge, name = self.edge, self.edge.machine.name
        answer: asyncio.Future[Doc] = self.process.create_future()
        lost = edge.rng.random() < max(edge.weather.lost_request, edge.weather.lost_ack)

        def arrive() -> None:
            if not lost and edge.store.available and edge.network.open(name, "store") \
                    and edge.network.open("store", name) \
                    and not edge.store.refused(edge.cluster_id):
                edge.store_said_s[key] = edge.loop.now_s
                doc = edge.store.docs.get(key, Doc(key, 0, b""))
                self.process.later(edge.delay_s(0.002), partial(_settle, answer, doc))

        edge.loop.after(edge.delay_s(0.001), arrive)
        async with asyncio.timeout(READ_S):
            return await answer

    def _send(self, write: StoreWrite, answer: asyncio.Future[int]) -> None:
        edge, weather, name = self.edge, self.edge.weather, self.edge.machine.name
        lost = edge.rng.random() < weather.lost_request
        held = edge.rng.random() < 0.5
        sent_s = edge.loop.now_s
        ack_lost = edge.rng.random() < weather.lost_ack

        def arrive() -> None:
            if lost:
                return
            if not edge.network.open(name, "store"):
                if held and edge.loop.now_s < sent_s + RESENT_S:  # TCP sends it again, and again
                    edge.loop.after(0.5, arrive)
                return
            said: int | Exception
            why = edge.store.refused(edge.cluster_id)
            try:
                said = StoreError(why) if why else edge.store.put(name, write)
            except (Conflict, StoreError) as refused:
                said = refused
            if not ack_lost and edge.network.open("store", name):
                self.process.later(edge.delay_s(0.002), partial(_settle, answer, said))

        frozen_s, stalls = weather.freeze_at_put_s, bool(subject_of(write.key).run)
        if frozen_s and stalls:
            weather.freeze_at_put_s, edge.was_late = 0.0, True
            edge.loop.note("STORM", "%s: its plan arrives %.1f s late", name, frozen_s)
            if held and not edge.alone:
                edge.machine.freeze(False)
                edge.network.changes += 1
                edge.loop.after(frozen_s, edge.thaw)
            edge.loop.after(frozen_s, arrive)
        else:
            edge.loop.after(edge.delay_s(0.001), arrive)


def _generation(id: str) -> int:
    return int(id.partition("/")[0])


def _settle(answer: asyncio.Future[Answer], said: Answer | Exception) -> None:
    if answer.done():
        return
    if isinstance(said, Exception):
        answer.set_exception(said)
    else:
        answer.set_result(said)
