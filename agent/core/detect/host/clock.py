"""The node's clock: nobody keeps it, it is off, or it counts by a slow source.

Owns the limits.  Wall time is for people alone in Holdfast, but leases of stores, tokens of object
stores and the order of lines in several nodes' logs depend on it.  Shown, never acted on.  Pure.
"""

from __future__ import annotations

from ...model import WARN, Verdict
from ...series.streak import Streak
from ..detector import Detector, NodeView

PREFIX = "host_clock_"
UNKEPT_S = 300.0  # after a boot a time service needs minutes
OFFSET_S = 0.1
# It grows by 0.5 ms/s between two answers: chrony's stays below 0.1 s, and that of timesyncd, which
# asks every 2048 s when all is well, comes to 1.02 s each time.  At 16 s nobody keeps the clock.
MAX_ERROR_S = 3.0
SLOW_SOURCES = frozenset(("hpet", "acpi_pm", "pit", "jiffies", "refined-jiffies"))
NAMES = frozenset(PREFIX + one for one in (
    "synchronized", "offset_seconds", "max_error_seconds", "source_info"
))


class Clock(Detector):
    """The verdicts on this node's clock."""

    name = "clock"
    reads = (PREFIX,)
    warm_s = UNKEPT_S

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._streak = Streak(1)

    def look(self, view: NodeView) -> list[Verdict]:
        found: list[Verdict] = []
        values: dict[str, float] = {}
        read_s = 0.0
        for name, subject, value, boot_s in view.rows:
            if name not in NAMES:
                continue
            if name == "host_clock_source_info":
                source = subject.removeprefix("source=")
                if source in SLOW_SOURCES:
                    found.append(self.node_verdict(
                        "clock_source_slow", "clock", WARN,
                        f"the clock counts by {source}: every look at the time is a call into the "
                        "kernel, some 20 times as slow"))
                continue
            values[name[len(PREFIX) :]] = value
            read_s = boot_s
        why = self._why(values, read_s)
        if why:
            why = f"the clock {why}"
            found.append(self.node_verdict("clock_unsynchronised", "clock", WARN, why))
        return found

    def _why(self, values: dict[str, float], read_s: float) -> str:
        if "synchronized" not in values:
            return ""
        error_s = values.get("max_error_seconds", 0.0)
        kept = values["synchronized"] > 0.0
        unkept_s = self._streak.add("kept by nobody", read_s, not kept).seconds
        if kept:
            offset_s = values.get("offset_seconds", 0.0)
            if abs(offset_s) >= OFFSET_S:
                return f"is {abs(offset_s):.2f} s {'behind' if offset_s > 0.0 else 'ahead'}"
            return f"may be off by {error_s:.1f} s" if error_s >= MAX_ERROR_S else ""
        if unkept_s < UNKEPT_S:
            return ""
        return f"is kept by nobody since {unkept_s / 60:.0f} min and off by up to {error_s:.1f} s"
