"""The kernel's log, line by line with its sequence numbers.

Owns /dev/kmsg (or a recorded file in its place).  Understands no line: rules are the catalogue's
and the core's business.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque

from ..contract import LogLine, NoData

LINE_MAX_BYTES = 8192  # the kernel's own limit for one record
LINES_PER_READ = 1000
TEXT_MAX = 1000
FILE_MAX_BYTES = 16 << 20  # of a recorded log
# Flags of a record that continues an earlier one.  In the lines of an OOM the kernel prints the
# cpuset separately: where another line came between, or the record was full, the next record begins
# with a name that any user may have chosen.
PIECES = ([b"c"], [b"+"])
USER = 1  # the facility that the kernel gives to lines of programs


class KernelLog:
    """The open log.

    missed    lines that the kernel overwrote before they were read, by their sequence numbers
    overruns  how often it said so
    foreign   lines that a program wrote and the kernel did not say
    broken    records that were too long, not of the kernel's form, or a later piece of a line
    """

    def __init__(self, path: str, users: bool = False) -> None:
        """users: take lines that programs wrote as well.  For tests: whoever may write to the
        log could name any hardware."""
        self.path = path
        self.users = users
        self.missed = self.overruns = self.foreign = self.broken = 0
        self._fd = -1
        self._next = -1
        self._after = -1
        self._recorded: deque[bytes] | None = None
        self._behind = False  # lines from before the log was opened are still to be read
        self._slept_s = slept_s()

    @property
    def next(self) -> int:
        """The sequence number that is expected next; -1 while none was seen."""
        return self._next

    def open(self, after: int | None = None) -> int:
        """Opens the log at its end, or behind the record `after` (-1: at its begin); the
        descriptor to wait on.  NoData where it may not be read."""
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                text = os.read(self._fd, FILE_MAX_BYTES)
                self._recorded = deque(text.splitlines())
            elif after is None:
                os.lseek(self._fd, 0, os.SEEK_END)
            else:
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._behind = True
        except OSError as error:
            self.close()
            raise NoData(f"{self.path}: {error.strerror}: needs CAP_SYSLOG") from error
        if after is not None:
            self._after = after
            self._next = after + 1 if after >= 0 else -1
        return self._fd

    def read(self, boot_s: float) -> tuple[LogLine, ...]:
        """Takes what is there, at most LINES_PER_READ records.  OSError when the log can no
        longer be read."""
        taken: list[LogLine] = []
        for _ in range(LINES_PER_READ):
            record = self._record()
            if record is None:
                self._behind = False
                break
            line = parse(record, boot_s, self._slept_s if self._behind else -1.0)
            if line is None:
                self.broken += bool(record)
                continue
            if line.cursor <= self._after:
                continue  # taken before the agent's restart
            if 0 <= self._next < line.cursor:
                self.missed += line.cursor - self._next
            self._next = line.cursor + 1
            fields = record.partition(b";")[0].split(b",")
            facility = int(fields[0]) >> 3
            if facility and not (self.users and facility == USER):
                self.foreign += 1
                continue
            if fields[3:4] in PIECES:
                self.broken += 1
                continue
            taken.append(line)
        return tuple(taken)

    def _record(self) -> bytes | None:
        """The next record; b"" for a lost one, None when there is no more."""
        if self._fd < 0:
            return None
        if self._recorded is not None:
            return self._recorded.popleft() if self._recorded else None
        try:
            return os.read(self._fd, LINE_MAX_BYTES) or None
        except BlockingIOError:
            return None
        except BrokenPipeError:
            self.overruns += 1  # the next read goes on with the oldest line that is left
            return b""
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.broken += 1  # longer than any record may be: the kernel has stepped over it
            return b""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def slept_s() -> float:
    """By how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC, the clock of logs."""
    ahead_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return max(0.0, round(ahead_s, 3))


def said_s(text: str | bytes, slept_s: float, boot_s: float) -> float:
    """The time at which a line was said, from its microseconds; `boot_s`, which is now, without
    one."""
    said = int(text) / 1e6 + slept_s if text.isdigit() and len(text) < 19 else boot_s
    return min(said, boot_s)


def parse(record: bytes, boot_s: float, slept_s: float = -1.0) -> LogLine | None:
    """One record `priority,sequence,microseconds,flags;text\\n KEY=value...`; None when it is
    not of that form.  A line that is read as it is said is dated `boot_s`: the kernel's own time
    for it drifts, by minutes in a month.  With `slept_s` it was said before, and that time counts.
    """
    head, separator, rest = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3:
        return None
    if not all(field.isdigit() and len(field) < 19 for field in fields[:2]):
        return None
    text = rest.partition(b"\n")[0].decode("utf-8", "replace")[:TEXT_MAX]
    at_s = boot_s if slept_s < 0 else said_s(fields[2], slept_s, boot_s)
    return LogLine("kmsg", int(fields[1]), at_s, text)
