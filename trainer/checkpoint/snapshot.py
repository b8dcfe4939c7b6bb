"""When this rank copies its share of the state into memory that outlives it.

Owns the cadence: as often as the measured cost allows.  The memory itself is the launcher's
(worker/rank/snapshot.py); without one there are no snapshots, and one line says so.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from ..config import SnapshotOptions
from ..group import Group
from ..state import State
from . import format as files
from .restore import Held

TRIALS = 3  # the first one faults the pages in; the cost is the median


class Snapshots:
    """One generation's snapshots of one rank."""

    def __init__(
        self, options: SnapshotOptions, state: State, group: Group, held: Held, elastic: Any
    ) -> None:
        self.options, self.state, self.elastic = options, state, elastic
        self.group, self.held = group, held
        number, of = group.copies.index(group.rank), len(group.copies)
        entries, self.begin, self.end = state.share(number, of)
        self.table = files.to_trailer(entries)
        self.on = options.enabled and elastic.active() and held.snapshot_every >= 0
        if options.every:
            held.snapshot_every = options.every
        self.decide_at = 0 if held.snapshot_every else held.step + TRIALS

    def after_step(self, step: int, step_times_s: list[float]) -> None:
        """Takes a snapshot if one is due; `step` optimizer steps are done."""
        if not self.on:
            return
        if self.decide_at:
            if step < self.decide_at:
                return
            self._choose(step, step_times_s)
        elif step % self.held.snapshot_every == 0:
            self._take(step)

    def _take(self, step: int) -> float:
        """Seconds it took; 0 when snapshots are off."""
        begin = time.monotonic()
        nbytes = self.end - self.begin
        buffer = self.elastic.snapshot_buffer(nbytes + len(self.table))
        if buffer is None:
            self.on = False
            if self.group.rank == 0:
                self._say_off()
            return 0.0
        buffer[:nbytes] = self.state.bytes(self.begin, self.end)
        buffer[nbytes:] = self.table
        # Of the copy, and before the header: a header never vouches for bytes that changed.
        self.elastic.snapshot_commit(step, files.digest(buffer))
        return time.monotonic() - begin

    def _say_off(self) -> None:
        self.elastic.report(
            "snapshot_off",
            f"no memory for snapshots of {self.state.nbytes / 1e6:.0f} MB: "
            "if every rank is lost, training resumes from disk")

    def _choose(self, step: int, step_times_s: list[float]) -> None:
        """Rank 0's measurement counts for all: every rank must take the same steps."""
        self.decide_at = 0
        costs = [self._take(step) if self.on else 0.0 for _ in range(TRIALS)]
        if self.group.rank == 0:
            cost_s, step_s = statistics.median(costs), statistics.median(step_times_s)
            share = self.options.cost_percent / 100.0
            every = max(1, math.ceil(cost_s / (share * step_s)))
            self.group.store.set("snapshot_every", str(every))
            if self.on:
                self.elastic.report(
                    "",
                    f"snapshot every {every} steps: {cost_s * 1e3:.1f} ms each, "
                    f"{100 * cost_s / (every * step_s):.2f} % of a step of {step_s:.3f} s")
        self.held.snapshot_every = int(self.group.store.get("snapshot_every"))
