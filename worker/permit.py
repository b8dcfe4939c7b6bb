"""How long a script's ranks may compute here without a word from elsewhere.

Owns until when an order lets them, what renews that and when it is over; whoever ends ranks asks
here, a launcher and its likeness in the agent's simulator alike.  Times are CLOCK_BOOTTIME's, in
nanoseconds where they are whole numbers.
"""

from __future__ import annotations

from typing import Any, Dict


class RanOut(Exception):
    """An order to start whose permit was over before it was read."""


class Permit:
    """That of the newest generation; without an end where `until_ns` is 0."""

    def __init__(self, generation: int = 0, until_ns: int = 0) -> None:
        self.generation = generation
        self.until_ns = until_ns

    def renew(self, generation: int, until_ns: int) -> bool:
        """Whether this gives its ranks more time: another generation's word does not, nor does an
        older one."""
        if generation != self.generation or not 0 < self.until_ns < until_ns:
            return False
        self.until_ns = until_ns
        return True

    def is_over(self, now_ns: int) -> bool:
        """Nobody renewed it: another generation may start elsewhere, on the same checkpoints."""
        return 0 < self.until_ns < now_ns


def ordered_ns(body: Dict[str, Any], now_ns: int) -> int:
    """Until when an order to start lets its ranks compute; 0 = without an end.  RanOut where that
    has passed before the order was read."""
    permit_s = float(body.get("permit_s") or 0.0)
    if not permit_s:
        return 0
    until_s = float(body.get("permit_until_boot_s") or 0.0)  # not said by the release before
    until_ns = int(until_s * 1e9) if until_s else now_ns + int(permit_s * 1e9)
    if until_ns <= now_ns:
        raise RanOut("the permit of generation %d ran out before it was read" % body["generation"])
    return until_ns
