"""The curves of the live page: loss and step time of each run that is here, in bounded memory.

Owns which points stay.  When a run's list is full every second point goes, and points are taken
half as often: a run of a month has as many as one of ten minutes.
"""

from __future__ import annotations

from typing import Any

import msgspec

POINTS_MAX = 600
RUNS_MAX = 32
EVERY_S = 1.0


class Point(msgspec.Struct, array_like=True):
    wall_s: float
    step: int
    generation: int
    step_s: float | None
    loss: float | None


class Curve:
    """One run's points, oldest first."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.every_s = EVERY_S

    def add(self, point: Point) -> None:
        last = self.points[-1] if self.points else None
        same = last is not None and last.generation == point.generation
        if last is not None and same and point.wall_s - last.wall_s < 0.9 * self.every_s:
            return
        self.points.append(point)
        if len(self.points) > POINTS_MAX:
            # A generation's first point stays: the page marks restarts by it.
            kept = self.points[:1]
            for number, (before, one) in enumerate(zip(self.points, self.points[1:], strict=False)):
                if number % 2 or before.generation != one.generation:
                    kept.append(one)
            self.points, self.every_s = kept[-POINTS_MAX:], self.every_s * 2


class Curves:
    """Those of all runs here."""

    def __init__(self) -> None:
        self._of: dict[str, Curve] = {}

    def add(self, run: str, point: Point) -> None:
        self._of.setdefault(run, Curve()).add(point)

    def keep(self, runs: set[str]) -> None:
        """Forgets others when there are too many."""
        for run in [one for one in self._of if one not in runs][: max(0, len(self._of) - RUNS_MAX)]:
            del self._of[run]

    def of(self, run: str) -> dict[str, Any]:
        curve = self._of.get(run, Curve())
        return {"every_s": curve.every_s, "points": msgspec.to_builtins(curve.points)}
