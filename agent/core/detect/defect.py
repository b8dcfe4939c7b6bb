"""What is said of a bug of ours: in one run's step, or in one detector of the node.

Owns these two verdicts.  Who goes on without the part that failed is agent/core/node.py's.  Pure.
"""

from __future__ import annotations

from ..model import DEGRADED, UNKNOWN, RunView, Verdict


def run_not_judged(view: RunView, error: Exception) -> Verdict:
    """A bug of ours that one run's levels brought out."""
    what, where = _raised(error)
    return Verdict(
        fault="run_not_judged", subject=f"run/{view.run}", severity=DEGRADED, confidence=1.0,
        reason=f"a defect in holdfast: this run alone is neither judged nor brought back ({what})",
        evidence=(("exception", what), ("raised in", where)),
        detector="core", run=view.run, generation=view.generation,
    )


def detector_failed(node: str, name: str, error: Exception) -> Verdict:
    """A bug of ours that readings brought out."""
    what, where = _raised(error)
    return Verdict(
        fault="collector_failed", subject=f"node/{node}/detector/{name}", severity=UNKNOWN,
        confidence=1.0, evidence=(("exception", what), ("raised in", where)), detector="core",
        reason=f"a defect in holdfast: what is read for {name} is not judged anew ({what})",
    )


def _raised(error: Exception) -> tuple[str, str]:
    """An exception in words, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_qualname if trace is not None else "?"
    line = trace.tb_lineno if trace is not None else 0
    return f"{type(error).__name__}: {str(error)[:200]}", f"{code}, line {line}"
