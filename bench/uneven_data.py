"""The built-in data set with the uneven schedule in front of every batch, for the trainer.

Owns nothing but the place of the pauses, and which phase of the trainer each is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.trainer.example.data import CodeSearch
from holdfast.worker import elastic

from .uneven import carry_out, pause_of

PHASES = {"evaluation": "eval", "checkpoint": "checkpoint", "compile": "compile"}


class Data(CodeSearch):
    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        super().__init__({}, work_dir)
        self.step = 0

    def batch(self, indices: Sequence[int]) -> Any:
        worker = elastic._worker
        if worker is not None and worker.assignment is not None:  # else: the warm-up
            self.step += 1
            kind, seconds = pause_of(self.step, worker.assignment.rank)
            elastic.phase(PHASES.get(kind, "data"))  # as the trainer itself says it
            carry_out(kind, seconds)
            elastic.phase("data")
        return super().batch(indices)
