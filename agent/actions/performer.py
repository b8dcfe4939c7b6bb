"""Performs what the core decided: intent first, then the effect, then its outcome as a level.

Owns which effects are in flight and what became of the latest.  Decides nothing and retries
nothing: an effect that failed or ran out of time is an outcome, and the core plans on.  Its clock,
timers and tasks are those of the event loop that runs: the simulator runs this file too.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from ..core.model import (
    UNREADABLE,
    Delete,
    Doc,
    Effect,
    EffectOutcome,
    NodeOrder,
    NodeTests,
    RunCheck,
    Start,
    Stop,
    StoreWrite,
    TakeEvidence,
    run_subject,
    subject_of,
)
from ..core.model.subject import LEASE
from ..core.run.members import read_plan
from ..history.journal import (
    UNFINISHED_ERROR,
    Count,
    Finished,
    Intent,
    Memory,
    Record,
    Seed,
    intent_of,
    needs_sync,
)
from ..history.retention import BY_RUN, RUNS_MAX
from ..launchers import protocol
from ..store.base import Conflict, StoreError
from ..system import clocks

OUTCOMES_MAX = 256  # kept as levels
FINISHED_MAX = 4096  # ids remembered, so that a launcher's repetition is no second outcome
OUTCOME_KEPT_S = 30.0
JOURNAL_WAIT_S = 0.25  # an ordinary restart waits no longer for a disk that does not answer
STANDS_S = 2.0  # the store's word, whose generation stands, is no older
SYNC_WAIT_S = 2.0  # what outlives the node may wait for a busy one
DETAIL_MAX = 32_768
REPORT_MAX = 1 << 20  # on 2,048 nodes
GRACE_FOR_RESEND_S = 5.0  # after a restart: launchers repeat their last outcomes by then


LauncherId = tuple[int, float]  # pid and registration: a later one of the same run is another
OTHER_LAUNCHER = "another launcher serves the run now"


class Journal(Protocol):
    """What is needed of agent/history/journal.py."""

    seed: Seed

    @property
    def stalled(self) -> bool: ...

    def append(
        self, *records: Record, synced: bool = False, wait: bool = False
    ) -> asyncio.Future[None] | None: ...


class Writes(Protocol):
    """What is needed of a store, see agent/store/base.py."""

    async def put(self, write: StoreWrite) -> int: ...

    async def read(self, key: str) -> Doc: ...


class EffectInFlight:
    """An effect that has begun and has no outcome yet, and the launcher that it was decided for."""

    def __init__(self, effect: Effect, launcher: LauncherId, begun_s: float) -> None:
        self.effect, self.begun_s = effect, begun_s
        self.run = run_of(effect)
        self.launcher = launcher
        self.timer: asyncio.TimerHandle | None = None
        self.sent = False


def run_of(effect: Effect) -> str:
    """The run whose launcher carries the effect out; "" for a write to the store."""
    return "" if isinstance(effect.body, StoreWrite) else str(getattr(effect.body, "run", ""))


def is_elsewhere(effect: Effect) -> bool:
    """Whether another node's launcher carries it out."""
    return isinstance(effect.body, (Stop, TakeEvidence)) and bool(effect.body.node)


async def _no_others(effect: Effect, _: object = None) -> EffectOutcome:
    return EffectOutcome(effect.id, False, "this agent is in touch with no other node")


class Performer:
    """The one place where effects happen.  `elsewhere` has another node carry one out, `tests`
    several nodes be tested with each other."""

    def __init__(
        self, journal: Journal, store: Writes, order: Callable[[str, dict[str, object]], str],
        wake: Callable[[str], None], on_error: Callable[[str, BaseException | str], None],
        launcher_of: Callable[[str], LauncherId],
        node: Callable[[Effect, NodeOrder], Awaitable[str]],
        check: Callable[[Effect, RunCheck], Awaitable[str]],
        wall_s: Callable[[], float] = time.time, boot_s: Callable[[], float] = clocks.boot_s,
    ) -> None:
        self._check, self._wall_s, self._boot_s = check, wall_s, boot_s
        self.many_nodes = False  # another node may lead a run
        self._loop = asyncio.get_running_loop()
        self.elsewhere: Callable[[Effect], Awaitable[EffectOutcome]] = _no_others
        self.tests: Callable[[Effect, NodeTests], Awaitable[EffectOutcome]] = _no_others
        self._awaited: dict[str, asyncio.Future[EffectOutcome]] = {}  # see obey
        self._journal, self._node, self._store, self._order = journal, node, store, order
        self._wake, self._on_error, self._launcher_of = wake, on_error, launcher_of
        self._flights: dict[str, EffectInFlight] = {}
        self._levels: OrderedDict[str, tuple[EffectOutcome, float]] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._orphans: dict[str, Intent] = {}
        self._lapsed: OrderedDict[str, Intent] = OrderedDict()  # orphans that ended without a word
        self.counters = dict(journal.seed.counters)
        # Least lately counted first.
        self._by_run = dict.fromkeys(key for key in self.counters if key[0] in BY_RUN)
        self.where: dict[tuple[str, int, int], str] = {}  # (run, generation, rank) -> source line
        now_s = self._loop.time()
        for done in journal.seed.finished:
            # The core's memory may be older than the outcome: it is told again.
            self._finished[done.id] = None
            self._levels[done.id] = (EffectOutcome(done.id, done.ok, done.error), now_s)
        for intent in journal.seed.unfinished:
            self._orphans[intent.id] = intent
        if self._orphans:
            self._loop.call_later(GRACE_FOR_RESEND_S, self._end_orphans)

    # ------------------------------------------------------------- the core's side

    def outcomes(self, wanted: Iterable[str], now_s: float) -> tuple[EffectOutcome, ...]:
        """Outcomes as levels; those that nobody lists any more are let go after a while."""
        listed = set(wanted)
        for key, (_, since_s) in list(self._levels.items()):
            if len(self._levels) <= OUTCOMES_MAX and (
                key in listed or now_s - since_s < OUTCOME_KEPT_S
            ):
                continue
            del self._levels[key]
        return tuple(outcome for outcome, _ in self._levels.values())

    def fresh(self, effects: Iterable[Effect]) -> list[Effect]:
        """Those that are neither in flight nor over.  One whose intent an earlier life of the
        agent left unfinished is over: it failed, and is never replayed."""
        found = []
        for effect in effects:
            if effect.id in self._orphans:
                self._lapse(self._orphans.pop(effect.id))
                self._end(effect, False, UNFINISHED_ERROR)
            elif effect.id not in self._flights and effect.id not in self._finished:
                found.append(effect)
        return found

    def perform(self, fresh: list[Effect], memory: bytes | None) -> None:
        """Begins effects that `fresh` returned; `memory` is committed with their intents."""
        if not fresh:
            return
        for effect in fresh:
            # Bound here, in the step that decided it: pids and ranks are those of this launcher.
            self._flights[effect.id] = EffectInFlight(
                effect, self._launcher_of(run_of(effect)), self._loop.time())
        for effect in fresh:
            if _is_lease(effect) and isinstance(effect.body, StoreWrite):
                # Waits for no disk and no other write: a leader whose renewal is late leads no
                # more.  It is no action, and a journal would hold little else.
                self._start(self._put(effect, effect.body))
        rest = [effect for effect in fresh if not _is_lease(effect)]
        if rest:
            self._start(self._begin(rest, memory))
        elif memory is not None:
            self._journal.append(Memory(memory))

    async def obey(self, effect: Effect) -> EffectOutcome:
        """Begins what another node's agent asks for, and its outcome: once for an id, however
        often it is asked.  What an earlier life of this agent had begun is not begun again: its
        outcome is the one that its launcher may still repeat."""
        known = self._levels.get(effect.id)
        if known is not None:
            return known[0]
        awaited = self._awaited.get(effect.id)
        if awaited is None:
            if effect.id in self._finished:
                return EffectOutcome(effect.id, False, UNFINISHED_ERROR)
            awaited = self._awaited[effect.id] = self._loop.create_future()
            if effect.id not in self._orphans:
                self.perform([effect], None)
        return await asyncio.shield(awaited)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    async def close(self) -> None:
        """Ends tasks; effects that have begun stay intents without outcome."""
        for flight in self._flights.values():
            if flight.timer is not None:
                flight.timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------- beginning

    async def _begin(self, effects: list[Effect], memory: bytes | None) -> None:
        records = [intent_of(effect, self._wall_s()) for effect in effects]
        lasting = all(needs_sync(effect) for effect in effects)
        wait_s = SYNC_WAIT_S if lasting else JOURNAL_WAIT_S
        committed = self._journal.append(
            *records, *([Memory(memory)] if memory is not None else []),
            synced=any(needs_sync(effect) for effect in effects), wait=True)
        assert committed is not None
        stalled = self._journal.stalled
        if not stalled:
            try:
                async with asyncio.timeout(wait_s):
                    await asyncio.shield(committed)
            except TimeoutError:
                stalled = committed.cancelled() or not committed.done()
            except asyncio.CancelledError:
                if not committed.cancelled():
                    raise  # this agent ends: nothing more is begun
                stalled = True
            if stalled:
                self._on_error("journal", f"no commit within {wait_s:g} s")
        # Puts wait for a disk or for other machines, the node's unit for its program; orders to
        # launchers wait for neither, and no write for another: a lease is short.
        for effect in sorted(effects, key=_patience):
            flight = self._flights.get(effect.id)
            if flight is None:
                continue
            if stalled and (effect.outlives_node or needs_sync(effect)):
                self._end(effect, False, "refused: the journal is stalled")
            elif isinstance(effect.body, StoreWrite):
                # One task a subject: a store that is slow with one run holds up no other.
                self._start(self._put(effect, effect.body))
            elif isinstance(effect.body, NodeOrder):
                error = await self._node(effect, effect.body)
                self._end(effect, not error, error)
            elif isinstance(effect.body, RunCheck) and not effect.body.run:
                self._start(self._checked(effect, effect.body))  # takes seconds
            elif isinstance(effect.body, NodeTests):
                self._start(self._come(effect, self.tests(effect, effect.body), REPORT_MAX))
            elif is_elsewhere(effect):
                self._start(self._come(effect, self.elsewhere(effect)))
            elif isinstance(effect.body, Delete) and self.many_nodes:
                self._start(self._delete(flight, effect.body))
            else:
                self._send(flight)

    async def _delete(self, flight: EffectInFlight, body: Delete) -> None:
        """What is deleted never comes back, and a leader whom the others have lost is followed
        before his lease ends: the store is asked whose generation stands."""
        effect, asked_s = flight.effect, self._boot_s()
        try:
            async with asyncio.timeout(STANDS_S):
                plan = read_plan(await self._store.read(run_subject(body.run)))
        except (StoreError, TimeoutError) as error:
            self._end(effect, False, f"store: {str(error) or 'no answer'}: nothing is deleted")
            return
        newest = plan.generation if plan is not None else 0
        if newest != body.generation or self._boot_s() - asked_s > STANDS_S:
            self._end(effect, False, f"generation {body.generation} deletes nothing: {newest} "
                      "stood in the store")
        elif effect.id in self._flights:
            self._send(flight)

    async def _checked(self, effect: Effect, body: RunCheck) -> None:
        error = await self._check(effect, body)
        self._end(effect, not error, error)

    async def _come(self, effect: Effect, coming: Awaitable[EffectOutcome],
                    most: int = DETAIL_MAX) -> None:
        outcome = await coming
        self._end(effect, outcome.ok, outcome.error[:500], outcome.detail[:most])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    async def _put(self, effect: Effect, write: StoreWrite) -> None:
        try:
            async with asyncio.timeout(effect.deadline_s or 5.0):
                version = await self._store.put(write)
        except Conflict as error:
            self._end(effect, False, f"conflict: {error}")
        except (StoreError, TimeoutError) as error:
            self._end(effect, False, f"store: {str(error) or 'no answer'}")
        else:
            self._end(effect, True, detail=str(version))

    def _send(self, flight: EffectInFlight) -> None:
        effect = flight.effect
        if self._launcher_of(flight.run) != flight.launcher:
            self._end(effect, False, OTHER_LAUNCHER)
            return
        if flight.timer is None:
            flight.timer = self._loop.call_later(
                max(0.05, effect.deadline_s), self._too_late, effect)
        body = msgspec.to_builtins(effect.body)
        body.pop("type", None)
        if isinstance(effect.body, Start) and effect.body.permit_s:
            # Counted from the decision: who decided may have stood still since, or who reads may.
            left_s = effect.body.permit_s - (self._loop.time() - flight.begun_s)
            body["permit_until_boot_s"] = self._boot_s() + left_s
        fields = {"t": "do", "id": effect.id, "kind": effect.kind, "body": body}
        try:
            why_not = self._order(flight.run, fields)
        except ValueError as error:  # text that no packet takes costs this effect, and no other
            self._end(effect, False, f"cannot be sent: {error}")
            return
        flight.sent = not why_not  # else it goes out when the launcher comes back, or times out

    def launcher_came(self, run: str) -> None:
        """Sends again what the launcher has not answered; it is idempotent under the id.  What was
        meant for an earlier launcher of that name ends as failed instead."""
        for flight in list(self._flights.values()):
            if flight.timer is not None and flight.run == run:
                self._send(flight)

    # ------------------------------------------------------------- ending

    def launcher_outcome(self, run: str, packet: protocol.Outcome) -> None:
        """A launcher said what became of an effect, perhaps for the second time."""
        flight = self._flights.get(packet.id)
        detail = packet.detail[:DETAIL_MAX]
        if flight is not None:
            if flight.run == run and self._launcher_of(run) == flight.launcher:
                self._end(flight.effect, packet.ok, packet.error[:500], detail)
            return
        # A launcher speaks for its own run alone.
        intent = self._orphans.get(packet.id) or self._lapsed.get(packet.id)
        if intent is None or subject_of(intent.subject).run != run:
            return
        if self._orphans.pop(packet.id, None):
            self._end(intent, packet.ok, packet.error[:500], detail)
        elif packet.ok:
            del self._lapsed[packet.id]
            late = self._restarted(intent)
            self._journal.append(*late)
            self.count(*late)

    def _lapse(self, intent: Intent) -> None:
        self._lapsed[intent.id] = intent
        while len(self._lapsed) > OUTCOMES_MAX:
            self._lapsed.popitem(last=False)

    def _restarted(self, of: Effect | Intent) -> list[Count]:
        """What a start that came true adds, once for each generation, whoever asked for it and
        however often.  Without a fault it is the start of another launcher, which goes on from a
        checkpoint."""
        head = of.id.partition("/")[0]
        if of.kind != "start" or not head.isdecimal():
            return []
        run = subject_of(of.subject).run
        mark = "restarted_to", (run,)
        more = int(head) - self.counters.get(mark, 0.0)
        if more < 0 and of.fault or more == 0:
            return []
        counts = [Count(*mark, more)]
        return [*counts, Count("restarts", (run, of.fault))] if of.fault else counts

    def _too_late(self, effect: Effect) -> None:
        if effect.id in self._flights:
            error = f"no outcome within {effect.deadline_s:g} s"
            self._end(effect, False, error)

    def _end_orphans(self) -> None:
        for intent in list(self._orphans.values()):
            self._lapse(self._orphans.pop(intent.id))
            self._end(intent, False, UNFINISHED_ERROR)

    def _end(self, of: Effect | Intent, ok: bool, error: str = "", detail: str = "") -> None:
        """The outcome of an effect, or of what an earlier life of the agent meant to do."""
        flight = self._flights.pop(of.id, None)
        if flight is not None and flight.timer is not None:
            flight.timer.cancel()
        self._finished[of.id] = None
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        outcome = EffectOutcome(of.id, ok, error, detail)
        self._levels[of.id] = (outcome, self._loop.time())
        awaited = self._awaited.pop(of.id, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(outcome)
        if not _is_lease(of):
            counts = [Count("actions", (of.kind, of.fault, "ok" if ok else "failed"))]
            counts += self._restarted(of) if ok else []
            self._journal.append(Finished(of.id, ok, error, self._wall_s(), tuple(counts)))
            self.count(*counts)
        if isinstance(of, Effect) and of.kind == "evidence" and ok:
            self._remember_where(of, detail)
        if not (ok and of.kind == "start"):
            # After a start the launcher's levels follow at once and wake; a step before them would
            # see the old generation and ask again.
            self._wake("outcome")

    def count(self, *counts: Count) -> None:
        """Adds to the counters that metrics show; the journal adds the same on its side."""
        for count in counts:
            key = (count.name, count.labels)
            if count.name in BY_RUN:
                self._by_run.pop(key, None)
                self._by_run[key] = None  # runs come by the thousand, and each would stay for ever
                if len(self._by_run) > RUNS_MAX:
                    oldest = next(iter(self._by_run))
                    del self._by_run[oldest]
                    self.counters.pop(oldest, None)
            self.counters[key] = self.counters.get(key, 0.0) + count.more

    def _remember_where(self, effect: Effect, detail: str) -> None:
        body = effect.body
        try:
            where = msgspec.json.decode(detail).get("where", "")
        except (*UNREADABLE, AttributeError):
            return
        if isinstance(where, str) and where and len(self.where) < 4096:
            key = (getattr(body, "run"), getattr(body, "generation"), getattr(body, "rank"))
            self.where[key] = where[:200]

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_error("perform", task.exception() or "")


def _is_lease(of: Effect | Intent) -> bool:
    return subject_of(of.subject).kind == LEASE


def _patience(effect: Effect) -> int:
    """Effects that take longer come later."""
    return 2 if isinstance(effect.body, NodeOrder) else effect.kind == "put"
