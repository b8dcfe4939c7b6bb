"""The compile cache of Neuron: what is in it, who uses it, and locks that nobody can own.

Owns finding locks of killed compiles: a process that wants the same program later waits for such a
lock without end, because nothing takes it away.  Counts the programs that came into the cache, the
reads, and the running compilers.  Reads only.  Runs in a probe child, since a cache often lies on a
network mount.
"""

from __future__ import annotations

import fcntl
import os
import time
from itertools import islice
from typing import NamedTuple

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .neuron import without_driver
from .sources.files import is_count, pids_in, text_of
from .sources.inotify import Watcher
from .sources.mountinfo import Mount, is_below, mounts

ENTRIES_MAX = 50_000  # of the cache, looked at in one reading
DEPTH_MAX = 6
LOCKS_MAX = 64  # named; beyond that only counted
PROCESSES_MAX = 50_000
COMPILERS = ("neuronx-cc", "neuron-cc", "walrus_driver")
FIRST_S = 120.0  # a lock is made before its compiler is started, within this
COMPILE_S = 7200.0  # another node's compiler, which cannot be seen from here, ends within this
PROGRAM = ".neff"
LOCKS_BYTES = 1 << 20  # of the kernel's list
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sight(NamedTuple):
    """What one walk through the cache found."""

    locks: list[tuple[str, int, float]]  # path, owner, time of last change
    programs: set[str]  # paths of compiled programs
    folders: set[str]  # that hold one, or a lock: where programs are read and written


class CompileCacheCollector(Probed):
    """Samples `compile_cache_*` and one undeclared sample for each lock; read in a child.

    A program came in when a walk finds it and the walk before did not.  It was read when the kernel
    reports that a process of this node opened it to read and closed it.
    """

    name = "compile_cache"
    follows_jobs = True
    pace = SLOW
    metrics = (
        Metric("compile_cache_locks", "gauge", "Lock files in the compile cache."),
        Metric("compile_cache_programs", "gauge", "Compiled programs in the cache."),
        Metric("compile_cache_misses_total", "counter",
               "Programs that came into the cache since it is watched: each was compiled."),
        Metric("compile_cache_hits_total", "counter",
               "Times that this node's processes read a program of it; those at one moment count "
               "as one."),
        Metric("compile_cache_compilers", "gauge", "Compilers that run on this node."),
        Metric("compile_cache_compiler_age_seconds", "gauge",
               "How long the oldest of them has run."),
        Metric("compile_cache_lock_age_seconds", "gauge",
               "Age of a lock that no compiler can own, as each here began later; uid: its owner; "
               "dead: the process that held it and is gone, 0 where none was seen.",
               ("path", "uid", "dead"), True),
    )

    def __init__(self) -> None:
        self._known: set[str] | None = None
        self._misses = self._hits = 0
        self._holders: dict[str, int] = {}  # lock -> the process that held it, by the kernel's word
        self._watcher: Watcher | None = None

    def here(self, roots: Roots) -> str:
        """"" on a Neuron node or with a configured cache, else why not.  Never looks at the cache:
        the agent calls this, and a network mount may not answer."""
        own = roots.job_caches or roots.compile_cache != Roots().compile_cache
        return "" if own else without_driver(roots)

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without the cache."""
        # By their true names, which the mount table and a launcher that removes a lock go by.
        named = dict.fromkeys(map(os.path.realpath, (roots.compile_cache, *roots.job_caches)))
        caches = [one for one in named if os.path.isdir(one)
                  and not any(is_below(one, other) for other in named if other != one)]
        if not caches:
            raise NoData(f"no {', '.join(named)}")
        sights = [_walk(one) for one in caches]
        sight = Sight([lock for one in sights for lock in one.locks],
                      set().union(*(one.programs for one in sights)),
                      set().union(*(one.folders for one in sights)))
        ages_s = _compilers(roots.proc, boot_s)
        found = {"locks": len(sight.locks), "programs": len(sight.programs),
                 "compilers": len(ages_s)} | self._uses(sight)
        if ages_s:
            found["compiler_age_seconds"] = max(ages_s)
        samples = [Sample(f"compile_cache_{name}", "", float(value), boot_s)
                   for name, value in found.items()]
        here_s = max((age_s + FIRST_S for age_s in ages_s), default=0.0)
        shared = [one for one in caches if _is_shared(one, roots)]
        now_s = time.time()  # beside the file's own time, which is of the wall clock
        unowned = []
        for path, uid, made_s in sight.locks:
            elsewhere = any(is_below(path, one) for one in shared)
            owned_s = max(here_s, COMPILE_S if elsewhere else 0.0)
            if set(path) & set(",=\n") or _is_held(path, roots):
                self._holders[path] = _holder(path, roots)
                continue
            dead = self._holders.get(path, 0)
            if not dead or os.path.exists(f"{roots.proc}/{dead}"):
                dead = 0
            if dead or now_s - made_s >= owned_s:
                unowned.append((f"path={path},uid={uid},dead={dead}", now_s - made_s))
        self._holders = {path: pid for path, pid in self._holders.items()
                         if path in {lock[0] for lock in sight.locks}}
        return samples + [
            Sample("compile_cache_lock_age_seconds", subject, max(0.0, age_s), boot_s)
            for subject, age_s in unowned[:LOCKS_MAX]]

    def _uses(self, sight: Sight) -> dict[str, float]:
        """Counters since this child began; no hits where the kernel does not tell of them."""
        if self._known is not None:
            self._misses += len(sight.programs - self._known)
        self._known = sight.programs
        found: dict[str, float] = {"misses_total": self._misses}
        try:
            if self._watcher is None:
                self._watcher = Watcher()
            self._hits += sum(name.endswith(PROGRAM) for name in self._watcher.closed())
            self._watcher.watch(sight.folders)
        except OSError:
            return found
        return found | {"hits_total": self._hits}


def _holder(path: str, roots: Roots) -> int:
    """The process that holds the kernel's lock on this file, by the kernel's list; 0 for none, or
    one of another namespace.  Inodes are numbered anew on each device."""
    try:
        found = os.lstat(path)
        listed = text_of(f"{roots.proc}/locks", LOCKS_BYTES)
    except OSError:
        return 0  # it is gone
    for words in map(str.split, listed.splitlines()):
        if len(words) > 7 and words[1] != "->":
            device, _, number = words[5].rpartition(":")
            if number == str(found.st_ino) and _is_on(device, path, found.st_dev, roots):
                return int(words[4]) if is_count(words[4]) else 0
    return 0


def _is_on(listed: str, path: str, own: int, roots: Roots) -> bool:
    """Whether that device of the kernel's list, in hex, is this file's.  A subvolume of btrfs shows
    its files under a device of its own; the list, like the mount table, has the file system's."""
    try:
        major, minor = (int(part, 16) for part in listed.split(":"))
    except ValueError:
        return False
    if (major, minor) == (os.major(own), os.minor(own)):
        return True
    above = _mount_of(path, roots)
    return above is not None and above.device == f"{major}:{minor}"


def _is_held(path: str, roots: Roots) -> bool:
    """Whether a living process holds it: by that list, and where that hides other namespaces, by a
    try of a shared lock, let go at once."""
    if _holder(path, roots):
        return True
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # it is gone; or it is another user's, and the list alone can say
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _is_shared(cache: str, roots: Roots) -> bool:
    """Whether other nodes may compile into this cache."""
    above = _mount_of(cache, roots)
    return above is not None and above.is_network


def _mount_of(path: str, roots: Roots) -> Mount | None:
    """Where the path lies, by the mount table; None without one."""
    try:
        above = [one for one in mounts(roots) if is_below(path, one.point)]
    except NoData:
        return None
    return max(above, key=lambda one: len(one.point), default=None)


def _walk(root: str) -> Sight:
    """The cache within its bounds; what vanishes meanwhile is left out."""
    sight = Sight([], set(), set())
    folders, looked = [(root, 0)], 0
    while folders and looked < ENTRIES_MAX:
        folder, depth = folders.pop()
        try:
            with os.scandir(folder) as listing:
                entries = list(islice(listing, ENTRIES_MAX - looked))
        except OSError:
            continue
        looked += len(entries)
        for entry in sorted(entries, key=lambda one: one.name):
            try:
                if entry.is_dir(follow_symlinks=False) and depth < DEPTH_MAX:
                    folders.append((entry.path, depth + 1))
                elif entry.name.endswith(".lock"):
                    found = entry.stat(follow_symlinks=False)
                    sight.locks.append((entry.path, found.st_uid, found.st_mtime))
                    sight.folders.add(folder)
                elif entry.name.endswith(PROGRAM):
                    sight.programs.add(entry.path)
                    sight.folders.add(folder)
            except OSError:
                continue
    return sight


def _compilers(proc: str, boot_s: float) -> list[float]:
    """Seconds that each compiler has run."""
    found = []
    for pid in pids_in(proc, PROCESSES_MAX):
        words = text_of(f"{proc}/{pid}/cmdline", 4096).split("\0")[:3]
        if any(os.path.basename(word) in COMPILERS for word in words):
            found.append(_age_s(f"{proc}/{pid}/stat", boot_s))
    return found


def _age_s(path: str, boot_s: float) -> float:
    """Since the start that /proc/PID/stat tells; 0 where it tells none."""
    stat = text_of(path, 4096)
    fields = stat[stat.rfind(")") + 1 :].split()
    started = fields[19] if len(fields) > 19 else ""
    return max(0.0, boot_s - int(started) / TICKS_PER_S) if is_count(started) else 0.0
