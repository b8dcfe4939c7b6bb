"""A minute of the cores' time: which of them do nothing but kernel work.

Owns the readings of the last minute and the share of each core in them.  Kept whole and not core
by core: a large node has 1,500 of them every few seconds, and only the oldest and the newest are
compared.  Concludes nothing about why.  Pure.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import NamedTuple

from ...model import Rows, labels_of

NAME = "host_cpu_seconds_total"
IN_KERNEL = frozenset(("system", "irq", "softirq"))
SPAN_S, SLACK = 60.0, 1.25
GAP_S = 4.5  # the pace of the collector; a recorded tree may have another
PINNED = 0.9  # of a core's time, in the kernel and its interrupts
PINNED_S = 50.0  # ... over at least this much of the last minute


class Core(NamedTuple):
    """A core that does nothing but kernel work."""

    cpu: int
    share: float
    mean: float  # of all cores
    cores: int


class Look(NamedTuple):
    """One reading: seconds of each core since the boot, in the kernel and in all."""

    boot_s: float
    inside: dict[int, float]
    whole: dict[int, float]


class Run(NamedTuple):
    """Where the readings of one core stand, one after the other, and which of them are kernel's."""

    cpu: int
    first: int
    end: int
    inside: tuple[int, ...]


class Cores:
    """Takes readings of the cores' time, and names the cores that do kernel work alone."""

    def __init__(self) -> None:
        self._subjects: list[str] = []
        self._layout: list[Run] = []  # of these subjects: the same in each reading
        self._looks: deque[Look] = deque()
        self._pinned: list[Core] = []

    def take(self, samples: Rows) -> float:
        """The readings of NAME, however often; when they were read."""
        if not samples:
            return 0.0
        boot_s, looks = samples[0][3], self._looks
        if looks and boot_s < looks[-1].boot_s:
            looks.clear()  # another boot
        if looks and boot_s - looks[-1].boot_s < GAP_S:
            return boot_s
        subjects = list(map(itemgetter(1), samples))
        if subjects != self._subjects:
            self._subjects, self._layout = subjects, _layout(subjects)
        values = list(map(itemgetter(2), samples))
        inside: dict[int, float] = {}
        whole: dict[int, float] = {}
        for cpu, first, end, kernel in self._layout:
            whole[cpu] = whole.get(cpu, 0.0) + sum(values[first:end])
            inside[cpu] = inside.get(cpu, 0.0) + sum([values[one] for one in kernel])
        looks.append(Look(boot_s, inside, whole))
        while len(looks) > 2 and boot_s - looks[1].boot_s >= SPAN_S:
            looks.popleft()
        while boot_s - looks[0].boot_s > SPAN_S * SLACK:
            looks.popleft()
        self._pinned = _pinned(looks[0], looks[-1])
        return boot_s

    def pinned(self, boot_s: float) -> list[Core]:
        """Cores with nothing but kernel work over the minute before `boot_s`, the worst first."""
        fresh = self._looks and boot_s - self._looks[-1].boot_s <= SPAN_S
        return self._pinned if fresh else []


def _layout(subjects: list[str]) -> list[Run]:
    """The cores of a reading, in its order.  -1 stands for what names none."""
    runs: list[Run] = []
    for place, subject in enumerate(subjects):
        labels = labels_of(subject)
        word = labels.get("cpu", "")
        cpu = int(word) if word.isdecimal() else -1
        inside = (place,) if labels.get("mode") in IN_KERNEL else ()
        if runs and runs[-1].cpu == cpu:
            runs[-1] = runs[-1]._replace(end=place + 1, inside=runs[-1].inside + inside)
        else:
            runs.append(Run(cpu, place, place + 1, inside))
    return runs


def _pinned(first: Look, last: Look) -> list[Core]:
    """A core whose counters went back in between is left out: no share is ever invented."""
    if last.boot_s - first.boot_s < PINNED_S:
        return []
    shares: dict[int, float] = {}
    for core, whole_s in last.whole.items():
        by_s = whole_s - first.whole.get(core, whole_s)
        inside_s = last.inside.get(core, 0.0) - first.inside.get(core, 0.0)
        if by_s > 0.0 and inside_s >= 0.0:
            shares[core] = inside_s / by_s
    mean = sum(shares.values()) / len(shares) if shares else 0.0
    found = [Core(cpu, share, mean, len(shares)) for cpu, share in shares.items()
             if share >= PINNED]
    return sorted(found, key=lambda one: (-one.share, one.cpu))
