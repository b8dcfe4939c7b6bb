"""What the ranks' logs may take on disk: beyond it the middle of a file is let go, and said.

Owns the size of each rank's two files.  A rank writes its file by itself, as do its children and
commands that know nothing of Holdfast: a renamed file would go on growing under its new name, and a
cut file would lose the lines written meanwhile.  So the file keeps its name and its length: a hole
is punched between its first lines and its newest, which frees blocks, moves no line, and waits for
nobody.  Whoever follows a file jumps over the hole (`after_hole`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from typing import Callable, Dict, List, NamedTuple

from .log_watch import STREAMS

LOOK_S = 1.0
BLOCK_BYTES = 1 << 16  # what a hole begins and ends at: larger than any file system's block
FIRST_PART = 4  # a quarter of the limit is the first lines, a half the newest: between two holes
NEWEST_PART = 2  # the file grows by the last quarter
KEEP_SIZE, PUNCH_HOLE = 1, 2  # linux/falloc.h
MARK = b"\n... holdfast: %d bytes dropped here, see --log-limit ...\n"
HOLE = re.compile(rb"\0{64,}")


class Dropped(NamedTuple):
    """The hole in one file, and what was last said of it."""

    begin: int
    end: int
    said: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def punch(fd: int, begin: int, end: int) -> None:
    """Frees the blocks of a part of a file; it reads as zeros then.  Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).fallocate64
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, KEEP_SIZE | PUNCH_HOLE, begin, end - begin):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def after_hole(fd: int, offset: int) -> int:
    """Where the next byte stands at or after `offset`; `offset` itself where nobody can say."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:
        return offset  # at the end of the file, or a file system that knows no holes


class LogLimit:
    """Keeps every file of one launcher's ranks below `limit_bytes` on disk; 0 = no limit."""

    def __init__(self, limit_bytes: int, say: Callable[[str, str], None]) -> None:
        self.limit_bytes, self.say = limit_bytes, say
        self.dropped: Dict[str, Dropped] = {}
        self.looked_s = 0.0
        self.problem = ""

    def tend(self, now_s: float, folders: List[str]) -> None:
        """One look a second at each file."""
        if not self.limit_bytes or self.problem or now_s - self.looked_s < LOOK_S:
            return
        self.looked_s = now_s
        for path in [os.path.join(folder, name) for folder in folders for name in STREAMS]:
            try:
                self.bound(path)
            except FileNotFoundError:
                continue  # nothing was written yet
            except OSError as error:
                # Without holes (NFS before 4.2) the file grows as it would without a limit.
                unable = error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
                why = "this file system cannot free a part of a file" if unable else str(error)
                self.problem = "--log-limit is not kept: %s: %s" % (path, why)
                self.say(self.problem, "warn")
                return

    def bound(self, path: str) -> None:
        status = os.stat(path)
        if min(status.st_size, status.st_blocks * 512) <= self.limit_bytes:
            return
        known = self.dropped.get(path)
        begin = known.begin if known else self.first_end(status.st_size)
        end = (status.st_size - self.limit_bytes // NEWEST_PART) // BLOCK_BYTES * BLOCK_BYTES
        if end <= (known.end if known else begin):
            return
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            punch(fd, begin, end)
            os.pwrite(fd, MARK % (end - begin), begin)
        finally:
            os.close(fd)
        now = Dropped(begin, end, known.said if known else 0)
        if now.nbytes >= 2 * now.said:  # at first, and whenever it has doubled
            self.tell(path, now)
            now = now._replace(said=now.nbytes)
        self.dropped[path] = now

    def first_end(self, size: int) -> int:
        """The end of what is kept of the file's begin."""
        return min(size, self.limit_bytes // FIRST_PART) // BLOCK_BYTES * BLOCK_BYTES

    def tell(self, path: str, hole: Dropped) -> None:
        self.say("%s is over --log-limit: %.1f MB of it dropped so far, from byte %d on; its first "
                 "lines and its newest are kept" % (path, hole.nbytes / 1e6, hole.begin), "warn")

    def end(self) -> None:
        """What was dropped since it was last said."""
        for path, hole in self.dropped.items():
            if hole.nbytes > hole.said:
                self.tell(path, hole)
                self.dropped[path] = hole._replace(said=hole.nbytes)
