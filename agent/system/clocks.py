"""One instant by two clocks: how long a rank stands still is measured by both.

Owns how far apart the two readings of one instant may be.
"""

from __future__ import annotations

import time

APART_S = 0.001
TRIES = 8  # a machine so busy that each try is interrupted gets the last one


def boot_s() -> float:
    """CLOCK_BOOTTIME, which counts on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def instant() -> tuple[float, float]:
    """(CLOCK_MONOTONIC, CLOCK_BOOTTIME) seconds, read together.  A process that is held up in
    between reads them again: later it would take the pause for a move of every rank."""
    for _ in range(TRIES):
        now_s = time.monotonic()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if time.monotonic() - now_s < APART_S:
            break
    return now_s, boot_s
