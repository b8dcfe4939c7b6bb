"""Repeats: how often in a row and for how long something was so, and how often it happened.

Owns the count of readings in a row and the times of what strikes, both bounded.  It knows no name
and judges nothing.  Pure; what is to survive a restart of the agent is handed in by its owner.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from typing import NamedTuple

TIMES_MAX = 32
Times = dict[str, list[float]]  # key -> seconds at which it struck, oldest first


class Lasting(NamedTuple):
    """For how long something was so in every reading."""

    readings: int = 0
    seconds: float = 0.0  # from the first of them to the last


class Streak:
    """Readings in a row in which something was so; the same reading counts once."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._rows: dict[Hashable, tuple[float, float, int]] = {}  # first, last, readings

    def add(self, key: Hashable, boot_s: float, is_so: bool) -> Lasting:
        """Up to this reading.  A time that goes back begins anew: it is another boot's."""
        row = self._rows.pop(key, None)
        if not is_so:
            return Lasting()
        first_s, last_s, readings = row if row and row[1] <= boot_s else (boot_s, -1.0, 0)
        readings += boot_s != last_s
        self._rows[key] = first_s, boot_s, readings  # at the end: what nobody reads goes first
        while len(self._rows) > self._keys_max:
            del self._rows[next(iter(self._rows))]
        return Lasting(readings, boot_s - first_s)

    def goes_on(self, key: Hashable) -> bool:
        """Whether it was so in the last reading."""
        return key in self._rows

    def keep(self, keys: Container[Hashable]) -> None:
        """Forgets all others."""
        self._rows = {key: row for key, row in self._rows.items() if key in keys}


def strike(times: Times, key: str, at_s: float, burst_s: float, keys_max: int) -> list[float]:
    """Notes that it happened, once for what happens in quick succession; the times that are kept.
    The newest key goes to the end: the oldest is forgotten first."""
    kept = times.pop(key, [])
    if not kept or at_s - kept[-1] > burst_s:
        kept = [*kept, at_s][-TIMES_MAX:]
    times[key] = kept
    while len(times) > keys_max:
        del times[next(iter(times))]
    return kept


def recent(times: Iterable[float], now_s: float, span_s: float) -> list[float]:
    return [at_s for at_s in times if now_s - span_s < at_s <= now_s]
