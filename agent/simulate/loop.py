"""The simulator's time: an event heap, and the trace of what happened.

Owns the order of events.  Must not read a wall clock, and must not know what the events do: two
runs with the same seed pop the same events in the same order, which is all that makes a failing
seed worth printing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

Action = Callable[[], None]
TRACE_KEPT = 40  # events shown with a failing seed; enough for one recovery over three nodes


class InvariantBroken(AssertionError):
    """A property that must hold in every storm did not.  `invariant` is its name."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class Trace:
    """The last events, as (time_s, who, format, arguments); formatted only when somebody looks."""

    def __init__(self, sink: Callable[[str], None] | None = None) -> None:
        self._kept: deque[tuple[float, str, str, tuple[object, ...]]] = deque(maxlen=TRACE_KEPT)
        self._sink = sink
        self.count = 0

    def note(self, time_s: float, who: str, text: str, *values: object) -> None:
        """Record one event; `text` is a %-format over `values`."""
        entry = (time_s, who, text, values)
        self._kept.append(entry)
        self.count += 1
        if self._sink is not None:
            self._sink(_line(entry))

    def lines(self) -> list[str]:
        """The kept events, oldest first, one line each."""
        return [_line(entry) for entry in self._kept]


def _line(entry: tuple[float, str, str, tuple[object, ...]]) -> str:
    time_s, who, text, values = entry
    return f"{time_s:10.3f}  {who:<14} {text % values if values else text}"


class Loop:
    """Events by time, ties by order of arrival."""

    def __init__(self, trace: Trace) -> None:
        self.now_s = 0.0
        self.trace = trace
        self.events = 0
        self.pid = 1000  # of the newest process of this world
        self._heap: list[tuple[float, int, Action]] = []
        self._order = 0

    def at(self, when_s: float, action: Action) -> None:
        """Run `action` at `when_s`, or now if that is past."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` `delay_s` seconds from now."""
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, action))

    def run_until(self, end_s: float, check: Action | None = None, most: int = 2_000_000) -> None:
        """Pop events up to `end_s`; `check` runs after each.  More than `most` events is a fault
        of the simulated system (it spins), reported as such."""
        heap = self._heap
        while heap and heap[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(heap)
            action()
            self.events += 1
            if check is not None:
                check()
            if self.events > most:
                raise InvariantBroken("no_spin", f"{most} events before {end_s:.0f} s")
        self.now_s = max(self.now_s, end_s)

    def note(self, who: str, text: str, *values: object) -> None:
        """Record an event at the present time."""
        self.trace.note(self.now_s, who, text, *values)
