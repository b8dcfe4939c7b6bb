"""The built-in data set in a trainer whose evaluations and stalls last as a test has it, and are
written down by this rank's own clock: lines of (what, begin, end), CLOCK_MONOTONIC seconds."""

from __future__ import annotations

import os
import time

from holdfast.trainer.checkpoint.write import Checkpoints
from holdfast.trainer.example.data import CodeSearch

STEP_S, EVALUATION_S, STALL_S = 0.05, 0.8, 0.6
log = open(f"{os.environ['CLOCKED']}-{os.getpid()}", "a", buffering=1)
save = Checkpoints.save


def stalls(self, step):
    begun_s = time.monotonic()
    time.sleep(STALL_S)
    save(self, step)
    log.write(f"checkpoint_stall {begun_s} {time.monotonic()}\n")


Checkpoints.save = stalls


class Data(CodeSearch):
    evaluates_s = 0.0

    def batch(self, indices):
        if self.evaluates_s:
            log.write(f"evaluation {self.evaluates_s} {time.monotonic()}\n")
            self.evaluates_s = 0.0
        log.write(f"step {time.monotonic()} {time.monotonic()}\n")
        time.sleep(STEP_S)
        return super().batch(indices)

    def heldout(self):
        self.evaluates_s = time.monotonic()
        time.sleep(EVALUATION_S)
        return super().heldout()
