"""Committed checkpoints read back from the disk: only then are they called verified.

Owns the thread that reads, and its pace: training shares the disk and the memory bus with it.  A
written byte that reads otherwise is found here, while the older checkpoints still stand, and not on
the day of need.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from . import format as files

WAITING_MAX = 16  # the newest; an older one is read when a rank 0 begins anew
PAUSE_S = 0.05  # the shortest sleep worth taking


class ReadBack:
    """Proves what rank 0 committed, newest last, at most `mb_per_s`."""

    def __init__(self, elastic: Any, mb_per_s: float) -> None:
        self.elastic = elastic
        self.verified: list[str] = []  # paths, as they were proven
        self._bytes_per_s = mb_per_s * 1e6
        self._paths: deque[str] = deque(maxlen=WAITING_MAX)
        self._newest: tuple[Path, int] | None = None  # of which folder how many are to be asked for
        self._known: set[str] = set()
        self._changed, self._reading = threading.Condition(), False
        self._hurry = threading.Event()  # the run ends: nothing is left to share the disk with
        self._thread: threading.Thread | None = None

    def ask(self, path: str) -> None:
        """Has this checkpoint read back, once."""
        with self._changed:
            if path in self._known:
                return
            self._known.add(path)
            self._paths.append(path)
            self._begin()

    def ask_newest(self, root: Path, count: int) -> None:
        """Has the newest in this folder read back, those that were not.  They are looked for in the
        thread: ranks wait for who joins, and a shared file system may take its time."""
        with self._changed:
            self._newest = root, count
            self._begin()

    def _begin(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="read back", daemon=True)
            thread.start()  # a machine that refuses it may not do so the next time
            self._thread = thread

    def finish(self, wait_s: float) -> None:
        """Reads what is left at full speed; returns when that is done or `wait_s` is over."""
        self._hurry.set()
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._newest or self._paths or self._reading), wait_s)

    def wait(self, wait_s: float) -> None:
        """The same in the middle of a run: the disk is shared again afterwards."""
        self.finish(wait_s)
        self._hurry.clear()

    # -------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._reading = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._newest or self._paths)
                newest, self._newest, self._reading = self._newest, None, True
                path = str(newest[0]) if newest else self._paths.popleft()
            try:
                if newest:
                    for found in reversed(files.listing(newest[0])[: newest[1]]):
                        self.ask(found.path)
                else:
                    self._prove(Path(path))
            except Exception as error:  # the next one is read all the same
                self._not_known(path, files.words(error))

    def _prove(self, path: Path) -> None:
        _forget_cached(path)
        begin_s, nbytes = time.monotonic(), 0

        def pace(count: int) -> None:
            nonlocal nbytes
            nbytes += count
            ahead_s = nbytes / self._bytes_per_s - (time.monotonic() - begin_s)
            if ahead_s > PAUSE_S:
                self._hurry.wait(ahead_s)

        problems = files.verify(path, pace)
        if not files.may_be_committed(path):
            return  # keep-N let it go meanwhile, its marker first
        if not problems:
            self.verified.append(str(path))
            self.elastic.verified(str(path))
            return
        bad = files.worst(problems)
        if bad.unread:  # a disk that refuses has not shown other bytes
            return self._not_known(str(path), str(bad))
        place = path
        with contextlib.suppress(OSError):
            place = files.quarantine(path, bad.what)
        self.elastic.report("checkpoint_bad", f"{path}: {bad}; moved to {place}")
        self.elastic.bad_checkpoint(str(path), str(bad))

    def _not_known(self, path: str, why: str) -> None:
        """It may be asked for again: the next rank 0 does."""
        self._known.discard(path)
        self.elastic.report("checkpoint_failed", f"{path}: not read back: {why}")


def _forget_cached(path: Path) -> None:
    """Asks the kernel for the disk's bytes, in place of those that were just written from here."""
    with contextlib.suppress(OSError):
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
