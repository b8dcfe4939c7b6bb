"""Bounded history: how long waits that ended well took, step times, what a restart cost.

Owns the numbers that suspicion and cost are measured against.  It concludes nothing, and it never
grows: every window has a maximum, so that an agent that runs for months stays as small as on its
first day.  Mutable on purpose (one owner, agent/core/run/progress.py); it travels in the node's
memory.
"""

from __future__ import annotations

from statistics import median_high

import msgspec

from ..model import RankView
from .gradient_pace import GradientPace

WAITS_MAX = 256  # a phase's p99 needs a few hundred samples, not more
RESTARTS_MAX = 16
MOVED_S = 0.01  # stillness and time are of two clocks, read one after the other
FAR_MOVED_S = 0.5  # ... and what another node says of its ranks is on its way for a while
MULTI_MOVE_STEPS = 1  # more steps between two looks: the wait we saw is all we know


class Waits(msgspec.Struct):
    """Waits of one phase that ended well."""

    longest_s: float = 0.0
    recent_s: list[float] = []

    def add(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)
        # In place: of thousands of ranks each adds one in a step.
        self.recent_s.append(seconds)
        del self.recent_s[:-WAITS_MAX]

    def p99_s(self) -> float:
        """0.0 while nothing is known."""
        return percentile(self.recent_s, 0.99)


Seen = tuple[RankView, float]  # the last look at a rank, and when that was: its wait ends since


class History(msgspec.Struct):
    """One run's windows."""

    waits: dict[str, Waits] = {}
    restarts_s: list[float] = []
    step_s: float = 0.0  # last known median over the ranks
    gradients: GradientPace = GradientPace()

    def restart_cost_s(self, startup_s: float) -> float:
        """Measured seconds of a restart; until one was measured, the run's own start-up."""
        return median_high(self.restarts_s) if self.restarts_s else startup_s

    def add_restart(self, seconds: float) -> None:
        self.restarts_s = [*self.restarts_s[-(RESTARTS_MAX - 1) :], seconds]

    def longest_s(self, phase: str) -> float:
        waits = self.waits.get(phase)
        return waits.longest_s if waits else 0.0

    def p99_s(self, phase: str) -> float:
        waits = self.waits.get(phase)
        return waits.p99_s() if waits else 0.0

    def look(self, ranks: tuple[RankView, ...], seen: dict[int, Seen], boot_s: float) -> None:
        """Learn from one look at the ranks; `seen` is replaced by what this look shows."""
        medians = [r.step_time_s for r in ranks if r.step_time_s > 0 and r.state == "running"]
        if medians:
            self.step_s = median_high(medians)
        for rank in ranks:
            before = seen.get(rank.rank)
            if before is not None and rank.state == "running":
                self._learn(*before, rank, boot_s)
            seen[rank.rank] = rank, boot_s

    def _learn(self, before: RankView, before_boot_s: float, rank: RankView, boot_s: float) -> None:
        if before.generation != rank.generation or before.state not in ("starting", "running"):
            return
        elapsed_s, stood_s = boot_s - before_boot_s, rank.still_s + rank.told_s
        would_s = before.still_s + before.told_s + elapsed_s  # if it had not moved
        moved_s = FAR_MOVED_S if rank.told_s else MOVED_S
        if elapsed_s <= 0 or stood_s >= would_s - moved_s:
            return  # a wait too short to be told from the clocks' difference teaches nothing
        # It moved.  Between two looks one step apart the wait lasted until it moved; over several
        # steps the moves in between are unknown, and only what was seen may count.
        many = rank.step - before.step > MULTI_MOVE_STEPS
        waited_s = before.still_s if many else would_s - stood_s
        if waited_s > 0:
            self.waits.setdefault(before.phase, Waits()).add(waited_s)


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
