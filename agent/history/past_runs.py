"""What the journal of a run with an agent of its own holds: read when that agent has ended.

Owns reading alone, and which attempt an incident belongs to.  The journal is never written here; a
file of another program, or of another release, is an error that says so.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from ..core.ledger import Ledger
from ..core.model import UNREADABLE, Incident
from ..store.base import StoreError
from ..store.sqlite import APPLICATION_ID
from ..system.regular import open_regular
from .job_log import Job, read_jobs
from .journal import Asked, Refused, asked_in, incidents_in, jobs_in, refused_in

WAIT_S = 2.0  # for an agent that is just writing


class Past(NamedTuple):
    """One name's incidents, newest first, its ledger, when each attempt began, what was refused."""

    incidents: tuple[Incident, ...]
    ledger: Ledger
    attempts: tuple[float, ...]
    refused: tuple[Refused, ...]  # newest last
    jobs: tuple[Job, ...] = ()  # newest last
    asked: tuple[Asked, ...] = ()  # newest last


class _Memory(msgspec.Struct):
    """Of the core's memory the part that is told."""

    ledger: Ledger = msgspec.field(default_factory=Ledger)


def read(directory: Path) -> Past:
    """Of DIR/journal.db.  FileNotFoundError where there is none, StoreError for no journal."""
    path = directory / "journal.db"
    try:
        with open(open_regular(path, follow=False), "rb"):
            pass
        address = f"file:{quote(str(path.resolve()))}?mode=ro"
        database = sqlite3.connect(address, uri=True, timeout=WAIT_S)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, sqlite3.Error) as error:
        raise StoreError(f"{path}: {error}") from error
    try:
        if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise StoreError(f"{path}: is no journal of Holdfast's")
        return Past(incidents_in(database), _ledger(database), _attempts(database),
                    refused_in(database), tuple(read_jobs(jobs_in(database))), asked_in(database))
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}") from error
    finally:
        database.close()


def attempt_of(wall_s: float, attempts: Sequence[float]) -> int:
    """Which attempt, counted from 1, was under way then."""
    return max(1, bisect_right(attempts, wall_s))


def as_json(incident: Incident, attempts: Sequence[float]) -> dict[str, Any]:
    """As an agent tells it, with its attempt."""
    told: dict[str, Any] = msgspec.to_builtins(incident)
    return {**told, "attempt": attempt_of(incident.opened_wall_s, attempts)}


def _ledger(database: sqlite3.Connection) -> Ledger:
    row = database.execute("SELECT body FROM memory").fetchone()
    try:
        return msgspec.json.decode(row[0], type=_Memory).ledger if row else Ledger()
    except UNREADABLE:
        return Ledger()


def _attempts(database: sqlite3.Connection) -> tuple[float, ...]:
    try:
        rows = database.execute("SELECT begun_wall_s FROM attempts ORDER BY begun_wall_s")
        return tuple(float(begun) for (begun,) in rows)
    except sqlite3.OperationalError:  # of a release that did not count them
        return ()
