"""Snapshots: a rank's state in memory that outlives the rank, because the launcher holds it.

Owns the memfd's layout: one header page and two halves.  A snapshot goes into the half that does
not hold the newest one, and its header is written last, so a kill at any moment leaves at least
one whole.  Which steps may be used is not decided here; every reader checks the digest.
No name in /dev/shm: the memory is gone with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import List, NamedTuple, Optional, Tuple

HEADER_BYTES = 4096
ALIGN = 4096
_HALF = struct.Struct("=QQQQQ48s")  # generation, rank, world, step + 1 (0: none), nbytes, digest
_HALF_AT = (64, 64 + 128)
_SIZE = struct.Struct("=QQ")  # magic, bytes of one half
MAGIC = 0x31504E5348464C48


class SnapshotShard(NamedTuple):
    """One whole half: this rank's part of the state after `step` optimizer steps."""

    rank: int
    world: int
    generation: int
    step: int
    digest: str
    data: memoryview


def half_bytes(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def create(nbytes: int) -> int:
    """A memfd with room for two halves of `nbytes`.  Raises OSError when memory is refused."""
    fd = os.memfd_create("holdfast-snapshot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HEADER_BYTES + 2 * half_bytes(nbytes))
        os.pwrite(fd, _SIZE.pack(MAGIC, half_bytes(nbytes)), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class SnapshotFile:
    """A rank's mapping of its own snapshot memfd."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size)
        magic, self.half = _SIZE.unpack_from(self.map, 0)
        if magic != MAGIC or HEADER_BYTES + 2 * self.half > self.size:
            raise ValueError("not a snapshot file")
        self.view = memoryview(self.map)
        self.writing = -1

    def headers(self) -> List[Tuple[int, int, int, int, int, str]]:
        found = []
        for at in _HALF_AT:
            generation, rank, world, step, nbytes, digest = _HALF.unpack_from(self.map, at)
            text = digest.rstrip(b"\0").decode("ascii", "replace")
            found.append((generation, rank, world, step, nbytes, text))
        return found

    def begin(self, nbytes: int) -> memoryview:
        """The half that is not the newest whole one; it counts as not whole from now on."""
        if nbytes > self.half:
            raise ValueError("snapshot of %d bytes, room for %d" % (nbytes, self.half))
        newest = [(h[0], h[3]) for h in self.headers()]
        self.writing = 0 if newest[0] <= newest[1] else 1
        _HALF.pack_into(self.map, _HALF_AT[self.writing], 0, 0, 0, 0, 0, b"")
        start = HEADER_BYTES + self.writing * self.half
        return self.view[start : start + nbytes]

    def commit(
        self, generation: int, rank: int, world: int, step: int, nbytes: int, digest: str
    ) -> None:
        """Makes the half handed out last the newest: all else first, the step in one write."""
        at = _HALF_AT[self.writing]
        packed = _HALF.pack(generation, rank, world, step + 1, nbytes, digest.encode())
        self.map[at + 32 : at + _HALF.size] = packed[32:]
        self.map[at : at + 32] = packed[:32]

    def shards(self) -> List[SnapshotShard]:
        """The whole halves, at most two."""
        whole = []
        for number, (generation, rank, world, step, nbytes, digest) in enumerate(self.headers()):
            if step == 0 or nbytes > self.half:
                continue
            start = HEADER_BYTES + number * self.half
            data = self.view[start : start + nbytes].toreadonly()
            whole.append(SnapshotShard(rank, world, generation, step - 1, digest, data))
        return whole


def shards_of(fds: List[int]) -> List[SnapshotShard]:
    """Every whole half behind these descriptors; a descriptor that is no snapshot is skipped."""
    found: List[SnapshotShard] = []
    for fd in fds:
        try:
            found.extend(SnapshotFile(fd).shards())
        except (OSError, ValueError):
            continue
    return found


def newest_whole(shards: List[SnapshotShard]) -> Optional[Tuple[int, int, int]]:
    """(generation, step, world) of the newest step for which all ranks' shards are whole."""
    complete = []
    for generation, step, world in {(s.generation, s.step, s.world) for s in shards}:
        ranks = {s.rank for s in shards if (s.generation, s.step) == (generation, step)}
        if world and ranks >= set(range(world)):
            complete.append((generation, step, world))
    return max(complete) if complete else None


def budget_bytes(fraction: float = 0.1) -> int:
    """min(10 % of free memory, half of the cgroup's headroom) on this node now; 0 if unknown."""
    free = 0
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    room = int(free * fraction)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            with open("/sys/fs/cgroup/" + limit) as top, open("/sys/fs/cgroup/" + used) as now:
                room = min(room, max(0, int(top.read()) - int(now.read())) // 2)
        except (OSError, ValueError):
            continue  # no such controller here, or "max"
    return room
