"""The compile cache of Neuron: lock files, and whether any compiler runs that could own them.

Owns finding locks that a killed compile left behind: whoever wants the same program later waits
for them without end, because nothing takes them away.  Reads only.  Runs in a probe child, since a
cache often lies on a network mount.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from .neuron import DEVICES
from .roots import Roots, read_text
from .sample import Metric, NoData, Sample

ENTRIES_MAX = 50_000  # of the cache, looked at in one reading
DEPTH_MAX = 6
LOCKS_MAX = 64  # named; beyond that only counted
PROCESSES_MAX = 50_000
COMPILERS = (b"neuronx-cc", b"neuron-cc", b"walrus_driver")


class CompileCacheCollector:
    """See the module."""

    name = "compile_cache"
    fast = False
    metrics = (
        Metric("compile_cache_locks", "gauge", "Lock files in the compile cache."),
        Metric("compile_cache_compilers", "gauge",
               "Compilers that run on this node; looked for while there are locks."),
        Metric("compile_cache_lock_age_seconds", "gauge",
               "Age of a lock while no compiler runs on this node.", ("path",), True),
    )  # fmt: skip

    def here(self, roots: Roots) -> str:
        """"" on a Neuron node or with a cache of one's own choice, else why not.  Never looks at
        the cache: the agent calls this, and that mount may not answer."""
        if os.path.isdir(f"{roots.sys}/{DEVICES}") or roots.compile_cache != Roots().compile_cache:
            return ""
        return "no Neuron driver on this machine"

    def environ(self, roots: Roots) -> dict[str, str]:
        """Nothing."""
        return {}

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without the cache."""
        if not os.path.isdir(roots.compile_cache):
            raise NoData(f"no {roots.compile_cache}")
        locks = list(_locks(roots.compile_cache))
        found = [Sample("compile_cache_locks", "", float(len(locks)), boot_s)]
        if not locks:
            return found
        compilers = sum(1 for _ in _compilers(roots.proc))
        found.append(Sample("compile_cache_compilers", "", float(compilers), boot_s))
        if compilers == 0:
            now_s = time.time()  # beside the file's own time, which is of the wall clock
            found += [
                Sample("compile_cache_lock_age_seconds", f"path={path}",
                       max(0.0, now_s - made_s), boot_s)
                for path, made_s in locks[:LOCKS_MAX] if not set(path) & set(",=\n")
            ]  # fmt: skip
        return found


def _locks(root: str) -> Iterator[tuple[str, float]]:
    """(path, time of last change) of lock files; what vanishes meanwhile is left out."""
    folders, looked = [(root, 0)], 0
    while folders and looked < ENTRIES_MAX:
        folder, depth = folders.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda one: one.name)
        except OSError:
            continue
        for entry in entries[: ENTRIES_MAX - looked]:
            looked += 1
            try:
                if entry.is_dir(follow_symlinks=False) and depth < DEPTH_MAX:
                    folders.append((entry.path, depth + 1))
                elif entry.name.endswith(".lock"):
                    yield entry.path, entry.stat(follow_symlinks=False).st_mtime
            except OSError:
                continue


def _compilers(proc: str) -> Iterator[str]:
    """Processes whose command is a compiler's."""
    for pid in [one for one in os.listdir(proc) if one.isdecimal()][:PROCESSES_MAX]:
        try:
            words = read_text(f"{proc}/{pid}/cmdline", 4096).encode().split(b"\0")[:3]
        except NoData:
            continue  # it ended meanwhile
        if any(os.path.basename(word) in COMPILERS for word in words):
            yield pid
