"""The journal: this node's memory of what was meant, what was done and what it led to.

Owns journal.db and the one thread that writes it.  An intent is committed before its effect
starts, its outcome after; an intent without outcome is reported once, as unfinished, and never
replayed.  Counters that people see are added in the transaction of the event they count, so a
kill at any point neither loses nor doubles one.  Memory for people and local budgets, never
authority: plans live in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.actions import outlives_node
from ..core.model import UNREADABLE, Effect, Incident
from ..store.sqlite import open_database
from ..system.side_thread import tell
from .retention import INCIDENTS_MAX, mended, prune

BATCHES_MAX = 2000  # waiting for the disk; the oldest is dropped and counted beyond that
STALL_S = 1.0  # a commit that takes longer is a stalled journal
RETRY_S = 0.2
BATCHES_PER_COMMIT = 64
PRUNE_EVERY = 1000  # records: a node that is never restarted must not grow without end
FINISHED_READ = 256
REFUSED_READ = 256
ASKED_READ = 256
JOBS_READ = 1000
WAITING = "waiting"  # of a request
UNFINISHED_ERROR = "the agent ended before it learned the outcome"

SCHEMA = """
CREATE TABLE IF NOT EXISTS intents (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, subject TEXT NOT NULL, fault TEXT NOT NULL,
  request TEXT NOT NULL, reason TEXT NOT NULL, begun_wall_s REAL NOT NULL,
  ok INTEGER, error TEXT NOT NULL DEFAULT '', ended_wall_s REAL);
CREATE TABLE IF NOT EXISTS incidents (
  id TEXT PRIMARY KEY, state TEXT NOT NULL, opened_wall_s REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS owners (id TEXT PRIMARY KEY, uid INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS counters (
  name TEXT NOT NULL, labels TEXT NOT NULL, value REAL NOT NULL, PRIMARY KEY (name, labels));
CREATE TABLE IF NOT EXISTS attempts (launcher TEXT PRIMARY KEY, begun_wall_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
  key TEXT PRIMARY KEY, begun_wall_s REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reviews (
  id TEXT PRIMARY KEY, acked_by TEXT NOT NULL, acked_wall_s REAL NOT NULL, label TEXT NOT NULL,
  labelled_by TEXT NOT NULL, labelled_wall_s REAL NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS refusals (
  uid INTEGER NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL, example TEXT NOT NULL,
  times INTEGER NOT NULL, first_wall_s REAL NOT NULL, last_wall_s REAL NOT NULL,
  PRIMARY KEY (uid, what, why));
CREATE TABLE IF NOT EXISTS requests (
  id TEXT PRIMARY KEY, action TEXT NOT NULL, subject TEXT NOT NULL, reason TEXT NOT NULL,
  by TEXT NOT NULL, wall_s REAL NOT NULL, until_wall_s REAL NOT NULL,
  state TEXT NOT NULL, text TEXT NOT NULL, answered_wall_s REAL);
CREATE TABLE IF NOT EXISTS memory (id INTEGER PRIMARY KEY CHECK (id = 1), body BLOB NOT NULL);
"""

Labels = tuple[str, ...]


class Count(NamedTuple):
    """An addition to a counter: its name, label values and by how much."""

    name: str
    labels: Labels
    more: float = 1.0


class Mark(NamedTuple):
    """How far something was counted: replaces the old value under its name, in the transaction of
    the counts that it belongs to."""

    name: str
    labels: Labels
    value: float


class Intent(NamedTuple):
    """Recorded before an effect starts."""

    id: str
    kind: str
    subject: str
    fault: str
    request: str
    reason: str
    wall_s: float


class Finished(NamedTuple):
    """Recorded when the outcome of an intent is known; counts apply once per id."""

    id: str
    ok: bool
    error: str
    wall_s: float
    counts: tuple[Count, ...] = ()


class Happened(NamedTuple):
    """An incident in a new state; counts apply once per (id, state)."""

    incident: Incident
    counts: tuple[Count, ...] = ()
    owner: int = -1  # uid of its run's user


class Forgotten(NamedTuple):
    """Incidents that the history has no room for any more."""

    ids: tuple[str, ...]


class Refused(NamedTuple):
    """What somebody asked for who may not; `times` more since this was last recorded."""

    uid: int  # -1: over the network, so that no uid is known
    what: str  # the kind of request, of which there are few
    why: str
    example: str  # the newest of that kind
    wall_s: float
    times: int = 1


class Asked(NamedTuple):
    """What a person or an alert asked for, and how it stands."""

    id: str
    action: str
    subject: str
    reason: str
    by: str
    wall_s: float
    until_wall_s: float = 0.0  # of a pause
    state: str = WAITING  # waiting | done | refused
    text: str = ""


class Answered(NamedTuple):
    """What became of it."""

    id: str
    ok: bool
    text: str
    wall_s: float

    @property
    def state(self) -> str:
        return "done" if self.ok else "refused"


class Memory(NamedTuple):
    """What the core gets back after a restart."""

    body: bytes


class Attempt(NamedTuple):
    """A launcher came that was not here before: its run's name begins another attempt."""

    launcher: str
    wall_s: float


class Review(NamedTuple):
    """What people said of an incident; the newest of each kind replaces the one before."""

    id: str
    acked_by: str = ""
    acked_wall_s: float = 0.0
    label: str = ""  # "" | true | false: whether it was right
    labelled_by: str = ""
    labelled_wall_s: float = 0.0
    reason: str = ""
    counts: tuple[Count, ...] = ()


class JobRecord(NamedTuple):
    """An attempt of a run in a new state, as job_log.py writes it, and what it adds to counters."""

    key: str
    begun_wall_s: float
    body: bytes
    counts: tuple[Count, ...] = ()


Record = (Attempt | JobRecord | Review | Intent | Finished | Happened | Forgotten | Refused | Asked
          | Answered | Memory | Count | Mark)


class Seed(NamedTuple):
    """The journal's content when it was opened."""

    memory: bytes
    counters: dict[tuple[str, Labels], float]
    unfinished: tuple[Intent, ...]
    finished: tuple[Finished, ...]  # newest last, without counts
    incidents: tuple[Incident, ...]  # newest first
    owners: dict[str, int]  # incident id -> uid
    refused: tuple[Refused, ...]  # newest last
    jobs: tuple[bytes, ...] = ()  # newest last
    reviews: tuple[Review, ...] = ()
    asked: tuple[Asked, ...] = ()  # newest last


class _Batch(NamedTuple):
    records: tuple[Record, ...]
    synced: bool
    queued_s: float
    done: asyncio.Future[None] | None


def intent_of(effect: Effect, wall_s: float) -> Intent:
    """The record of an effect that is about to start."""
    return Intent(
        effect.id, effect.kind, effect.subject, effect.fault, effect.request,
        effect.reason[:500], wall_s)


def needs_sync(effect: Effect) -> bool:
    """Whether the intent must survive a loss of power."""
    return effect.outlives_node or outlives_node(effect.kind)


class Journal:
    """The writing half; `seed` holds what was read when it was opened."""

    def __init__(
        self, directory: Path, hook: Callable[[str], None] = lambda point: None,
        on_error: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Opens DIR/journal.db.  Raises StoreError when it is foreign or damaged.  `hook` is called
        at every point where a kill could hurt, so that tests can kill there; the thread calls
        `on_error` with each record that it could not write as it was."""
        self.path = directory / "journal.db"
        self.dropped = 0
        self.error = ""
        self._on_error = on_error
        self._hook = hook
        self._database = open_database(self.path)
        self._database.executescript(SCHEMA)
        self._since_prune = 0
        prune(self._database)
        self.seed = self._read_seed()
        self._queue: deque[_Batch] = deque()
        self._taken_s = 0.0  # when the batch that the thread now writes was queued
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- asked by the event loop

    @property
    def stalled(self) -> bool:
        """Whether commits fail, or the oldest has waited for longer than STALL_S."""
        with self._changed:
            oldest_s = self._taken_s or (self._queue[0].queued_s if self._queue else 0.0)
        return bool(self.error) or bool(oldest_s and time.monotonic() - oldest_s > STALL_S)

    def append(
        self, *records: Record, synced: bool = False, wait: bool = False
    ) -> asyncio.Future[None] | None:
        """Queues records for one transaction; with `wait` a future that ends at its commit."""
        done = asyncio.get_running_loop().create_future() if wait else None
        batch = _Batch(records, synced, time.monotonic(), done)
        with self._changed:
            if len(self._queue) >= BATCHES_MAX:
                lost = self._queue.popleft()
                self.dropped += len(lost.records)
                if lost.done is not None:
                    lost.done.cancel()
            self._queue.append(batch)
            self._changed.notify()
        return done

    def close(self, timeout_s: float = 3.0) -> None:
        """Writes the waiting records, within `timeout_s`, and closes the file."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._database.close()

    # ------------------------------------------------------------- the thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                count = min(len(self._queue), BATCHES_PER_COMMIT)
                batches = [self._queue.popleft() for _ in range(count)]
                self._taken_s = batches[0].queued_s
            while not self._try_commit(batches):
                with self._changed:
                    if self._closing and self.error:
                        return
                    if self.error:
                        self._changed.wait(RETRY_S)
            self._since_prune += sum(len(batch.records) for batch in batches)
            if self._since_prune >= PRUNE_EVERY:
                self._since_prune = 0
                self._try_prune()
            with self._changed:
                self._taken_s = 0.0
            for batch in batches:
                if batch.done is not None:
                    tell(batch.done)
            self._hook("told")

    def _try_commit(self, batches: list[_Batch]) -> bool:
        """True when the batch is on disk.  False with an error when the disk took nothing; without
        an error when a record was at fault, which is then written differently or left out, and the
        rest goes on."""
        database = self._database
        at = (0, 0)
        self._hook("taken")
        try:
            synced = any(batch.synced for batch in batches)
            database.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
            database.execute("BEGIN IMMEDIATE")
            self._hook("begun")
            for number, batch in enumerate(batches):
                for place, record in enumerate(batch.records):
                    at = number, place
                    self._apply(record)
                    self._hook("applied")
            database.execute("COMMIT")
        except (ValueError, OverflowError) as error:  # text that is no UTF-8; beyond 64 bits
            database.execute("ROLLBACK")
            self.error = ""
            self._mend(batches, *at)
            self._on_error(f"a record could not be written as it was: {error}")
            return False
        except sqlite3.Error as error:
            self.error = str(error)
            if database.in_transaction:
                database.execute("ROLLBACK")
            return False
        self._hook("committed")
        self.error = ""
        return True

    def _mend(self, batches: list[_Batch], number: int, place: int) -> None:
        """Replaces one record of one batch by the part of it that can be written, which may be
        nothing."""
        records = batches[number].records
        kept = mended(records[place])
        self.dropped += 1 - len(kept)
        batches[number] = batches[number]._replace(
            records=(*records[:place], *kept, *records[place + 1 :]))

    def _apply(self, record: Record) -> None:
        database = self._database
        if isinstance(record, Intent):
            database.execute(
                "INSERT OR IGNORE INTO intents (id, kind, subject, fault, request, reason, "
                "begun_wall_s) VALUES (?, ?, ?, ?, ?, ?, ?)", record)
        elif isinstance(record, Finished):
            changed = database.execute(
                "UPDATE intents SET ok = ?, error = ?, ended_wall_s = ? "
                "WHERE id = ? AND ok IS NULL",
                (record.ok, record.error[:500], record.wall_s, record.id),
            ).rowcount
            if changed:
                self._add(record.counts)
        elif isinstance(record, Happened):
            self._happened(record)
        elif isinstance(record, Forgotten):
            for table in ("incidents", "owners", "reviews"):
                database.executemany(f"DELETE FROM {table} WHERE id = ?",
                                     [(id,) for id in record.ids])
        elif isinstance(record, Attempt):
            database.execute("INSERT OR IGNORE INTO attempts VALUES (?, ?)", record)
        elif isinstance(record, JobRecord):
            database.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", record[:3])
            self._add(record.counts)
        elif isinstance(record, Review):
            database.execute("INSERT OR REPLACE INTO reviews VALUES (?, ?, ?, ?, ?, ?, ?)",
                             record[:7])
            self._add(record.counts)
        elif isinstance(record, Memory):
            database.execute("INSERT OR REPLACE INTO memory VALUES (1, ?)", (record.body,))
        elif isinstance(record, Refused):
            uid, what, why, example, wall_s, times = record
            database.execute(
                "INSERT INTO refusals VALUES (?1, ?2, ?3, ?4, ?6, ?5, ?5) ON CONFLICT DO UPDATE "
                "SET times = times + ?6, example = ?4, last_wall_s = ?5",
                (uid, what, why, example, wall_s, times))
        elif isinstance(record, Asked):
            database.execute("INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, "
                             "NULL)", record)
        elif isinstance(record, Answered):
            database.execute(
                "UPDATE requests SET state = ?, text = ?, answered_wall_s = ? WHERE id = ?",
                (record.state, record.text[:500], record.wall_s, record.id))
        elif isinstance(record, Mark):
            database.execute("DELETE FROM counters WHERE name = ?", (record.name,))
            self._add((Count(*record),))
        else:
            self._add((record,))

    def _happened(self, record: Happened) -> None:
        incident = record.incident
        row = self._database.execute(
            "SELECT state, opened_wall_s FROM incidents WHERE id = ?", (incident.id,)).fetchone()
        self._database.execute(
            "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?)",
            (incident.id, incident.state, incident.opened_wall_s, msgspec.json.encode(incident)))
        is_new = row is None or row[1] != incident.opened_wall_s  # else its owner is known
        self._database.execute(
            f"INSERT OR {'REPLACE' if is_new else 'IGNORE'} INTO owners VALUES (?, ?)",
            (incident.id, record.owner))
        if row != (incident.state, incident.opened_wall_s):
            self._add(record.counts)

    def _add(self, counts: tuple[Count, ...]) -> None:
        for count in counts:
            self._database.execute(
                # In place of the old row, so that the newest count is removed last (retention.py).
                "INSERT OR REPLACE INTO counters SELECT ?1, ?2, ?3 + coalesce("
                "(SELECT value FROM counters WHERE name = ?1 AND labels = ?2), 0)",
                (count.name, msgspec.json.encode(count.labels).decode(), count.more),
            )

    def _try_prune(self) -> None:
        """Removes old rows; those that cannot be removed now are removed another time."""
        try:
            prune(self._database)
        except sqlite3.Error as error:
            self._on_error(f"old records could not be removed: {error}")

    # ------------------------------------------------------------- opening

    def _read_seed(self) -> Seed:
        database = self._database
        memory = database.execute("SELECT body FROM memory").fetchone()
        unfinished = database.execute(
            "SELECT id, kind, subject, fault, request, reason, begun_wall_s FROM intents "
            "WHERE ok IS NULL ORDER BY rowid").fetchall()
        finished = database.execute(
            "SELECT id, ok, error, ended_wall_s FROM intents WHERE ok IS NOT NULL "
            "ORDER BY rowid DESC LIMIT ?", (FINISHED_READ,)).fetchall()
        counters = {
            (name, tuple(msgspec.json.decode(labels))): value
            for name, labels, value in database.execute("SELECT * FROM counters")}
        return Seed(
            bytes(memory[0]) if memory else b"",
            counters,
            tuple(Intent(*row) for row in unfinished),
            tuple(Finished(id, bool(ok), error, wall_s)
                  for id, ok, error, wall_s in reversed(finished)),
            incidents_in(database),
            dict(database.execute("SELECT id, uid FROM owners")),
            refused_in(database),
            jobs_in(database),
            tuple(Review(*row) for row in database.execute("SELECT * FROM reviews")),
            asked_in(database),
        )


def incidents_in(database: sqlite3.Connection) -> tuple[Incident, ...]:
    """The newest first, without those that another release wrote and this one cannot read."""
    found = []
    for (body,) in database.execute(
        "SELECT body FROM incidents ORDER BY opened_wall_s DESC LIMIT ?", (INCIDENTS_MAX,)
    ):
        with contextlib.suppress(*UNREADABLE):
            found.append(msgspec.json.decode(body, type=Incident))
    return tuple(found)


def jobs_in(database: sqlite3.Connection) -> tuple[bytes, ...]:
    """The newest last; nothing in a journal of a release that kept none."""
    rows = _newest(database, "body FROM jobs ORDER BY begun_wall_s", JOBS_READ)
    return tuple(bytes(body) for (body,) in rows)


def asked_in(database: sqlite3.Connection) -> tuple[Asked, ...]:
    """What people asked for, newest last; nothing in a journal of a release that kept none."""
    return tuple(Asked(*row) for row in _newest(
        database, "id, action, subject, reason, by, wall_s, until_wall_s, state, text "
        "FROM requests ORDER BY wall_s", ASKED_READ))


def refused_in(database: sqlite3.Connection) -> tuple[Refused, ...]:
    """What was refused, newest last; nothing in a journal of a release that kept none."""
    return tuple(Refused(*row) for row in _newest(
        database, "uid, what, why, example, last_wall_s, times FROM refusals ORDER BY last_wall_s",
        REFUSED_READ))


def _newest(database: sqlite3.Connection, what: str, most: int) -> list[Any]:
    """Rows, newest last; none of a table that the journal's release did not have."""
    try:
        rows = database.execute(f"SELECT {what} DESC LIMIT ?", (most,)).fetchall()
    except sqlite3.OperationalError:
        return []
    return rows[::-1]
