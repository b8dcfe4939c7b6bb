"""The built-in data set, with a switch at the start of every step: measures the real trainer.

Owns the switch's place in the trainer's loop.  `batch` is called once a step on each rank (two
micro-batches on two ranks), so from one call to the next is one whole step, snapshots included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import holdfast.trainer.checkpoint.snapshot as snapshots
from holdfast.trainer.example.data import CodeSearch
from holdfast.worker import elastic

from .overhead_switch import Switch


class Data(CodeSearch):
    """[data_options] folder and pairs; everything else is the built-in set."""

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        super().__init__({}, work_dir)
        self.folder, self.pairs = Path(options["folder"]), int(options["pairs"])
        self.switch: Switch | None = None

    def batch(self, indices: Sequence[int]) -> Any:
        worker = elastic._worker
        if worker is not None and worker.assignment is not None:  # else: the warm-up
            if self.switch is None:
                rank = worker.assignment.rank
                self.switch = Switch(elastic, self.folder / f"overhead-{rank}", self.pairs)
                switch_snapshots(self.switch)
            self.switch.next_step()
        return super().batch(indices)


def switch_snapshots(switch: Switch) -> None:
    original = snapshots.Snapshots.after_step

    def after_step(self: Any, step: int, step_times_s: list[float]) -> None:
        cadence = 0 if self.decide_at else max(0, self.held.snapshot_every)
        if switch.snapshot_wanted(step, cadence):
            original(self, step, step_times_s)

    snapshots.Snapshots.after_step = after_step  # type: ignore[method-assign]
