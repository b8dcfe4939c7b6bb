"""How like a healthy node's a measurement is: the limit that nobody has to write down.

Owns the comparison of one measurement with those of nodes that passed.  The idea is SuperBench's
(arXiv 2402.06194): the distance of distributions instead of one hard number.  Here only what is
worse counts, for nobody excludes a node that is faster.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .verdict import BASELINE, FLEET, Limit, Measure, amount

PASSES_MIN = 5  # fewer say nothing of how far healthy nodes differ
NODES_MIN = 3  # the same of other nodes, each of which tells quantiles of all its passes
KEPT = 8  # quantiles that a node tells
SIMILAR = 0.95  # SuperBench's; a fleet whose healthy nodes differ more gets what they differ by
SIMILAR_LEAST = 0.75  # and no less, so that slow nodes cannot teach that slow is usual
QUANTILES = 16

Samples = Sequence[float]


def similarity(samples: Samples, healthy: Samples) -> float:
    """1 where no quantile of `samples` is below that of `healthy`, 0 where all are 0: one less the
    share of the healthy distribution that is missing."""
    places = [(one + 0.5) / QUANTILES for one in range(QUANTILES)]
    usual = [_quantile(healthy, at) for at in places]
    missing = sum(max(0.0, want - _quantile(samples, at)) for want, at in zip(usual, places))
    return 1.0 - missing / sum(usual) if sum(usual) > 0 else 1.0


def least_similarity(passes: Sequence[Samples]) -> float:
    """How like the others each healthy measurement is at least."""
    left_out = (
        similarity(one, [value for at, other in enumerate(passes) if at != own for value in other])
        for own, one in enumerate(passes))
    return max(SIMILAR_LEAST, min(SIMILAR, *left_out))


def summary(passes: Sequence[Samples]) -> tuple[float, ...]:
    """What a node tells others of its passes, to four digits; () while it has too few itself."""
    healthy = [value for one in passes for value in one]
    if len([one for one in passes if one]) < PASSES_MIN:
        return ()
    return tuple(float(f"{_quantile(healthy, (one + 0.5) / KEPT):.4g}") for one in range(KEPT))


def limit_of(measure: Measure, passes: Sequence[Samples], origin: str = BASELINE) -> Limit | None:
    """What this node's passes say, or those of others (FLEET); None while there are too few."""
    passes = [one for one in passes if one]
    least_count, of = (NODES_MIN, "other nodes") if origin == FLEET else (PASSES_MIN, "passes")
    if len(passes) < least_count:
        return None
    healthy = [value for one in passes for value in one]
    least = least_similarity(passes)
    samples = measure.samples or (measure.value,)
    found = similarity(samples, healthy)
    # Distributions are compared, so that a median above the limit's may still be too little.
    return Limit(origin, least * median(healthy), found >= least,
                 f"samples of {_range(samples, measure.unit)} are {found:.2f} like those of "
                 f"{len(passes)} {of} ({_range(healthy, measure.unit)}); {least:.2f} is enough")


def _range(samples: Samples, unit: str) -> str:
    return f"{amount(min(samples), unit)} to {amount(max(samples), unit)}"


def _quantile(samples: Samples, at: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]
