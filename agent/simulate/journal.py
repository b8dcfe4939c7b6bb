"""The journal of a virtual node: what its disk keeps, and what one life of its agent has queued.

Owns when a record lasts: a commit takes a moment, waits while the disk does not answer, and comes
never when the agent dies before.  Whoever looks at `Kept` sees what a restart would find.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..core.model import Request
from ..history.journal import (
    FINISHED_READ,
    RETRY_S,
    STALL_S,
    Answered,
    Count,
    Finished,
    Intent,
    Memory,
    Record,
    Seed,
)
from .loop import InvariantBroken
from .machine import Process


class Kept:
    """What lasts."""

    def __init__(self) -> None:
        self.memory = b""
        self.intents: dict[str, Intent] = {}
        self.finished: dict[str, Finished] = {}
        self.counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self.requests: dict[str, Request] = {}  # without an answer
        # The truth, for whoever judges: effects that left with their intent on this disk, and what
        # launchers said that they started.
        self.left: set[str] = set()
        self.started: dict[str, set[int]] = {}

    def seed(self) -> Seed:
        """As an agent that starts reads it."""
        unfinished = tuple(one for id, one in self.intents.items() if id not in self.finished)
        finished = tuple(self.finished.values())[-FINISHED_READ:]
        return Seed(self.memory, dict(self.counters), unfinished, finished, (), {}, ())


class VirtualJournal:
    """One life's queue in front of `kept`; nothing of it is written once that life is over."""

    def __init__(self, kept: Kept, process: Process, delay_s: Callable[[], float],
                 is_stuck: Callable[[], bool], on_commit: Callable[[], None]) -> None:
        self.kept, self.seed = kept, kept.seed()
        self._process, self._delay_s = process, delay_s
        self._is_stuck, self._on_commit = is_stuck, on_commit
        self._queue: deque[tuple[tuple[Record, ...], asyncio.Future[None] | None, float]] = deque()

    @property
    def stalled(self) -> bool:
        """Whether the oldest record has waited for too long."""
        return bool(self._queue) and self._process.time() - self._queue[0][2] > STALL_S

    def append(
        self, *records: Record, synced: bool = False, wait: bool = False
    ) -> asyncio.Future[None] | None:
        """Queues records for one transaction; with `wait` a future that ends at its commit."""
        done = self._process.create_future() if wait else None
        if not self._queue:
            self._process.later(self._delay_s(), self._write)
        self._queue.append((records, done, self._process.time()))
        return done

    def _write(self) -> None:
        if self._is_stuck():
            self._process.later(RETRY_S, self._write)
            return
        batches = list(self._queue)
        self._queue.clear()
        for records, _, _ in batches:
            for record in records:
                self._apply(record)
        self._on_commit()
        for _, done, _ in batches:
            if done is not None and not done.done():
                done.set_result(None)

    def _apply(self, record: Record) -> None:
        kept = self.kept
        if isinstance(record, Memory):
            kept.memory = record.body
        elif isinstance(record, Intent):
            if record.id in kept.intents:
                raise InvariantBroken("effect_twice", f"{record.id} is meant a second time")
            kept.intents[record.id] = record
        elif isinstance(record, Finished):
            if record.id in kept.finished:
                raise InvariantBroken("one_outcome", f"{record.id} ends a second time")
            if record.id in kept.intents:
                kept.finished[record.id] = record
                self._add(record.counts)
            if not record.ok:
                machine = self._process.machine
                machine.loop.note(machine.name, "outcome %s: %s", record.id, record.error)
        elif isinstance(record, Count):
            self._add((record,))
        elif isinstance(record, Answered):
            kept.requests.pop(record.id, None)

    def _add(self, counts: tuple[Count, ...]) -> None:
        counters = self.kept.counters
        for count in counts:
            key = count.name, count.labels
            counters[key] = counters.get(key, 0.0) + count.more
