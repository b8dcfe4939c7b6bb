"""Switches Holdfast on and off, one step to the next.

Owns what "off" means: the ticker thread sleeps for good, no hook and no page write happens, and
launcher, agent and their children are stopped.  Runs inside each measured rank, on all in the same
order, because a step waits for the slowest.  Each finished step is one line
`step all_on snapshots_on nanoseconds cadence`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

WARM_STEPS = 20  # first steps, the ticker's first beats, the choice of the snapshots' cadence
SILENT = ("phase", "step_begin", "step_end", "progress")
BESIDE = "beside"  # the file in which bench.overhead names the processes that an "off" stops
BESIDE_LIMIT_S = 60.0


class Switch:
    """One rank's.  `next_step()` is called between two steps."""

    def __init__(self, elastic: Any, record: Path, pairs: int) -> None:
        self.elastic, self.ticker = elastic, elastic._worker.ticker
        self.pairs = pairs
        self.gate = threading.Event()
        self.gate.set()
        self.calls = {name: getattr(elastic, name) for name in SILENT}
        self.optimizer_hooks = self._optimizer_hooks()
        self.beside: list[int] | None = None if record.name.endswith("-0") else []
        self.folder = record.parent
        self.record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self.record, b"ticker %d %d\n" % (os.getpid(), self.ticker.native_id))
        beat = self.ticker.beat

        def gated() -> None:
            self.gate.wait()
            beat()

        self.ticker.beat = gated
        self.step, self.hooks_on, self.began_ns = 0, True, 0
        self.cadence, self.skipping = 0, False

    @staticmethod
    def _optimizer_hooks() -> list[tuple[Any, dict[Any, Any]]]:
        from torch.optim import optimizer

        tables = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
        return [(table, dict(table)) for table in tables]

    def measuring(self) -> bool:
        return WARM_STEPS <= self.step < WARM_STEPS + 2 * self.pairs

    def next_step(self) -> None:
        """Writes the step that ended; sets the switch for the one that begins."""
        now = time.monotonic_ns()
        if self.began_ns:
            self.step += 1
            os.write(self.record, b"%d %d %d %d %d\n" % (
                self.step, self.hooks_on, not self.skipping, now - self.began_ns, self.cadence))
        wanted = True
        if self.measuring():
            if self.beside is None:
                self.beside = self._beside()
            pair, second = divmod(self.step - WARM_STEPS, 2)
            first_on = random.Random(pair).random() < 0.5
            wanted = first_on != bool(second)
        if wanted != self.hooks_on:
            self.set_hooks(wanted)
        self.began_ns = time.monotonic_ns()

    def _beside(self) -> list[int]:
        deadline_s = time.monotonic() + BESIDE_LIMIT_S
        while not (self.folder / BESIDE).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody said which processes to stop, for {BESIDE_LIMIT_S} s")
            time.sleep(0.01)
        return [int(pid) for pid in (self.folder / BESIDE).read_text().split()]

    def set_hooks(self, on: bool) -> None:
        """Rank 0 stops the processes beside and lets them go on; what they missed they make up for
        in the steps with everything on, so that these pay for up to two."""
        self.hooks_on = on
        for pid in self.beside or []:
            with contextlib.suppress(ProcessLookupError):  # a child of theirs may end
                os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
        for name, call in self.calls.items():
            setattr(self.elastic, name, call if on else _nothing)
        for table, content in self.optimizer_hooks:
            table.clear()
            table.update(content if on else {})
        if on:
            self.gate.set()
        else:
            self.gate.clear()

    def snapshot_wanted(self, step: int, cadence: int) -> bool:
        """Whether the cadence that `step` lies in has its snapshot; whole cadences take turns."""
        self.cadence = cadence
        if not self.measuring() or cadence < 1:
            self.skipping = False
            return True
        pair, second = divmod(step // cadence, 2)
        first_on = random.Random(-1 - pair).random() < 0.5
        self.skipping = first_on == bool(second)
        return not self.skipping


def _nothing(*_: Any) -> None:
    return None
