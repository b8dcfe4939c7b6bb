"""Whether a rank that stands still waits for a compiler: its own, its child's, or another's lock.

Owns the names of compilers and of compile caches.  A compiler in the rank's own process is seen by
the phase on its page.  It looks as the job's user, which may read what the agent may not, and only
at ranks that stand still: a run that moves costs nothing here.  Reads
only; what it says delays an act by cost and is never a reason for one.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Iterable, Iterator, List, Tuple

from .. import page as pages
from .process import RankProcess

COMPILE = pages.PHASES.index("compile")
STARTING = "ranks that start: their graphs"  # nobody trains yet, and so nobody waits for them
STILL_NS = 1_000_000_000  # the agent suspects after 2 s and three steps: it must know by then
LOOK_EVERY_S = 1.0
HOLD_S = 3.0  # a build starts one compiler after another, and may be seen between two
PROCESSES_MAX = 512
THREADS_MAX = 256
FILES_MAX = 4096
NAMED_MAX = 200  # characters of a lock's path that are told
# As /proc/PID/comm shows them, which holds 15 characters.
COMPILERS = frozenset((
    "nvcc", "cudafe++", "cicc", "ptxas", "nvlink", "fatbinary", "hipcc", "amdclang", "amdclang++",
    "neuronx-cc", "neuron-cc", "walrus_driver", "hlo2penguin", "cc1", "cc1plus", "clang",
    "clang++", "rustc",
))
# torch.compile keeps idle helpers for ever: they compile only while they run.
HELPERS = b"_inductor/compile_worker"
# Part of a path -> whose cache it is.  A lock elsewhere says nothing about compilers.
CACHES = ("/torchinductor_", "/.triton/", "/torch_extensions/", "/neuron-compile-cache/",
          "/neuronxcc-", "/ComputeCache/")
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
             "CUDA_CACHE_PATH")
# Neuron's runtime says once a minute for which program it waits, and does not hold that lock open.
NEURON_WAITS = re.compile(rb"Another process must be compiling (/[^\s,]+)")
STREAMS = ("stdout.log", "stderr.log")
TAIL_BYTES = 2048
SAID_S = 150.0  # two of its minutes, and some: a log that is older says nothing of now
NEURON_URL, NEURON_FLAGS, NEURON_FLAG = (
    "NEURON_COMPILE_CACHE_URL", "NEURON_CC_FLAGS", "--cache_dir")


def neuron_caches(environ: "dict[str, str]") -> List[str]:
    """Folders where this job keeps what Neuron compiled, as its environment says; a bucket is not
    one of them.  A relative one is below the current folder: ranks begin in the launcher's."""
    words = environ.get(NEURON_FLAGS, "").split()
    named = [word.partition("=")[2] for word in words if word.startswith(NEURON_FLAG + "=")]
    named += [after for word, after in zip(words, words[1:])
              if word == NEURON_FLAG and not after.startswith("-")]
    named.append(environ.get(NEURON_URL, ""))
    paths = [one[7:] if one.startswith("file://") else one for one in named]
    paths = [path if path.startswith("/") else os.path.abspath(path)
             for path in paths if path and "://" not in path]
    return list(dict.fromkeys(path.rstrip("/") for path in paths if path.strip("/")))


class Watch:
    """What is being compiled, remembered between two looks."""

    def __init__(
        self, environ: "dict[str, str]", log_dir: str = "", proc: str = "/proc"
    ) -> None:
        self.log_dir, self.proc = log_dir, proc
        own = [environ.get(name, "").rstrip("/") for name in VARIABLES] + neuron_caches(environ)
        places = {one for path in own if len(path) > 1 for one in (path, os.path.realpath(path))}
        self.caches = CACHES + tuple(sorted(places))
        self.found = ""
        self.looked_s = -LOOK_EVERY_S
        self.found_s = 0.0

    def look(self, processes: Iterable[RankProcess], now_s: float) -> str:
        """"rank 1: cc1plus", "rank 1 holds or awaits /path/x.lock", or "".  `now_s` monotonic."""
        living = [p for p in processes if p.ended is None]
        if not any(p.assigned for p in living):
            self.found = STARTING if any(in_compile(p) for p in living) else ""
            return self.found
        still = [p for p in living if p.assigned and stands_still(p)]
        if still and now_s - self.looked_s < LOOK_EVERY_S:
            return self.found
        self.looked_s = now_s if still else self.looked_s
        found = next(("rank %d: its graphs" % p.rank for p in still if in_compile(p)), "") or next(
            (text for p in still for text in self.signs(p.rank, p.child.pid)), "")
        if found:
            self.found, self.found_s = found, now_s
        elif not still or now_s - self.found_s > HOLD_S:
            self.found = ""
        return self.found

    def is_lock(self, path: str) -> bool:
        """A lock by its name, in a place where compilers keep them."""
        return path.endswith("lock") and any(cache in path for cache in self.caches)

    def compiler_of(self, processes: Iterable[RankProcess]) -> str:
        """A compiler that runs below any of these ranks now, moving or not; "" for none."""
        return next((text for process in processes
                     for text in self.compilers(process.rank, process.child.pid)), "")

    def compilers(self, rank: int, pid: int) -> Iterator[str]:
        """Every compiler below this rank."""
        for one in descendants(pid, self.proc):
            name, state = name_and_state(one, self.proc)
            if state in "ZXT" or not name:
                continue
            if name in COMPILERS or name.startswith(("clang-", "cc1-")):
                yield "rank %d: %s" % (rank, name)
            elif state == "R" and HELPERS in _read(self.proc, one, "cmdline"):
                yield "rank %d: torch.compile" % rank

    def signs(self, rank: int, pid: int) -> Iterator[str]:
        """Every sign that this rank compiles or waits for one who does."""
        yield from self.compilers(rank, pid)
        for path in open_files(pid, self.proc):
            if self.is_lock(path):
                yield "rank %d holds or awaits %s" % (rank, path[:NAMED_MAX])
        yield from ("rank %d awaits %s" % (rank, lock[:NAMED_MAX]) for lock in self.awaited(rank))

    def awaited(self, rank: int) -> List[str]:
        """Locks that are there and for whose programs this rank says that it waits, the last that
        it named first."""
        named: List[str] = []
        for stream in STREAMS if self.log_dir else ():
            tail = _tail(os.path.join(self.log_dir, "rank-%d" % rank, stream))
            named += ["%s.lock" % os.fsdecode(path) for path in NEURON_WAITS.findall(tail)[::-1]]
        return [lock for lock in dict.fromkeys(named)
                if self.is_lock(lock) and os.path.lexists(lock)]


def stands_still(process: RankProcess) -> bool:
    """The page's own word, on its own clock; a page that says nothing yet does not count."""
    progress_ns = int(process.fields[pages.F_PROGRESS])
    return 0 < progress_ns < time.monotonic_ns() - STILL_NS


def in_compile(process: RankProcess) -> bool:
    """Whether its page says that it compiles."""
    return bool(process.fields[pages.F_PHASE] == COMPILE)


def descendants(pid: int, proc: str = "/proc") -> List[int]:
    """All processes below `pid`, bounded."""
    found: List[int] = []
    todo = [pid]
    while todo and len(found) < PROCESSES_MAX:
        parent = todo.pop()
        try:
            threads = os.listdir("%s/%d/task" % (proc, parent))[:THREADS_MAX]
        except OSError:
            continue
        for thread in threads:
            below = [int(n) for n in _read(proc, parent, "task/%s/children" % thread).split()]
            found += below
            todo += below
    return found[:PROCESSES_MAX]


def name_and_state(pid: int, proc: str = "/proc") -> Tuple[str, str]:
    """(comm, state letter); ("", "X") of a process that is gone."""
    text = _read(proc, pid, "stat").decode("utf-8", "replace")
    begin, end = text.find("("), text.rfind(")")
    if begin < 0 or end < begin or len(text) < end + 3:
        return "", "X"
    return text[begin + 1 : end], text[end + 2]


def open_files(pid: int, proc: str = "/proc") -> Iterator[str]:
    """Paths behind a process' descriptors, bounded; none where they may not be read."""
    folder = "%s/%d/fd" % (proc, pid)
    try:
        numbers = os.listdir(folder)[:FILES_MAX]
    except OSError:
        return
    for number in numbers:
        try:
            yield os.readlink("%s/%s" % (folder, number))
        except OSError:
            continue


def _tail(path: str) -> bytes:
    """The end of a rank's log; empty where there is none, or nothing came in the last minutes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime > SAID_S:
                return b""
            file.seek(max(0, found.st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES) or b""
    except OSError:
        return b""


def _read(proc: str, pid: int, name: str) -> bytes:
    try:
        with open("%s/%d/%s" % (proc, pid, name), "rb", buffering=0) as file:
            return file.read(4096) or b""
    except OSError:
        return b""
