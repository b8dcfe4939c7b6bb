"""The built-in data set with the uneven schedule in front of every batch, for the trainer.

Owns nothing but the place of the pauses: they happen in phase `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.trainer.example.data import CodeSearch
from holdfast.worker import elastic

from .uneven import carry_out, pause_of


class Data(CodeSearch):
    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        super().__init__({}, work_dir)
        self.step = 0

    def batch(self, indices: Sequence[int]) -> Any:
        worker = elastic._worker
        if worker is not None and worker.assignment is not None:  # else: the warm-up
            self.step += 1
            carry_out(*pause_of(self.step, worker.assignment.rank))
        return super().batch(indices)
