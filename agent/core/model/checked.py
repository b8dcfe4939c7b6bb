"""What a check of this node said last, as one level.

Owns the types of a check's verdict; how a verdict is found is agent/core/checks/verdict.py's.
"""

from __future__ import annotations

from .time import Value

OK, WARNING, CRITICAL, UNKNOWN = STATUSES = "ok", "warning", "critical", "unknown"
NO_LIMIT = ""


class Measure(Value, frozen=True):
    """One number that a check measured.  More is better for all of them."""

    name: str  # "gemm_float32", as limits name it
    value: float
    unit: str  # "B/s" | "FLOP/s"
    subject: str = ""  # "cpu", "cuda:3", "67108864 bytes"
    samples: tuple[float, ...] = ()  # the single ones that `value` is the median of


class CheckVerdict(Value, frozen=True, omit_defaults=False):
    """One check's verdict, as people, files and metrics see it."""

    check: str
    status: str
    reason: str
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    limit_from: str = NO_LIMIT
    limit_source: str = ""
    todo: str = ""
    took_s: float = 0.0
    wall_s: float = 0.0  # when it ended
    confirmed: bool = False  # critical twice in a row
    measures: tuple[Measure, ...] = ()
    table: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # whom a critical is about: "gpu/3"; () = the node

    @property
    def proven(self) -> bool:
        """Critical twice in a row: only that stops a start, or a scheduler's node."""
        return self.status == CRITICAL and self.confirmed
