"""Watches a run from outside: when did which rank finish which step, without asking anybody.

Owns three readings.  PageWatch maps the ranks' pages read-only through /proc/PID/fd of the launcher
and its children; StepFile follows the lines that a script appends to an O_APPEND file, the one
method that works alike with and without Holdfast; LogWatch waits for words in a log and says when
they were written.  None signals or slows what it watches.

    python -m bench.observe PID      # prints every finished step of a launcher's ranks as JSON
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .common import POLL_S, ROOT, descendants

SCAN_S = 0.02  # between two looks for new pages
PAGES_MAX = 256
MERGE_NS = 20_000_000  # a page read in the middle of a step's end tells that step twice


def load_page_module() -> ModuleType:
    """worker/page.py by its file: the layout alone, whatever is installed."""
    spec = importlib.util.spec_from_file_location("bench_page", ROOT / "worker" / "page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_page"] = module
    spec.loader.exec_module(module)
    return module


pages = load_page_module()


class Step(NamedTuple):
    """One finished step of one rank; times are CLOCK_MONOTONIC nanoseconds."""

    rank: int
    generation: int  # 0 where the method cannot know
    step: int
    pid: int
    end_ns: int  # when it was finished; a page may tell up to one poll late, never early

    def row(self) -> list[int]:
        return [self.rank, self.generation, self.step, self.pid, self.end_ns]


class _Mapped:
    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        self.key = (0, 0)  # optimizer steps of this process, its step's number
        self.last: Step | None = None


class PageWatch:
    """All pages of one launcher.  `poll()` returns the steps finished since the last poll."""

    def __init__(self, launcher_pid: int) -> None:
        self.launcher_pid = launcher_pid
        self.known: dict[int, _Mapped] = {}  # inode of the memfd -> page
        self.scanned_s = 0.0
        self.steps: list[Step] = []

    def poll(self) -> list[Step]:
        now_s, gone = time.monotonic(), set[int]()
        if now_s - self.scanned_s >= SCAN_S:
            gone = self.scan()
            self.scanned_s = now_s
        fresh = [step for page in self.known.values() if (step := self._advance(page))]
        self.steps += fresh
        for inode in gone:  # else each kill made every poll longer, beside what is measured
            self.known.pop(inode).mapped.close()
        return fresh

    def scan(self) -> set[int]:
        """The launcher holds every page; a child's are looked at when its own cannot be read.  The
        inodes of those that it holds no more."""
        held: set[int] = set()
        if not self._scan_process(self.launcher_pid, held):
            for pid in descendants(self.launcher_pid):
                self._scan_process(pid, held)
            return set()
        return self.known.keys() - held

    def _scan_process(self, pid: int, held: set[int]) -> bool:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return False
        for name in names:
            try:
                if os.readlink(f"{folder}/{name}").startswith("/memfd:holdfast-page"):
                    held.add(self._map(f"{folder}/{name}"))
            except (OSError, ValueError):
                continue  # closed meanwhile, or no page
        return True

    def _map(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self.known and len(self.known) < PAGES_MAX:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.known[inode] = _Mapped(pages.map_readonly(fd))
            finally:
                os.close(fd)
        return inode

    def views(self) -> list[Any]:
        """Every page as it is now, standbys (rank -1) included."""
        found = []
        for page in self.known.values():
            try:
                found.append(pages.read_page(page.mapped))
            except ValueError:
                continue  # not filled in yet
        return found

    def _advance(self, page: _Mapped) -> Step | None:
        try:
            view = pages.read_page(page.mapped)
            if (view.step_end, view.step) == page.key or view.rank < 0:
                return None
            view = pages.read_page(page.mapped)  # once more: all fields of the step's end are in
        except ValueError:
            return None
        page.key = (view.step_end, view.step)
        if view.step < 1:
            return None
        step = Step(view.rank, view.generation, view.step, view.pid, view.progress_ns)
        last = page.last
        page.last = step
        repeated = (
            last is not None and last[:3] == step[:3] and step.end_ns - last.end_ns < MERGE_NS
        )
        return None if repeated else step


class StepFile:
    """Follows a file of lines `monotonic_ns rank step pid`."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb")  # open as long as the run goes on
        self.rest = b""
        self.steps: list[Step] = []

    def poll(self) -> list[Step]:
        data = self.rest + self.file.read(1 << 20)
        *lines, self.rest = data.split(b"\n")
        fresh = []
        for line in lines:
            end_ns, rank, step, pid = (int(word) for word in line.split())
            fresh.append(Step(rank, 0, step, pid, end_ns))
        self.steps += fresh
        return fresh

    def close(self) -> None:
        self.file.close()


class LogWatch:
    """When words were first written into a log, behind what it holds by now.

    A line carries no time.  The kernel stamps the file at each write, a tick of its clock too early
    at most (4 ms, 10 on some), however late it is read; where more was written behind the words
    before anybody looked, they count as written then, or when it was looked at."""

    def __init__(self, path: Path, words: str) -> None:
        self.file, self.words = open(path, "rb"), words.encode()
        self.file.seek(0, os.SEEK_END)
        self.said = b""
        self.at_ns = 0  # on the monotonic clock; 0: not yet

    def poll(self) -> None:
        if self.at_ns or not (fresh := self.file.read()):
            return
        self.said += fresh
        if self.words in self.said:
            behind_ns = time.time_ns() - os.fstat(self.file.fileno()).st_mtime_ns
            self.at_ns = time.monotonic_ns() - max(0, behind_ns)
            self.file.close()

    def close(self) -> None:
        self.file.close()


def main() -> None:
    watch = PageWatch(int(sys.argv[1]))
    while os.path.exists(f"/proc/{watch.launcher_pid}"):
        for step in watch.poll():
            print(json.dumps(step._asdict()), flush=True)
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
