"""Whether two runs are equally good: a paired bootstrap over their held-out pairs.

Owns the statistics, a pure function of two lists of places and a seed.  Must not read files.  Both
runs answer the same queries, so that what is drawn again and again is a pair of answers: what makes
a query hard for both cancels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
CELLS, DRAWN_AT_ONCE = 2000, 4_000_000  # with more cells fewer resamples; 32 MB at a time
CONFIDENCE = 0.95
PAIRS_MIN = 30  # below this the spread of the differences is not known
DIFFERING_MIN = 10  # and with fewer pairs that differ, not how they do
CUTOFF_MAX = 1000
WITHIN, OUTSIDE, UNKNOWN = "within", "outside", "too few pairs to tell"
_METRIC = re.compile(r"(mrr|recall)(?:@|_at_)(\d{1,4})\Z")
_MARGIN = re.compile(r"(\d+(?:\.\d*)?(?:[eE]-?\d+)?) ?(%?)\Z")


class Metric(NamedTuple):
    """`mrr@10`: one divided by the place of the right answer, 0 beyond it; `recall@10`: 1 or 0."""

    kind: str
    cutoff: int

    def of(self, places: Sequence[int]) -> np.ndarray:
        found = np.asarray(places, dtype=np.int64)
        value = 1.0 / found if self.kind == "mrr" else np.ones(len(found))
        return np.where(found <= self.cutoff, value, 0.0)


class Margin(NamedTuple):
    """`0.1%` of the first run's value, or `0.001` as a difference of the two."""

    size: float
    relative: bool


class Parity(NamedTuple):
    """What the comparison came to.  Differences are second minus first, and relative to the first
    when the margin is."""

    metric: str
    first: float
    second: float
    difference: float
    low: float | None  # of the interval; None where nothing bounds it
    high: float | None
    margin: float
    relative: bool
    pairs: int
    differing: int
    verdict: str
    why: str


def metric(text: str) -> Metric:
    """Raises ValueError with what to give."""
    match = _METRIC.match(text.strip().lower())
    if not match or not 1 <= int(match[2]) <= CUTOFF_MAX:
        raise ValueError(f"{text[:40]!r}: give mrr@K or recall@K with K from 1 to {CUTOFF_MAX}")
    return Metric(match[1], int(match[2]))


def margin(text: str) -> Margin:
    """Raises ValueError with what to give."""
    match = _MARGIN.match(text.strip())
    size = float(match[1]) / (100.0 if match[2] else 1.0) if match else 0.0
    if not match or not 0.0 < size <= 1.0:
        raise ValueError(f"{text[:40]!r}: give a part as 0.1%, or a difference as 0.001")
    return Margin(size, bool(match[2]))


def compare(
    first: Sequence[int], second: Sequence[int], measure: Metric, allowed: Margin,
    seed: int = 0, same_weights: bool = False,
) -> Parity:
    """Place i of both lists belongs to the same pair."""
    before, after = measure.of(first), measure.of(second)
    pairs, differing = len(before), int((before != after).sum())
    means = float(before.mean()) if pairs else 0.0, float(after.mean()) if pairs else 0.0
    name = f"{measure.kind}@{measure.cutoff}"

    def found(difference: float, low: float, high: float, verdict: str, why: str) -> Parity:
        return Parity(
            name, *means, difference, low if math.isfinite(low) else None,
            high if math.isfinite(high) else None, allowed.size, allowed.relative, pairs, differing,
            verdict, why)

    if pairs and same_weights and not differing:
        return found(0.0, 0.0, 0.0, WITHIN, "the same weights, to the last bit")
    if pairs < PAIRS_MIN:
        return found(means[1] - means[0], -math.inf, math.inf, UNKNOWN,
                     f"{pairs} pairs, and {PAIRS_MIN} are the least")
    if not differing:
        return found(0.0, 0.0, 0.0, WITHIN, "every pair has the same value in both")
    if allowed.relative and means[0] == 0.0:
        return found(means[1], -math.inf, math.inf, UNKNOWN,
                     "the first run found nothing: a part of 0 says nothing; give a difference")
    difference, low, high = _interval(before, after, allowed.relative, seed)
    if differing < DIFFERING_MIN:
        # How they differ is not known; but one pair changes by 1 at most.
        share = _share_at_most(differing, pairs)
        edge = share / means[0] if allowed.relative else share
        if edge <= allowed.size:
            return found(difference, -edge, edge, WITHIN,
                         f"{differing} pairs differ: of all no more than {share:.2%} would")
        return found(difference, low, high, UNKNOWN,
                     f"{differing} pairs differ, and {DIFFERING_MIN} are the least to know how")
    if -allowed.size <= low and high <= allowed.size:
        return found(difference, low, high, WITHIN, "the whole interval is within the margin")
    if low > allowed.size or high < -allowed.size:
        return found(difference, low, high, OUTSIDE, "the whole interval is outside the margin")
    return found(difference, low, high, UNKNOWN,
                 _enough(pairs, difference, low, high, allowed.size))


def _share_at_most(found: int, of: int) -> float:
    """The largest share with which so few still come by chance: the exact binomial bound
    (Clopper and Pearson, 1934)."""
    low, high = found / of, 1.0
    while high - low > 1e-9:
        share = (low + high) / 2
        chance = sum(math.exp(
            math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
            + k * math.log(share) + (of - k) * math.log1p(-share)) for k in range(found + 1))
        low, high = (share, high) if chance > (1.0 - CONFIDENCE) / 2 else (low, share)
    return high


def _enough(pairs: int, difference: float, low: float, high: float, size: float) -> str:
    """An interval shrinks with the root of the number of pairs."""
    said, room = "the interval reaches over the margin's edge", size - abs(difference)
    half = (high - low) / 2
    if room <= 0 or not math.isfinite(half):
        return said
    return f"{said}: some {math.ceil(pairs * (half / room) ** 2):,} pairs would tell"


def _interval(
    before: np.ndarray, after: np.ndarray, relative: bool, seed: int
) -> tuple[float, float, float]:
    """The difference and its percentile interval.

    A pair counts by its two values alone, of which mrr@10 has 11 each: to draw how often each of
    these 121 cells comes is the same as to draw pairs, and costs the same for a million of them.
    """
    pairs = len(before)
    values, first = np.unique(before, return_inverse=True)
    others, second = np.unique(after, return_inverse=True)
    cells, counts = np.unique(first * len(others) + second, return_counts=True)
    worth = np.stack([values[cells // len(others)], others[cells % len(others)]], axis=1)
    resamples = RESAMPLES if len(cells) <= CELLS else RESAMPLES // 5
    draw, means = np.random.default_rng(seed), []
    for begin in range(0, resamples, step := max(1, DRAWN_AT_ONCE // len(cells))):
        size = min(step, resamples - begin)
        means.append(draw.multinomial(pairs, counts / pairs, size=size) @ worth / pairs)
    drawn = np.concatenate(means)
    changes = drawn[:, 1] - drawn[:, 0]
    difference = float(after.mean() - before.mean())
    if relative:
        difference /= float(before.mean())
        # One that draws nothing that the first run found is as far out as can be.
        changes = np.divide(changes, drawn[:, 0], where=drawn[:, 0] > 0,
                            out=np.full(resamples, np.inf))
    tail = (1.0 - CONFIDENCE) / 2
    # A value that was drawn, never one between two: of infinite ones there is none.
    low, high = np.quantile(changes, [tail, 1.0 - tail], method="inverted_cdf")
    return difference, float(low), float(high)
