"""One detector of a node at a time, shown what a test says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.agent.core.detect.detector import Detector, NodeView
from holdfast.agent.core.detect.registry import NodeWatch
from holdfast.agent.core.model import Observed, Reading, Readings, RunView, Verdict, readings_of


def judged(
    detector: Detector, samples: Iterable[Reading] | Readings, memory: Any = None,
    runs: tuple[RunView, ...] = (),
) -> list[Verdict]:
    """What it says of these readings.  A memory that a test does not hand over is empty."""
    read = samples if isinstance(samples, Readings) else readings_of(samples)
    if memory is None and detector.memory is not None:
        memory = detector.memory()
    rows = read.under(*detector.reads) if detector.reads else ()
    return detector.look(NodeView(rows, Observed(samples=read, runs=runs), memory))


def of_node(samples: Iterable[Reading], runs: tuple[RunView, ...] = ()) -> list[Verdict]:
    """What all detectors of a node say of one reading."""
    return NodeWatch("n", {}).look(Observed(samples=readings_of(samples), runs=runs))
