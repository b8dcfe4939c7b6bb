"""Processes in trouble: never collected, stuck, out of open files, or busy inside the kernel.

Owns one pass over /proc/PID/stat.  Names processes for the detectors; their samples are undeclared,
so that process ids never become labels on the page.  Reads only; a process that ends between list
and read is left out.  Threads other than the first are not looked at: the kernel's own watchdog
names those (hung_task, in its log).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

from .contract import Metric, NoData, Pace, Roots, Sample
from .sources.files import ODD, is_count, names_in, text_of

PROCESSES_MAX = 20_000  # of one pass; the rest is counted
STAT_MAX_BYTES = 2048
NAMED_MAX = 16  # of each kind
KERNEL_THREAD = 0x00200000  # PF_KTHREAD
# A process in trouble is seen a quarter of a minute later, for half of the cost.
PACE = Pace(fast=False, every=2)
KERNEL_EVERY = 4  # passes, a part of them in each: a node has thousands of kernel threads
FILES_LOOK = 200  # open files from which a process's own limit is read
FILES_NEAR = 0.7
LISTED_MAX = 64  # processes whose open files are listed in one pass
BUSY = 0.3  # of a core, in the kernel
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Task(NamedTuple):
    """What one line of /proc/PID/stat says."""

    pid: int
    name: str
    state: str
    ppid: int
    flags: int
    kernel_ticks: int
    start_ticks: int
    cpu: int


class Spent(NamedTuple):
    """Processor time in the kernel, as read last."""

    start_ticks: int
    kernel_ticks: int
    boot_s: float


class TasksCollector:
    """Processes in trouble; samples of single processes are undeclared, for the detectors alone."""

    name = "tasks"
    pace = PACE
    metrics = (
        Metric("host_zombies", "gauge", "Processes that ended and that nobody collected."),
        Metric("host_blocked_processes", "gauge",
               "Processes that wait in the kernel and cannot be ended (state D).", (), True),
        Metric("host_hung_tasks_total", "counter",
               "Tasks that the kernel itself reported as hung; newer kernels only.", (), True),
        Metric("host_threads_max", "gauge", "Threads that the kernel allows."),
        Metric("host_process_open_files_ratio_max", "gauge",
               "Open files of the process nearest to its own limit, as a share of it."),
        Metric("host_processes_unread", "gauge", "Processes beyond those that a reading looks at."),
    )

    def __init__(self) -> None:
        self._passes = 0
        self._kernel: set[int] = set()
        self._kernel_busy: list[tuple[float, Task]] = []
        self._spent: dict[int, Spent] = {}
        self._blocked: dict[tuple[int, int], tuple[int, float]] = {}
        self._near: list[Sample] = []  # the limit of open files
        self._lines: dict[int, tuple[bytes, Task]] = {}  # as read last
        self._files: dict[tuple[int, int], int] = {}  # open files, where they must be listed
        self._listed: set[tuple[int, int]] = set()  # whose turn it was

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One pass.  NoData when /proc cannot be listed."""
        try:
            pids = [int(one) for one in os.listdir(roots.proc) if one.isdecimal()]
        except OSError as error:
            raise NoData(f"{roots.proc}: {error.strerror}") from error
        turn = self._passes % KERNEL_EVERY
        self._passes += 1
        unread = max(0, len(pids) - PROCESSES_MAX)
        wanted = [pid for pid in pids[:PROCESSES_MAX]
                  if pid not in self._kernel or pid % KERNEL_EVERY == turn]
        tasks = [task for pid in wanted if (task := self._task(roots.proc, pid)) is not None]
        here = set(pids)
        self._lines = {pid: one for pid, one in self._lines.items() if pid in here}
        self._kernel -= set(wanted) | (self._kernel - here)
        self._kernel |= {task.pid for task in tasks if task.flags & KERNEL_THREAD}
        users = [task for task in tasks if not task.flags & KERNEL_THREAD]
        found = [Sample("host_processes_unread", "", float(unread), boot_s)]
        found += _zombies(users, boot_s)
        found += self._waiting(roots.proc, users, boot_s)
        found += self._busy(tasks, boot_s)
        if turn == 0:
            self._near = self._open_files(roots.proc, users, boot_s)
        found += self._near
        found += _limits(roots.proc, boot_s)
        return found

    def _task(self, proc: str, pid: int) -> Task | None:
        """One process of the pass.  Most processes sleep, and their line is the last one to the
        letter."""
        text = read_stat(proc, pid)
        known = self._lines.get(pid)
        if known is not None and known[0] == text:
            return known[1]
        task = parse_task(pid, text) if text else None
        if task is not None:
            self._lines[pid] = text, task
        return task

    def _waiting(self, proc: str, tasks: list[Task], boot_s: float) -> list[Sample]:
        """Processes in state D, and since when without having run at all in between."""
        before, self._blocked = self._blocked, {}
        blocked = [task for task in tasks if task.state == "D"]
        found = [Sample("host_blocked_processes", "", float(len(blocked)), boot_s)]
        for task in blocked[:PROCESSES_MAX]:
            key = task.pid, task.start_ticks
            switches = _switches(proc, task.pid)
            known, since_s = before.get(key, (-1, boot_s))
            self._blocked[key] = (switches, since_s if known == switches >= 0 else boot_s)
        aged = sorted(
            ((boot_s - self._blocked[task.pid, task.start_ticks][1], task) for task in blocked),
            key=lambda one: (-one[0], one[1].pid))
        for age_s, task in aged[:NAMED_MAX]:
            if age_s > 0.0:
                subject = f"pid={task.pid},name={task.name},wait={_wait(proc, task.pid)}"
                found.append(Sample("task_blocked_seconds", subject, age_s, boot_s))
        return found

    def _open_files(self, proc: str, tasks: list[Task], boot_s: float) -> list[Sample]:
        """Processes near their own limit.  Where the size of /proc/PID/fd is the number of open
        files, this is one call each.  On an older kernel each open file costs a line of a listing,
        so a few processes are listed each time, and the others keep their last number."""
        sized = _counts_files(proc)
        if not sized:
            self._list(proc, tasks)
            if not any(self._files.values()):
                return []  # nobody's may be listed
        shares = [
            (_share(proc, task, _size(proc, task.pid) if sized else self._files.get(_key(task), 0)),
             task) for task in tasks]
        near = sorted((one for one in shares if one[0] >= FILES_NEAR),
                      key=lambda one: (-one[0], one[1].pid))
        worst = max((share for share, _ in shares), default=0.0)
        return [
            Sample("host_process_open_files_ratio_max", "", worst, boot_s),
            *(Sample("task_open_files_ratio", f"pid={task.pid},name={task.name}", share, boot_s)
              for share, task in near[:NAMED_MAX])]

    def _list(self, proc: str, tasks: list[Task]) -> None:
        """Counts the open files of the processes whose turn it is."""
        here = {_key(task): task.pid for task in tasks}
        self._listed &= here.keys()
        # The oldest first: short-lived processes come without end, and do not run out of files.
        turn = sorted((key for key in here if key not in self._listed), key=lambda one: one[1])
        turn = turn[:LISTED_MAX]
        if len(turn) < LISTED_MAX:
            self._listed.clear()
        self._listed.update(turn)
        self._files = {key: count for key, count in self._files.items() if key in here}
        self._files |= {key: _listed(proc, here[key]) for key in turn}

    def _busy(self, tasks: list[Task], boot_s: float) -> list[Sample]:
        """Processes that burn a core in the kernel.  Kernel threads keep their last look's
        result."""
        busy: list[tuple[float, Task]] = []
        looked = {task.pid for task in tasks}
        spent = {pid: one for pid, one in self._spent.items()
                 if pid in self._kernel and pid not in looked}
        for task in tasks:
            before = self._spent.get(task.pid)
            spent[task.pid] = Spent(task.start_ticks, task.kernel_ticks, boot_s)
            if before is None or before.start_ticks != task.start_ticks:
                continue
            elapsed_s = boot_s - before.boot_s
            ticks = task.kernel_ticks - before.kernel_ticks
            if elapsed_s > 0.0 and (share := ticks / TICKS_PER_S / elapsed_s) >= BUSY:
                busy.append((share, task))
        self._spent = spent
        busy += [one for one in self._kernel_busy if one[1].pid in spent.keys() - looked]
        self._kernel_busy = [one for one in busy if one[1].flags & KERNEL_THREAD]
        busy.sort(key=lambda one: (-one[0], one[1].pid))
        return [
            Sample("task_kernel_ratio", f"pid={task.pid},name={task.name},cpu={task.cpu}",
                   share, boot_s)
            for share, task in busy[:NAMED_MAX]]


def read_stat(proc: str, pid: int) -> bytes:
    """The line of one process; empty when it is gone."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, STAT_MAX_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def parse_task(pid: int, text: bytes) -> Task | None:
    """One line.  The name stands in parentheses and may hold some itself: the last one closes
    it."""
    first, last = text.find(b"("), text.rfind(b")")
    fields = text[last + 2 :].split()
    if first < 0 or last < first or len(fields) < 37:
        return None
    try:
        state, ppid, flags = fields[0].decode("ascii"), int(fields[1]), int(fields[6])
        kernel_ticks, start_ticks, cpu = int(fields[12]), int(fields[19]), int(fields[36])
    except ValueError:
        return None
    if len(state) != 1 or min(ppid, flags, kernel_ticks, start_ticks) < 0:
        return None
    name = text[first + 1 : last].decode("utf-8", "replace").translate(ODD)
    return Task(pid, name, state, ppid, flags, kernel_ticks, start_ticks, cpu)


def _zombies(tasks: list[Task], boot_s: float) -> list[Sample]:
    """How many, and whose: a zombie is its parent's fault."""
    names = {task.pid: task.name for task in tasks}
    parents = Counter(task.ppid for task in tasks if task.state == "Z")
    found = [Sample("host_zombies", "", float(parents.total()), boot_s)]
    for ppid, count in parents.most_common(NAMED_MAX):
        subject = f"pid={ppid},name={names.get(ppid, '?')}"
        found.append(Sample("task_zombies", subject, float(count), boot_s))
    return found


def _share(proc: str, task: Task, count: int) -> float:
    """The part of its limit of open files that the process uses; 0 where it has few, or no
    limit."""
    limit = _file_limit(proc, task.pid) if count >= FILES_LOOK else 0
    return count / limit if limit > 0 else 0.0


def _key(task: Task) -> tuple[int, int]:
    return task.pid, task.start_ticks


def _size(proc: str, pid: int | str) -> int:
    try:
        return os.stat(f"{proc}/{pid}/fd").st_size
    except OSError:
        return 0


def _listed(proc: str, pid: int | str) -> int:
    return len(names_in(f"{proc}/{pid}/fd"))


def _counts_files(proc: str) -> bool:
    """Whether the size of a directory of open files is their number, as since Linux 6.2."""
    size = _size(proc, "self")
    return 0 < size and abs(size - _listed(proc, "self")) <= 2


def _file_limit(proc: str, pid: int) -> int:
    """0 when there is none, or it may not be read."""
    for line in text_of(f"{proc}/{pid}/limits", 4096).splitlines():
        if line.startswith("Max open files"):
            words = line.split()
            return int(words[3]) if len(words) > 3 and is_count(words[3]) else 0
    return 0


def _switches(proc: str, pid: int) -> int:
    """How often the process was taken off a processor; -1 unknown.  Unchanged means that it has
    not run since."""
    lines = text_of(f"{proc}/{pid}/status", 8192).splitlines()
    words = [line.split()[-1] for line in lines if "ctxt_switches:" in line]
    numbers = [int(word) for word in words if is_count(word)]
    return sum(numbers) if numbers else -1


def _wait(proc: str, pid: int) -> str:
    """The kernel function it waits in, where that may be read."""
    text = text_of(f"{proc}/{pid}/wchan", 128).strip().translate(ODD)
    return text if text and text != "0" else "?"


def _limits(proc: str, boot_s: float) -> list[Sample]:
    """The kernel's own numbers; a missing file costs its own metric."""
    found = []
    for name, path in (
        ("host_threads_max", "sys/kernel/threads-max"),
        ("host_hung_tasks_total", "sys/kernel/hung_task_detect_count"),
    ):
        text = text_of(f"{proc}/{path}", 64).strip()
        if is_count(text):
            found.append(Sample(name, "", float(text), boot_s))
    return found
