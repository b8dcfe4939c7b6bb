"""How long a run's ranks wait for their gradients, or in all collectives: at first, and lately.

Owns the choice of what may be compared, and the two short windows.  It concludes nothing: that is
agent/core/detect/ranks/slow_collectives.py's.  Pure; it travels in the node's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from ..model import GradientSum, RankView, Value

WARM_ITERATIONS = 10  # of each generation: connections, allocations, DDP's rebuilt buckets
SAMPLES = 5  # of either window


class Sample(Value, frozen=True):
    """One measured iteration of each rank."""

    sum_s: float  # the shortest of the ranks' sums: whoever comes last waits for nobody
    wait_s: float  # the shortest wait behind a backward pass, for the same reason
    compute_s: float  # the longest of the ranks' passes: theirs is the pace of all
    step: int  # optimizer steps done when it was seen
    wall_s: float  # when that was


class GradientPace(Value, frozen=True):
    """What a run's case remembers of it."""

    world: int = 0
    size_bytes: int = 0
    generation: int = 0
    iteration: int = 0  # the highest that was taken
    first: tuple[Sample, ...] = ()  # of such a world and such gradients
    latest: tuple[Sample, ...] = ()  # of this generation, behind the first
    in_all: bool = False  # of all collectives, not of gradients alone

    @property
    def has_first(self) -> bool:
        return len(self.first) == SAMPLES

    @property
    def is_known(self) -> bool:
        """Whether the two can be compared."""
        return len(self.latest) == SAMPLES

    @property
    def newest(self) -> Sample | None:
        return (*self.first, *self.latest)[-1] if self.first else None

    @property
    def bandwidth(self) -> float:
        """Bus bandwidth in bytes a second, as nccl-tests defines it; 0 unknown.  At least: a sum
        that begins while a backward pass goes on may wait for the rest of it."""
        if self.newest is None or self.world < 2:
            return 0.0
        return 2.0 * (self.world - 1) / self.world * self.size_bytes / self.newest.sum_s


def look(
    pace: GradientPace, generation: int, world: int, ranks: Iterable[RankView], wall_s: float
) -> GradientPace:
    """With one more sample, once all ranks of the world show iterations behind the last one's.

    Of quick steps other nodes' ranks are seen a beat late, at an iteration of their own: that is
    so in both windows alike.  Where DDP sums over a part of the world alone (each stage of a
    pipeline its own) nothing is taken: of groups that are unlike each other the shortest wait
    says nothing.
    """
    members = [rank for rank in ranks if rank.gradients is not None]
    shown = [rank.gradients for rank in members if rank.gradients is not None]
    if world < 2 or len(shown) != world or any(one.world != world for one in shown):
        return pace
    size_bytes, least = shown[0].size_bytes, min(one.iteration for one in shown)
    in_all = shown[0].in_all
    if least <= WARM_ITERATIONS or any(
            (one.size_bytes, one.in_all) != (size_bytes, in_all) for one in shown):
        return pace
    if generation == pace.generation and least <= pace.iteration or not all(map(_is_sane, shown)):
        return pace
    if (world, size_bytes, in_all) != (pace.world, pace.size_bytes, pace.in_all):
        pace = GradientPace(world, size_bytes)
    if generation != pace.generation:
        # Ranks may have moved; half a window of the generation before is no beginning either.
        pace = GradientPace(world, size_bytes, generation, 0, pace.first if pace.has_first else ())
    sample = Sample(
        min(one.sum_s for one in shown), min(one.wait_s for one in shown),
        max(one.compute_s for one in shown), max(rank.step for rank in members), wall_s)
    first, latest = pace.first, pace.latest
    if not pace.has_first:
        first = (*first, sample)
    else:
        latest = (*latest, sample)[-SAMPLES:]
    newest = max(one.iteration for one in shown)
    return GradientPace(world, size_bytes, generation, newest, first, latest, in_all)


def wait_s(samples: Iterable[Sample]) -> float:
    return median(one.wait_s for one in samples)


def compute_s(samples: Iterable[Sample]) -> float:
    return median(one.compute_s for one in samples)


def _is_sane(one: GradientSum) -> bool:
    """A page is written by somebody else's process."""
    return 0.0 < one.sum_s < 1e6 and 0.0 <= one.wait_s <= one.sum_s and 0.0 < one.compute_s < 1e6
