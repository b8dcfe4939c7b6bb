"""How fast a resource is used up, and when nothing of it will be left.

Owns one bounded window of readings and the rate that can be believed.  It concludes nothing.  Pure;
mutable on purpose, with one owner.
"""

from __future__ import annotations

from statistics import median

EVERY_S = 60.0  # readings nearer than this to the one before are not kept
POINTS_MAX = 60  # an hour
POINTS_MIN = 10


class Trend:
    """A window over one quantity, oldest first."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []  # (boot_s, value)

    def add(self, boot_s: float, value: float) -> None:
        """A time that does not move on begins anew: it is another boot's."""
        if self._points and boot_s < self._points[-1][0]:
            self._points = []
        if not self._points or boot_s - self._points[-1][0] >= EVERY_S:
            self._points = [*self._points[-(POINTS_MAX - 1) :], (boot_s, value)]

    def covers_s(self) -> float:
        """How long the window is."""
        return self._points[-1][0] - self._points[0][0] if self._points else 0.0

    def falls_per_s(self) -> float:
        """How fast the value falls; 0.0 while that is not known, or not steady.

        The window is cut in three, and each third stands for itself by its median, so that one
        file written and deleted again does not count.  Of the falls from third to third the slower
        one counts: what fell once and then stayed (a dataset was copied) is used up no further.
        """
        size = len(self._points) // 3
        if len(self._points) < POINTS_MIN:
            return 0.0
        parts = (self._points[:size], self._points[size:-size], self._points[-size:])
        # Of an even number the mean of both in the middle: the nearest rank would take the later
        # time and the earlier value of a fall, and make it slower than it is.
        times = [median([boot_s for boot_s, _ in part]) for part in parts]
        values = [median([value for _, value in part]) for part in parts]
        falls = [
            (values[index] - values[index + 1]) / (times[index + 1] - times[index])
            for index in (0, 1)]
        return max(0.0, min(falls))
