"""Keeps journal.db usable for years: removes old rows, and mends text that no database takes.

Owns how much of each table stays.  Which incidents the history keeps is decided in incident_log.py;
the bound here holds even where that decision could not be carried out.
"""

from __future__ import annotations

import sqlite3
from typing import TypeVar

import msgspec

from holdfast.collectors.contract import legible

INCIDENTS_MAX = 2000  # twice the history's bound, which open incidents may exceed
INTENTS_MAX = 20_000
REFUSALS_MAX = 2000
REQUESTS_MAX = 2000
JOBS_MAX = 1000
RUNS_MAX = 4096  # newest rows of each counter that counts by run
BY_RUN = ("restarts", "lost_steps", "restarted_to")
Record = TypeVar("Record")


def prune(database: sqlite3.Connection) -> None:
    """Removes the oldest rows."""
    database.execute(
        "DELETE FROM intents WHERE rowid <= (SELECT max(rowid) FROM intents) - ?", (INTENTS_MAX,))
    database.execute(
        "DELETE FROM incidents WHERE id NOT IN "
        "(SELECT id FROM incidents ORDER BY opened_wall_s DESC LIMIT ?)", (INCIDENTS_MAX,))
    database.execute("DELETE FROM attempts WHERE rowid <= (SELECT max(rowid) FROM attempts) - ?",
                     (RUNS_MAX,))
    database.execute("DELETE FROM reviews WHERE id NOT IN (SELECT id FROM incidents)")
    database.execute("DELETE FROM owners WHERE id NOT IN (SELECT id FROM incidents)")
    database.execute("DELETE FROM refusals WHERE rowid NOT IN "
                     "(SELECT rowid FROM refusals ORDER BY last_wall_s DESC LIMIT ?)",
                     (REFUSALS_MAX,))
    database.execute("DELETE FROM requests WHERE rowid NOT IN "
                     "(SELECT rowid FROM requests ORDER BY wall_s DESC LIMIT ?)", (REQUESTS_MAX,))
    database.execute("DELETE FROM jobs WHERE key NOT IN "
                     "(SELECT key FROM jobs ORDER BY begun_wall_s DESC LIMIT ?)", (JOBS_MAX,))
    for name in BY_RUN:
        database.execute(
            "DELETE FROM counters WHERE name = ? AND rowid NOT IN "
            "(SELECT rowid FROM counters WHERE name = ? ORDER BY rowid DESC LIMIT ?)",
            (name, name, RUNS_MAX))


def mended(record: Record) -> tuple[Record, ...]:
    """The record with legible text; () when its text was not at fault."""
    plain = msgspec.to_builtins(record, builtin_types=(bytes,))
    clean = _legible(plain)
    if clean == plain:
        return ()
    return (msgspec.convert(clean, type(record), builtin_types=(bytes,)),)


def _legible(value: object) -> object:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_legible(one) for one in value)
    if isinstance(value, dict):
        return {_legible(key): _legible(one) for key, one in value.items()}
    return value
