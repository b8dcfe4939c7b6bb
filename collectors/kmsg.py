"""The kernel's log, line by line with its sequence numbers.

Owns /dev/kmsg (or a recorded file in its place).  Understands no line: rules are the catalogue's
and the core's business.  Keeps the latest lines for a while, because what is observed is levels.
"""

from __future__ import annotations

import os
from collections import deque

from .sample import LogLine, NoData

LINES_MAX = 512
KEPT_S = 60.0
LINE_MAX_BYTES = 8192  # the kernel's own limit for one record
LINES_PER_READ = 1000
TEXT_MAX = 1000


class KernelLog:
    """See the module.  `missed` counts lines that the kernel overwrote before they were read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.missed = 0
        self._fd = -1
        self._next = -1
        self._lines: deque[LogLine] = deque(maxlen=LINES_MAX)

    def open(self) -> int:
        """Opens the log at its end; the descriptor to wait on.  NoData where it may not be read."""
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.close()
            raise NoData(f"{self.path}: {error.strerror}: needs CAP_SYSLOG") from error
        return self._fd

    def read(self, boot_s: float) -> int:
        """Takes what is there; how many lines.  OSError when the log can no longer be read."""
        taken = 0
        while self._fd >= 0 and taken < LINES_PER_READ:
            try:
                record = os.read(self._fd, LINE_MAX_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overrun: the next read goes on with the oldest line that is left
            if not record:
                break
            line = parse(record, boot_s)
            if line is None:
                continue
            if self._next >= 0 and line.cursor > self._next:
                self.missed += line.cursor - self._next
            self._next = line.cursor + 1
            self._lines.append(line)
            taken += 1
        return taken

    def lines(self, boot_s: float) -> tuple[LogLine, ...]:
        """The lines of the last minute, oldest first."""
        while self._lines and boot_s - self._lines[0].boot_s > KEPT_S:
            self._lines.popleft()
        return tuple(self._lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse(record: bytes, boot_s: float) -> LogLine | None:
    """One record `priority,sequence,microseconds,flags;text\\n KEY=value...`; None when it is
    not of that form."""
    head, separator, rest = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3:
        return None
    try:
        sequence = int(fields[1])
    except ValueError:
        return None
    text = rest.partition(b"\n")[0].decode("utf-8", "replace")[:TEXT_MAX]
    return LogLine("kmsg", sequence, boot_s, text)
