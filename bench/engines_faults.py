"""A rank lost under each strategy: from its SIGKILL to the first new step on all four ranks.

Owns the cases; how one is run, and what counts, are bench/cases.py's.  Strategies take turns; each
is run once without a fault, whose weights the others must end with.  The model is the example's,
made small, so that a step is short beside what is measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cases import Case, measure

RANKS, GOAL_S = 4, 1.0
SMALL = ("model_options.width=64", "model_options.layers=2", "snapshot.every=2")
STRATEGIES = {
    "ddp": ("strategy=ddp",),
    "sdp": ("strategy=sdp", "topology.0=a", "topology.1=a", "topology.2=b", "topology.3=b"),
    "fsdp": ("strategy=fsdp",),
    "mics": ("strategy=mics", "mics.group=2"),
    "pipeline": ("strategy=pipeline", "pipeline.stages=2"),
    "pipeline in groups": ("strategy=pipeline", "pipeline.stages=2", "pipeline.group=2"),
}
NO_COPY = ("fsdp", "pipeline in groups")  # the lost part comes from a snapshot


def faults(runs: int) -> Iterator[dict[str, Any]]:
    """A row for each strategy."""
    cases = {name: Case(f"lost rank, {name}", "trainer", "sigkill", ranks=RANKS,
                        settings=(*SMALL, *settings)) for name, settings in STRATEGIES.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder:
        shared = Path(folder)
        whole = {name: measure(case._replace(fault="none"), shared).get("digest", "")
                 for name, case in cases.items()}
        for _ in range(runs):
            for name, case in cases.items():
                found[name].append(measure(case, shared))
    for name, rows in found.items():
        good = [row for row in rows if row["ok"]]
        took = [row["recovery_s"] for row in good]
        redone = [row["redone_steps"] for row in good]
        equal = bool(whole[name]) and all(row["digest"] == whole[name] for row in good)
        middle = statistics.median(took) if took else float("nan")
        yield {"case": "lost-rank", "strategy": name, "ranks": RANKS, "runs": runs,
               "recovery_s": took, "recovery_median_s": round(middle, 3),
               "after_verdict_s": [row.get("after_verdict_s") for row in good],
               "step_s": [row["step_s"] for row in good],
               "redone_steps": redone, "weights_equal": equal, "load": os.getloadavg()[0],
               "ok": len(good) == runs and middle <= GOAL_S and equal and (
                   name in NO_COPY or not any(redone)),
               "why": "; ".join(row["why"] for row in rows if row["why"])}
