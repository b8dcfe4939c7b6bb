"""Collectives that take longer than in the run's first steps, while its ranks compute as before.

Owns when a lasting slow-down is said and when it is over.  It names no node and orders nothing: of
a ring of ranks every one waits for the slowest link.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from ...model import WARN
from ...series import gradient_pace
from ...series.gradient_pace import GradientPace
from .. import detector
from .ended import Cause

FAULT = "collectives_slow"
SLOW, WELL = 1.5, 1.25  # times the first: said from the one on, over below the other
ALIKE = 1.25  # times as long: ranks that compute as before
LEAST_SHARE, LEAST_S = 0.02, 0.001  # of a step, and at all: what less it costs is not worth a word


class SlowCollectives(detector.RunDetector):
    """Every one of the latest samples lies above every one of the first: no single late step, and
    no noise that the first ones had as well."""

    name = "collectives"

    def look(self, view: detector.RanksView) -> detector.Look:
        pace = view.state.history.gradients
        if pace.generation != view.plan.generation or not pace.is_known:
            return detector.Look()  # nothing can be compared: what was said stands
        before_s, now_s = (gradient_pace.wait_s(some) for some in (pace.first, pace.latest))
        if now_s < WELL * before_s + LEAST_S:
            return detector.Look(clears="the collectives are as fast as in its first steps again")
        return detector.Look(ticket=slow(view.state.run, pace, before_s, now_s))


def slow(run: str, pace: GradientPace, before_s: float, now_s: float) -> Cause | None:
    """None while it may be something else, or costs too little."""
    was_s, is_s = (gradient_pace.compute_s(some) for some in (pace.first, pace.latest))
    usual_s = max(WELL * before_s, *(one.wait_s for one in pace.first))
    if min(one.wait_s for one in pace.latest) <= usual_s or is_s > was_s * ALIKE:
        return None
    # A backward pass that is over sooner hides so much less of the same sums.
    more_s = now_s - before_s - max(0.0, was_s - is_s)
    if more_s < max(LEAST_S, LEAST_SHARE * (was_s + before_s), (SLOW - 1.0) * before_s):
        return None
    since = pace.latest[0]
    factor = f"{now_s / before_s:.1f} times as long as" if before_s > 0 else "longer than"
    as_before = "is as before" if is_s * ALIKE >= was_s else "is faster"
    what = "its collectives in a step" if pace.in_all else "its gradients"
    reason = (
        f"collectives of run {run} take {factor} in its first {pace.first[-1].step} steps since "
        f"{datetime.fromtimestamp(int(since.wall_s), UTC):%H:%M} UTC (step {since.step}): the rank "
        f"that comes last waits {now_s * 1e3:.3g} ms for {what}, {before_s * 1e3:.3g} ms "
        f"then; compute {as_before} ({is_s * 1e3:.3g} ms, {was_s * 1e3:.3g} ms)")
    return Cause(
        fault=FAULT, generation=pace.generation, reason=reason, step=since.step, severity=WARN,
        confidence=0.9, detector=SlowCollectives.name, evidence=(
            ("waits at first", _list(one.wait_s for one in pace.first)),
            ("waits lately", _list(one.wait_s for one in pace.latest)),
            ("gradients", f"{pace.size_bytes} bytes over {pace.world} ranks") if not pace.in_all
            else ("collectives", f"all that CPU tensors are in, of {pace.world} ranks"),
            ("look at", "`holdfast check --peers` between two runs, links and their errors")))


def _list(seconds: Iterable[float]) -> str:
    return ", ".join(f"{one * 1e3:.3g} ms" for one in seconds)
