"""One rank as this agent sees it: its page, its process, and how long each has stood still.

Owns the page mapping and the descriptors of a rank, and the clocks that turn readings into levels
(still_s, stopped_s, active, reading).  The page is input from outside: mapped read-only, only when
sealed against shrinking, and never believed further than its bounds.
"""

from __future__ import annotations

import mmap
import os
import statistics
from collections import deque

import msgspec

from holdfast.worker import page as page_module
from holdfast.worker.page import PHASES, PageView

from ..core.model import GradientSum, RankView
from ..system import procfs
from .protocol import RankLevel

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ACTIVE_TICKS = 2  # clock ticks a second: more than the ticker's own 10 Hz ever costs
ACTIVE_BYTES = 4096  # bytes a second through files and sockets
READING_BYTES = 1_000_000  # a second, on average over READING_S: more than a thread that counts
READING_S = 10.0  # something reads of /proc, and less than a slow disk or mount gives
STILL_BEFORE_ACTIVITY_S = 0.5  # a rank that moves needs no reads of its children


def pidfd_pid(fd: int) -> int:
    """The pid behind a pidfd; 0 when the descriptor is something else, -1 when it has ended."""
    for line in procfs.read_small(f"/proc/self/fdinfo/{fd}").splitlines():
        if line.startswith(b"Pid:"):
            return int(line.split()[1])
    return 0


class RankMonitor:
    """What is kept about one rank between two looks.  Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, rank: int, pid: int, generation: int, proc: str = "/proc") -> None:
        self.rank = rank
        self.pid = pid
        self.generation = generation
        self.pidfd = -1
        self.error = ""  # why the page cannot be read
        self.said = False  # to a person
        self.view: page_module.PageView | None = None
        self._proc = proc
        self._map: mmap.mmap | None = None
        self._stat = procfs.StatFile(pid, proc)
        began = self._stat.read()
        self._start_boot_s = began.start_ticks / TICKS_PER_S if began is not None else 0.0
        self._cgroup = procfs.memory_cgroup(pid, proc)  # once: nobody moves a rank that runs
        self._progress: tuple[object, ...] = ()
        self._progress_s = 0.0
        self._looked_s = 0.0
        self._state = "?"
        self._stopped_since_s = 0.0
        self._activity = procfs.Activity()
        self._activity_s = 0.0
        self._active = True
        self._read_bytes = 0  # by all that were below the rank while it stood still
        self._reads = deque[tuple[float, int]]()  # (when, that) of the last seconds' looks

    def attach(self, mapping: mmap.mmap | None, pidfd: int) -> None:
        self._map = mapping
        self.pidfd = pidfd

    def close(self) -> None:
        """Lets go of the page and the descriptors; the caller stopped watching pidfd before."""
        self._stat.close()
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def look_at_process(self, now_s: float) -> bool:
        """Reads the scheduler's state; True when a stop began or ended since the last look."""
        stat = self._stat.read()
        state = stat.state if stat is not None else "?"
        if state == "T" and procfs.is_traced(self.pid, self._proc):
            state = "t"
        was_stopped = self._stopped_since_s > 0.0
        if state != "T":
            self._stopped_since_s = 0.0
        elif not was_stopped:
            self._stopped_since_s = now_s
        self._state = state
        return was_stopped != (self._stopped_since_s > 0.0)

    def look_at_page(self, now_s: float) -> None:
        """Reads the page and moves `still` on.  A change is dated by the page's own clock, but
        never outside the time between this look and the last."""
        progress: tuple[object, ...] = ()
        progress_s = now_s
        if self._map is not None:
            try:
                view = page_module.read_page(self._map)
            except ValueError as error:
                # Of a rank whose page means nothing it is not known that it stands still.
                self.error, self.view, self._looked_s = str(error)[:200], None, 0.0
            else:
                self.error, self.view = "", view
                progress = (
                    view.generation, view.step, view.phase, view.phase_begin_ns,
                    view.step_begin, view.step_end, view.groups, view.progress_ns,
                )
                progress_s = view.progress_ns / 1e9
        if self._looked_s == 0.0 or progress != self._progress:
            earliest_s = self._looked_s or now_s
            self._progress_s = min(max(progress_s, earliest_s), now_s)
            self._progress = progress
        self._looked_s = now_s

    def look_at_activity(self, now_s: float) -> None:
        """Reads processor time and I/O of the rank and its children, once a second at most, and
        only of a rank that stands still.  Until two readings exist it counts as active, and where
        /proc hides it, for each process that lives has had some processor time."""
        if now_s - self._progress_s < STILL_BEFORE_ACTIVITY_S:
            self._activity_s, self._active = 0.0, True
            self._reads.clear()
            return
        elapsed_s = now_s - self._activity_s
        if self._activity_s and elapsed_s < 0.9:
            return
        found, before = procfs.activity(self.pid, self._proc), self._activity
        if self._activity_s and found.ticks:
            more_ticks = abs(found.ticks - before.ticks)  # a child that ended takes its own along
            more_bytes = abs(found.moved_bytes - before.moved_bytes)
            self._active = (
                more_ticks >= ACTIVE_TICKS * elapsed_s or more_bytes >= ACTIVE_BYTES * elapsed_s
            )
        if not self._activity_s:
            before = found
        own = dict(before.read_bytes)
        self._read_bytes += sum(max(0, now - own.get(pid, 0)) for pid, now in found.read_bytes)
        self._activity, self._activity_s = found, now_s
        self._reads.append((now_s, self._read_bytes))
        while now_s - self._reads[0][0] > READING_S:
            self._reads.popleft()

    def _is_reading(self) -> bool:
        """Whether bytes come at a steady rate while the rank stands still."""
        if len(self._reads) < 2:
            return False
        (since_s, first), (until_s, last) = self._reads[0], self._reads[-1]
        return last - first >= READING_BYTES * (until_s - since_s)

    def level(self, reported: RankLevel, node: str, now_s: float, where: str = "") -> RankView:
        """The rank as a level for the core: the launcher's word plus what was read here."""
        view = self.view
        stopped_s = now_s - self._stopped_since_s if self._stopped_since_s else 0.0
        level = RankView(
            rank=reported.rank, node=node, pid=reported.pid, generation=reported.generation,
            state=reported.state, ended=reported.ended, parked=reported.parked,
            still_s=max(0.0, now_s - self._progress_s), proc_state=self._state,
            traced=self._state == "t", stopped_s=stopped_s, active=self._active, where=where,
            flight=reported.flight, place=reported.place, cgroup=self._cgroup,
            start_boot_s=self._start_boot_s, reading=self._is_reading(),
        )
        if view is None or view.generation != reported.generation:
            # The page of a kept process still shows its last generation until it is told the new
            # one: its step and phase would be read as the new one's.
            return msgspec.structs.replace(level, page=False)
        steps_ns = [ns for ns in view.last_step_ns if ns > 0]
        return msgspec.structs.replace(
            level,
            step=view.step,
            phase="exit" if view.outcome and view.code == 0 else view.phase,
            beat_age_s=max(0.0, now_s - view.beat_ns / 1e9) if view.beat_ns else 0.0,
            seq=view.groups,
            step_seq=view.step_seq,
            step_time_s=statistics.median(steps_ns) / 1e9 if steps_ns else 0.0,
            phase_s=_phase_s(view, now_s),
            gradients=_gradients(view),
        )


def _phase_s(view: PageView, now_s: float) -> tuple[tuple[str, float], ...]:
    """Seconds of each phase, with those of the one that goes on: its account is closed at its end
    alone."""
    ongoing_s = max(0.0, now_s - view.phase_begin_ns / 1e9) if view.phase_begin_ns else 0.0
    return tuple((name, ns / 1e9 + (ongoing_s if name == view.phase else 0.0))
                 for name, ns in zip(PHASES, view.phase_ns, strict=True))


def _gradients(view: PageView) -> GradientSum | None:
    found = view.gradients
    if not found.iteration:
        return None
    return GradientSum(found.iteration, found.sum_ns / 1e9, found.wait_ns / 1e9,
                       found.compute_ns / 1e9, found.size_bytes, found.world, bool(found.in_all))


def bare_level(reported: RankLevel, node: str) -> RankView:
    """A rank without a page or process here: an ended one, or one whose page is on its way."""
    return RankView(
        rank=reported.rank, node=node, pid=reported.pid, generation=reported.generation,
        state=reported.state, ended=reported.ended, parked=reported.parked, flight=reported.flight,
        page=False, place=reported.place,
    )
