"""tiny.py's data, no faster than a disk would give it: a run long enough to be hurt three times."""

from __future__ import annotations

import time

import tiny

BATCH_S = 0.05


class Data(tiny.Data):
    def batch(self, indices):
        time.sleep(BATCH_S)
        return super().batch(indices)
