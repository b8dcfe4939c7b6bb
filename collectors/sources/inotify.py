"""Which files of a folder were closed: the kernel's inotify, for a collector in a child of its own.

Owns its descriptor and the watches on folders, both bounded.  Sees the processes of this machine
alone: the kernel knows nothing of other clients of a network mount.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator

# A file that was opened to be read was closed.  The kernel merges equal events in a row, so
# openings are asked for as well: one stands between two closings.
IN_CLOSE_NOWRITE, IN_OPEN = 0x10, 0x20
IN_ONLYDIR = 0x01000000
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
IN_ISDIR = 0x40000000
HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name
WATCHES_MAX = 4096  # a user may have 8192 by default, and is not Holdfast alone
READS_MAX = 64  # of 64 KB a reading; the kernel keeps 16,384 events by default


class Watcher:
    """OSError where the kernel has no inotify or no room for one more."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._watches: dict[str, int] = {}

    def watch(self, folders: Iterable[str]) -> None:
        """Watches exactly these folders from now on: new ones are added, others dropped."""
        wanted = set(folders)
        for folder in [one for one in self._watches if one not in wanted]:
            self._libc.inotify_rm_watch(self._fd, self._watches.pop(folder))
        for folder in sorted(wanted - set(self._watches))[: WATCHES_MAX - len(self._watches)]:
            mask = IN_CLOSE_NOWRITE | IN_OPEN | IN_ONLYDIR
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
            if number >= 0:  # else it is gone already, or the user has no watches left
                self._watches[folder] = number

    def closed(self) -> Iterator[str]:
        """Names of files that were read and closed since the last time."""
        for _ in range(READS_MAX):
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            at = 0
            while at + HEAD.size <= len(data):
                _, mask, _, length = HEAD.unpack_from(data, at)
                name = data[at + HEAD.size : at + HEAD.size + length].rstrip(b"\0")
                at += HEAD.size + length
                if mask & IN_CLOSE_NOWRITE and not mask & IN_ISDIR and name:
                    yield os.fsdecode(name)

    def close(self) -> None:
        os.close(self._fd)
