"""Readings of counters over a while, for rates.

Owns the windows: bounded in readings, in age and in number.  A counter that goes back (a restart, a
wrap, another boot) begins anew, so that no rate is ever invented.  Concludes nothing.  Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from .counters import Growth

SLACK = 1.25


class CounterWindow:
    """One window for each key; about `gap_s` apart, so that `span_s` needs few readings.

    falls  whether the value may go down in good order (how many there are, not how often)
    slack  how many times the span a window may be long: readings come when they come
    """

    def __init__(
        self, span_s: float, gap_s: float, keys_max: int, falls: bool = False, slack: float = SLACK
    ) -> None:
        self._span_s, self._gap_s, self._keys_max = span_s, gap_s, keys_max
        self._falls, self._longest_s = falls, span_s * slack
        self._rows: dict[Hashable, deque[tuple[float, float]]] = {}

    def add(self, key: Hashable, boot_s: float, value: float) -> None:
        """One reading; the same one again changes nothing."""
        rows = self._rows.pop(key, None) or deque()
        if rows and (boot_s < rows[-1][0] or (value < rows[-1][1] and not self._falls)):
            rows.clear()
        if len(rows) > 1 and boot_s - rows[-2][0] < self._gap_s:
            rows.pop()  # the newest moves along until it is a whole gap away
        if not rows or boot_s > rows[-1][0]:
            rows.append((boot_s, value))
        while len(rows) > 2 and boot_s - rows[1][0] >= self._span_s:
            rows.popleft()
        while len(rows) > 1 and boot_s - rows[0][0] > self._longest_s:
            rows.popleft()
        self._rows[key] = rows  # the newest goes to the end: what nobody reads goes first
        while len(self._rows) > self._keys_max:
            del self._rows[next(iter(self._rows))]

    def grown(self, key: Hashable) -> Growth:
        """From the oldest reading in the window to the newest; nothing for fewer than two."""
        rows = self._rows.get(key)
        if not rows or len(rows) < 2:
            return Growth(0.0, 0.0)
        return Growth(rows[-1][1] - rows[0][1], rows[-1][0] - rows[0][0])

    def newest_s(self, key: Hashable) -> float:
        """When the key was read last; -1 when it never was."""
        rows = self._rows.get(key)
        return rows[-1][0] if rows else -1.0

    def keys(self) -> list[Hashable]:
        return list(self._rows)
