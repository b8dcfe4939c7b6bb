"""Counters that reset, wrap or vanish: what they grew by, and how fast.

Owns the arithmetic between two readings of one counter, and the last reading of each, bounded.  It
knows no name and judges nothing.  Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WRAPS = (2.0**32, 2.0**64)
# A counter that wrapped has grown by far less than its whole range since the last reading: else a
# large one that began anew would be taken for it.
WRAP_SHARE = 1 / 16
COUNTERS_MAX = 20_000

Key = tuple[str, str]  # name and subject of a sample


class Growth(NamedTuple):
    """What a counter grew by, and in which time.  `fell`: it wrapped, began anew, or is a sum
    that lost a part."""

    amount: float
    seconds: float
    fell: bool = False

    @property
    def per_s(self) -> float:
        return self.amount / self.seconds if self.seconds > 0.0 else 0.0


def increase(before: float, after: float) -> float:
    """Growth between two readings, never negative.  A lower value wrapped when that explains it by
    a small growth; else the counter began anew and has grown by what it shows.  What is no count
    (negative, NaN, infinite) grew by nothing."""
    if not (0.0 <= before < math.inf and 0.0 <= after < math.inf):
        return 0.0
    if after >= before:
        return after - before
    for whole in WRAPS:
        grown = whole - before + after
        if before < whole and grown < whole * WRAP_SHARE:
            return grown
    return after


class Rate:
    """The last reading of each counter.  One that vanishes is kept: when it comes back, its growth
    counts over the whole time."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[float, float]] = {}

    def take(self, key: Key, value: float, boot_s: float) -> Growth | None:
        """Growth since the last reading; None for the first, and for one that is not newer."""
        before = self._last.get(key)
        if not 0.0 <= value < math.inf or (before is not None and boot_s <= before[1]):
            return None
        if before is None and len(self._last) >= COUNTERS_MAX:
            self._last.clear()  # names that churn: all begin anew
        self._last[key] = value, boot_s
        if before is None:
            return None
        return Growth(increase(before[0], value), boot_s - before[1], value < before[0])
