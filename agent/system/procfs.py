"""Reads of /proc about one process: scheduler state, processor time, input and output.

Owns the parsing of /proc/PID files.  Decides nothing, keeps no history, starts nothing.  A file
that is gone or may not be read gives None, never an exception: processes end at any time.
"""

from __future__ import annotations

import os
from typing import NamedTuple

CHILDREN_MAX = 64  # processes below one rank that count towards its activity
THREADS_MAX = 64  # threads of a rank whose children lists are read
READ_MAX_BYTES = 4096
PROC = "/proc"
CGROUPS = "/sys/fs/cgroup"
HOST_PIDS = "pid:[4026531836]"  # PROC_PID_INIT_INO in linux/proc_ns.h


class ProcStat(NamedTuple):
    """One reading of /proc/PID/stat.  `cpu_ticks` counts the process and its reaped children."""

    state: str
    ppid: int
    cpu_ticks: int
    start_ticks: int


def parse_stat(text: bytes) -> ProcStat | None:
    """Parses the one line of /proc/PID/stat; the name may hold spaces and parentheses."""
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    try:
        ticks = sum(int(field) for field in fields[11:15])
        return ProcStat(fields[0].decode("ascii"), int(fields[1]), ticks, int(fields[19]))
    except ValueError:
        return None


class StatFile:
    """/proc/PID/stat held open: one pread a reading, and immune to a reused pid, because the file
    belongs to the process it was opened for and fails once that is gone."""

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        try:
            self._fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> ProcStat | None:
        if self._fd < 0:
            return None
        try:
            return parse_stat(os.pread(self._fd, READ_MAX_BYTES, 0))
        except OSError:
            return None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_small(path: str, limit_bytes: int = READ_MAX_BYTES) -> bytes:
    """At most `limit_bytes` of a file; b"" when it is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, limit_bytes)
    except OSError:
        return b""
    finally:
        os.close(fd)


def is_traced(pid: int, proc: str = "/proc") -> bool:
    """Whether a debugger holds the process: a stop under one is a person's doing, not a fault."""
    for line in read_small(f"{proc}/{pid}/status").splitlines():
        if line.startswith(b"TracerPid:"):
            return line.split()[-1] != b"0"
    return False


def io_bytes(pid: int, proc: str = "/proc") -> tuple[int, int]:
    """(bytes read, bytes written) so far, by read() and write() of any file, and of a disk by pages
    that were touched; what recv() takes from a socket counts nowhere.  Zeros where that may not be
    read: it needs the same user, or CAP_SYS_PTRACE."""
    found = {}
    for line in read_small(f"{proc}/{pid}/io").splitlines():
        name, _, value = line.partition(b":")
        found[name] = sum(_numbers(value)[:1])
    return max(found.get(b"rchar", 0), found.get(b"read_bytes", 0)), found.get(b"wchar", 0)


def children_of(pid: int, proc: str = "/proc") -> list[int]:
    """All processes below `pid`, bounded, itself excluded."""
    found: list[int] = []
    todo = [pid]
    while todo and len(found) < CHILDREN_MAX:
        parent = todo.pop()
        try:
            threads = os.listdir(f"{proc}/{parent}/task")[:THREADS_MAX]
        except OSError:
            continue
        for thread in threads:
            text = read_small(f"{proc}/{parent}/task/{thread}/children")
            below = _numbers(text)
            found.extend(below)
            todo.extend(below)
    return found[:CHILDREN_MAX]


class Activity(NamedTuple):
    """Running totals of a process and everything below it."""

    ticks: int = 0  # of its processor time
    moved_bytes: int = 0
    read_bytes: tuple[tuple[int, int], ...] = ()  # (pid, its own): what ends takes its part along


def activity(pid: int, proc: str = "/proc") -> Activity:
    ticks, moved, read = 0, 0, list[tuple[int, int]]()
    for one in (pid, *children_of(pid, proc)):
        stat = parse_stat(read_small(f"{proc}/{one}/stat"))
        if stat is not None:
            ticks += stat.cpu_ticks
            more_read, more_written = io_bytes(one, proc)
            moved += more_read + more_written
            read.append((one, more_read))
    return Activity(ticks, moved, tuple(read))


def memory_cgroup(pid: int, proc: str = "/proc") -> str:
    """The cgroup that a process's memory is charged to; "" when it is gone or may not be read."""
    found = ""
    for line in read_small(f"{proc}/{pid}/cgroup").decode("utf-8", "replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            return path  # version 1 beside version 2: the memory is where the controller is
        if number == "0":
            found = path
    return found


def cgroup_events(pid: int, proc: str = "/proc") -> str:
    """The file that says whether its cgroup (version 2) is frozen; "" where there is none."""
    for line in read_small(f"{proc}/{pid}/cgroup").decode("utf-8", "replace").splitlines():
        if line.startswith("0::/") and len(line) > 4:
            path = f"{CGROUPS}{line[3:]}/cgroup.events"
            return path if os.path.exists(path) else ""
    return ""


def process_alive(pid: int, proc: str = PROC) -> bool:
    """Whether a process exists and is more than a zombie.  One that /proc hides (hidepid) is asked
    for by a signal that is none: it counts as alive as long as it exists."""
    stat = parse_stat(read_small(f"{proc}/{pid}/stat"))
    if stat is not None or proc != PROC:  # a recorded tree: the kernel knows nothing of it
        return stat is not None and stat.state not in "ZX"
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def hides_others(proc: str = PROC) -> bool:
    """Whether other users' processes are hidden from us (hidepid): the first is always there."""
    return not read_small(f"{proc}/1/stat")


def sees_host(proc: str = PROC) -> bool:
    """Whether process numbers here are the host's: a container without them has others."""
    try:
        return proc != PROC or os.readlink(f"{PROC}/self/ns/pid") == HOST_PIDS
    except OSError:
        return False


def real_uid(pid: int, proc: str = PROC) -> int:
    """Whose process it is, whatever rights it took since; -1 when it is gone or hidden."""
    for line in read_small(f"{proc}/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return _numbers(line[4:])[0]
    return -1


def rss_bytes(pid: int | str = "self", proc: str = "/proc") -> int:
    """Resident memory of a process; 0 when unknown."""
    pages = _numbers(read_small(f"{proc}/{pid}/statm"))
    return pages[1] * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def _numbers(text: bytes) -> list[int]:
    """The whole numbers of a line; what is none is left out."""
    return [int(word) for word in text.split() if word.isdigit() and len(word) < 20]


def boot_id() -> str:
    """Tells one boot of the machine from another, for clocks that start anew with it."""
    return read_small("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()
