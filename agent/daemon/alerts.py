"""Alerts that Alertmanager or Grafana sent: taken once, kept in the store, settled by the core.

Owns the store's document `alerts`, so that any agent may receive an alert, and a second delivery of
it changes nothing, whoever makes it.  What is done about an alert the core decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from ..core.model import UNREADABLE, Alert, Answer, Plan, StoreWrite
from ..core.model.subject import run_subject
from ..core.run.members import read_plan
from ..store.base import Conflict, Store, StoreError

KEY = "alerts"
KEPT_MAX = 256  # with their words; of older ones the fact: a second delivery is no new alert
ALL_MAX = KEPT_MAX + 1024  # more than one delivery holds
SETTLED = "settled before; its words are not kept so long"
TRIES = 8  # of a compare-and-set, against other agents
Merge = Callable[[dict[str, Alert]], None]  # changes what it is given
RESOLVED = "resolved before anything was done"


class Full(Exception):
    """More alerts wait to be settled than are kept; whoever sent them sends them again."""


class Alerts:
    """`plans` are the runs' plans as the core knows them now; `wake` asks for a step."""

    def __init__(
        self, store: Store, plans: Callable[[], Iterable[Plan]], wake: Callable[[str], None],
        on_error: Callable[[str, BaseException | str], None],
    ) -> None:
        self._store, self._plans, self._wake, self._on_error = store, plans, wake, on_error
        self._waiting: list[tuple[Merge, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._read: tuple[int, tuple[Alert, ...]] = (0, ())
        self._settling: set[asyncio.Task[None]] = set()
        self._fires: tuple[tuple[Alert, ...], tuple[str, ...]] = ((), ())

    def kept(self) -> tuple[Alert, ...]:
        """Every alert that the store holds, oldest first."""
        doc = self._store.view().docs.get(KEY)
        if doc.version != self._read[0]:
            try:
                found = msgspec.json.decode(doc.body, type=tuple[Alert, ...])
            except UNREADABLE as error:
                self._on_error("alerts", f"the store's document {KEY!r} is not readable: {error}")
                found = ()
            self._read = doc.version, found
        return self._read[1]

    def told(self) -> tuple[Alert, ...]:
        """Those of which more is known than that they are settled, oldest first."""
        return tuple(one for one in self.kept() if one.waits() or one.has_words())

    def firing(self) -> tuple[str, ...]:
        """The ids of all that fire, settled or not."""
        kept = self.kept()
        if self._fires[0] is not kept:
            self._fires = kept, tuple(one.id for one in kept if one.firing)
        return self._fires[1]

    async def take(self, delivered: Iterable[Alert]) -> int:
        """Keeps what is new of a delivery and returns how many that were.  Durable on return.

        Raises Full, StoreError, and Conflict where other agents were always faster.
        """
        generations = {plan.run: plan.generation for plan in self._plans()}
        batch = []
        for one in delivered:
            if one.run and one.run not in generations:  # of a run on other nodes
                plan = read_plan(self._store.view().docs.get(str(run_subject(one.run))))
                generations[one.run] = plan.generation if plan else 0
            batch.append(replace(one, generation=generations.get(one.run, 0)))
        new = 0

        def merged(kept: dict[str, Alert]) -> None:
            nonlocal new
            new = 0
            for one in batch:
                before = kept.get(one.id)
                if before is None:
                    kept[one.id] = one if one.firing else replace(one, outcome=RESOLVED)
                    new += 1
                elif before.firing and not one.firing:  # what has ended never begins again
                    kept[one.id] = replace(
                        before, firing=False, outcome=before.outcome or RESOLVED)

        await self._change(merged)
        if new:
            self._wake("an alert came")
        return new

    def pending(self, answers: Iterable[Answer]) -> tuple[Alert, ...]:
        """What fires and is not settled, by the core's last answers, which are kept as well."""
        waiting = {one.id: one for one in self.kept() if one.waits()}
        done = {answer.id: answer.text for answer in answers if answer.id in waiting}
        if done and not self._settling:
            task = asyncio.get_running_loop().create_task(self._settle(done))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
        return tuple(one for one in waiting.values() if one.id not in done)

    async def _settle(self, done: dict[str, str]) -> None:
        def merged(kept: dict[str, Alert]) -> None:
            for id, text in done.items():
                if id in kept and not kept[id].outcome:
                    kept[id] = replace(kept[id], outcome=text)

        try:
            await self._change(merged)
        except (Full, StoreError, Conflict, TimeoutError) as error:  # the core answers again
            self._on_error("alerts", error)

    async def _change(self, merge: Merge) -> None:
        """Changes the document; what comes while one write is under way shares the next one."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((merge, written))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all())
        await written

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write(batch)
        finally:
            self._writer = None

    async def _write(self, batch: list[tuple[Merge, asyncio.Future[None]]]) -> None:
        """By compare-and-set, and not at all where nothing changes.  Each of the batch learns what
        became of it; one for which there is no room leaves the others alone."""
        for attempt in range(TRIES):
            before = self.kept()
            kept = {one.id: one for one in before}
            refused: dict[asyncio.Future[None], Full] = {}
            for merge, written in batch:
                changed = dict(kept)
                merge(changed)
                try:
                    _bound(changed)
                except Full as full:
                    refused[written] = full
                else:
                    kept = changed
            after = _bared(tuple(kept.values()))
            failed: Exception | None = None
            try:
                if after != before:
                    write = StoreWrite(KEY, self._read[0], msgspec.json.encode(after))
                    self._read = await self._store.put(write), after
            except Conflict as error:
                if attempt < TRIES - 1:
                    await self._store.refresh()
                    continue
                failed = error
            except Exception as error:  # each request is told, by its own border
                failed = error
            for _, written in batch:
                tell(written, refused.get(written) or failed)
            return


def tell(written: asyncio.Future[None], error: Exception | None) -> None:
    """Nobody waits any more where a client hung up."""
    if written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


def _bound(kept: dict[str, Alert]) -> None:
    """Drops the oldest beyond ALL_MAX, and none that waits.  What fires is delivered again for as
    long as it fires, and an end may come before its beginning: forgotten, either would be acted on
    anew."""
    excess = len(kept) - ALL_MAX
    if excess <= 0:
        return
    gone = [id for id, one in kept.items() if not one.waits()][:excess]
    if len(gone) < excess:
        raise Full(f"{len(kept)} alerts wait, and {ALL_MAX} are kept")
    for id in gone:
        del kept[id]


def _bared(alerts: tuple[Alert, ...]) -> tuple[Alert, ...]:
    """The newest KEPT_MAX with their words, of the others what they ask for or that they came."""
    worded = [one for one in alerts if one.has_words()] if len(alerts) > KEPT_MAX else []
    if len(worded) <= KEPT_MAX:
        return alerts
    settled = [one.id for one in worded if not one.waits()]
    waiting = [one.id for one in worded if one.waits()]  # the first of a storm becomes the reason
    bare = set((settled + waiting[::-1])[: len(worded) - KEPT_MAX])
    return tuple(_bare(one) if one.id in bare else one for one in alerts)


def _bare(alert: Alert) -> Alert:
    """Without what only people read; one that waits still says what it asks for."""
    if alert.waits():
        return replace(alert, name="", summary="", by="")
    return replace(
        alert, name="", runbook="", run="", node="", summary="", by="", outcome=SETTLED)
