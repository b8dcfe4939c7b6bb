"""/dev/shm: how full, and how much of it has no name any more.

Owns reading that one file system.  A file that was unlinked while a process still maps it is in no
listing, and such files are what fills it: killed data loaders leave them.  Reads only.
"""

from __future__ import annotations

import os

from .contract import SLOW, Metric, NoData, Roots, Sample
from .sources.files import ODD, is_count, pids_in, text_of

ENTRIES_MAX = 20_000  # files and folders, looked at in one reading
FOLDERS_MAX = 1_000  # of them, opened in one reading
DEPTH_MAX = 4
NEAR = 0.7  # full: from here on it is worth asking who holds it
PROCESSES_MAX = 5000
NAMED_MAX = 4


class SharedMemoryCollector:
    """How full /dev/shm is, how much of it has no name, and its likely holders."""

    name = "shared_memory"
    pace = SLOW
    metrics = (
        Metric("host_shm_size_bytes", "gauge", "Size of /dev/shm.", (), True),
        Metric("host_shm_used_bytes", "gauge", "Used bytes of /dev/shm.", (), True),
        Metric("host_shm_unlinked_bytes", "gauge",
               "Used bytes of /dev/shm that no file name leads to: unlinked, and still held."),
        Metric("host_shm_files", "gauge", "Files in /dev/shm."),
    )

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData where there is no such file system."""
        try:
            space = os.statvfs(roots.shm)
        except OSError as error:
            raise NoData(f"{roots.shm}: {error.strerror}") from error
        size = space.f_blocks * space.f_frsize
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        if size <= 0:
            raise NoData(f"{roots.shm}: has no size of its own")
        files, named, cut = _named(roots.shm)
        found = [
            Sample("host_shm_size_bytes", "", float(size), boot_s),
            Sample("host_shm_used_bytes", "", float(used), boot_s),
            Sample("host_shm_files", "", float(files), boot_s)]
        if not cut:  # a part of the names says nothing about the nameless rest
            left = float(max(0, used - named))
            found.append(Sample("host_shm_unlinked_bytes", "", left, boot_s))
        if used >= NEAR * size:
            found += _holders(roots.proc, boot_s)
        return found


def _named(path: str) -> tuple[int, int, bool]:
    """(files, bytes that names lead to, whether there were too many to look at all).

    Anybody may fill this file system with names: folders count as files do, and a listing is taken
    entry by entry, for one of a million names would be more memory than the agent has.
    """
    folders, looked, files, seen = [(path, 0)], 0, 0, dict[int, int]()
    known = 1
    while folders:
        folder, depth = folders.pop()
        try:
            listing = os.scandir(folder)
        except OSError:
            if depth == 0:
                return files, 0, True
            continue
        with listing:
            for entry in listing:
                looked += 1
                if looked > ENTRIES_MAX:
                    return files, sum(seen.values()), True
                try:
                    if entry.is_dir(follow_symlinks=False):
                        known += 1
                        if depth >= DEPTH_MAX or known > FOLDERS_MAX:
                            return files, sum(seen.values()), True
                        folders.append((entry.path, depth + 1))
                        continue
                    stat = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # removed meanwhile
                files += 1
                seen[stat.st_ino] = stat.st_blocks * 512  # once, however many names it has
    return files, sum(seen.values()), False


def _holders(proc: str, boot_s: float) -> list[Sample]:
    """Processes with the most shared memory resident: the likely holders, not a proof."""
    found: list[tuple[int, int, str]] = []
    for pid in pids_in(proc, PROCESSES_MAX):
        lines = text_of(f"{proc}/{pid}/status", 4096).splitlines()
        rows = dict(line.partition(":")[::2] for line in lines)
        words = rows.get("RssShmem", "").split()
        if words and is_count(words[0]) and int(words[0]) > 0:
            name = rows.get("Name", "?").strip().translate(ODD)
            found.append((int(words[0]) * 1024, pid, name))
    found.sort(reverse=True)
    return [
        Sample("shm_resident_bytes", f"pid={pid},name={name}", float(size), boot_s)
        for size, pid, name in found[:NAMED_MAX]]
