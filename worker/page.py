"""The page: one rank's progress in 4 KiB of shared memory, written without a system call.

Owns the layout.  A page is an mmap of a memfd that the launcher makes before the fork and seals
against shrinking.  Every field is eight native bytes and has exactly one writing thread, so no
reader ever sees half a value.  Readers treat the content as input from outside: it is bounded,
and never a source of hardware faults.  Imports nothing but the standard library; the agent
imports this module for its layout alone.

Times are CLOCK_MONOTONIC nanoseconds, except `permit_ns`, which is CLOCK_BOOTTIME.
"""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
import struct
import sys
from typing import Dict, NamedTuple, Sequence, Tuple

MAGIC = int.from_bytes(b"HOLDFAST", sys.byteorder)
VERSION = 1
SIZE = 4096
PHASES = (
    "startup", "compile", "data", "forward_backward", "collective", "optimizer", "checkpoint",
    "eval", "unknown",
)
UNKNOWN = len(PHASES) - 1
COLLECTIVES = (  # 16 at most: see collective_key
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "send", "recv", "barrier",
)
COUNT_MAX = 2**53  # of steps and collectives: far from any run, and exact as a float
TIME_MAX_NS = 2**63 - 1
PID_MAX = 2**31 - 1
KEY_MAX = 2**31 - 1  # of a kind of collectives
RATE_MAX = 1e15
GROUPS = 8  # process groups watched per rank; further ones are not copied
RING = 8  # steps remembered, for comparing ranks at an equal step

# Field numbers.  Writer in brackets: L launcher, M the rank's main thread, T its ticker.
F_MAGIC, F_VERSION, F_SIZE = 0, 1, 2  # [L]
F_GENERATION, F_RANK, F_PID = 3, 4, 5  # [M] on assignment
F_STEP = 6  # [M] optimizer steps done
F_PHASE, F_PHASE_BEGIN = 7, 8  # [M]
F_STEP_BEGIN, F_STEP_END = 9, 10  # [M] differ while inside optimizer.step: the state is torn
F_PROGRESS = 11  # [M] when anything of the above last moved
F_BEAT = 12  # [T]
F_PERMIT = 13  # [L] BOOTTIME deadline, 0 = none
F_OUTCOME, F_CODE = 14, 15  # [M] index into OUTCOMES; exit code
F_LOSS = 16  # [M] bits of a double
F_GROUPS = 17  # [M] number of registered groups
F_TOTAL = 18  # [M] steps the run wants, 0 unknown
F_RATE = 19  # [M] bits of a double: tokens or samples a second
F_STOP_AFTER = 20  # [L] end after this step, with a checkpoint; 0 = go on
F_BROKEN = 21  # [T] the newest generation that this rank was told to leave
F_SEQ = 24  # [T] GROUPS pairs (group id, sequence number)
F_RING = F_SEQ + 2 * GROUPS  # [M] RING pairs (step, default group's number at its end)
F_STEP_NS = F_RING + 2 * RING  # [M] RING last step durations
F_PHASE_NS = F_STEP_NS + RING  # [M] one accumulator per phase
F_GRADIENTS = F_PHASE_NS + len(PHASES)  # [M] as Gradients; the first is 0 while the rest is written
F_COLLECTIVES = F_GRADIENTS + 7  # [M] of which window; 0 = none, and while the rest is written
KINDS_SHOWN, KIND_FIELDS = 12, 4  # ... kinds of collectives, each a key, calls, bytes, nanoseconds
FIELDS = F_COLLECTIVES + 1 + KINDS_SHOWN * KIND_FIELDS

OUTCOMES = ("", "done", "exception", "exit", "bad_checkpoint")

# What a rank of ours can have written: beyond it, a stray pointer of the program's did.
BOUNDS: Dict[Tuple[str, int], Tuple[int, ...]] = {
    ("steps", COUNT_MAX): (F_GENERATION, F_STEP, F_STEP_BEGIN, F_STEP_END, F_TOTAL,
                           *range(F_RING, F_STEP_NS)),
    ("collectives", COUNT_MAX): tuple(range(F_SEQ + 1, F_RING, 2)),
    ("of its collectives", COUNT_MAX): tuple(
        number for number in range(F_COLLECTIVES, FIELDS)
        if (number - F_COLLECTIVES - 1) % KIND_FIELDS),
    ("a kind of collectives", KEY_MAX): tuple(range(F_COLLECTIVES + 1, FIELDS, KIND_FIELDS)),
    ("a time", TIME_MAX_NS): (F_PHASE_BEGIN, F_PROGRESS, F_BEAT, F_PERMIT,
                              *range(F_STEP_NS, F_GRADIENTS),
                              *range(F_GRADIENTS + 1, F_GRADIENTS + 4)),
    ("of its gradients", COUNT_MAX): (F_GRADIENTS, *range(F_GRADIENTS + 4, F_COLLECTIVES)),
    ("a pid", PID_MAX): (F_PID,),
}
_LIMITS = {number: most for (_, most), fields in BOUNDS.items() for number in fields}
MOST = tuple(_LIMITS.get(number, 2**64 - 1) for number in range(FIELDS))


class Gradients(NamedTuple):
    """What torch's DDP measured in one of its iterations (worker/rank/gradients.py); without DDP,
    what a rank's collectives took in a step, on average (worker/rank/collectives.py)."""

    iteration: int = 0  # by DDP's own count, else the step; 0 = none was measured
    sum_ns: int = 0  # from the first bucket's all-reduce to the end of the last one's
    wait_ns: int = 0  # the part of it behind this rank's own backward pass
    compute_ns: int = 0  # forward and backward pass
    size_bytes: int = 0  # of all gradients, 0 unknown
    world: int = 0  # ranks that sum them
    in_all: int = 0  # 1: of all collectives on CPU tensors, in place of DDP's


class Collective(NamedTuple):
    """All collectives of a kind in a window (worker/rank/collectives.py)."""

    kind: str  # of COLLECTIVES
    ranks: int  # of the group; 2 for send and recv
    on_device: bool  # of tensors there: no time is known
    calls: int
    size_bytes: int  # of all calls; what counts is as nccl-tests has it
    ns: int  # of all calls, each from its begin to the end of the wait for it


class PageView(NamedTuple):
    """One consistent-enough reading of a page; see the module's docstring for units."""

    generation: int
    rank: int
    pid: int
    step: int
    phase: str
    phase_begin_ns: int
    step_begin: int
    step_end: int
    progress_ns: int
    beat_ns: int
    permit_ns: int
    outcome: str
    code: int
    loss: float
    rate: float
    total_steps: int
    groups: Tuple[Tuple[int, int], ...]
    step_seq: Tuple[Tuple[int, int], ...]
    last_step_ns: Tuple[int, ...]
    phase_ns: Tuple[int, ...]
    gradients: Gradients
    collectives: Tuple[Collective, ...] = ()  # of the latest window


def collective_key(kind: str, ranks: int, on_device: bool) -> int:
    """A kind of collectives as a field; never 0, for a group has a rank."""
    return min(ranks, KEY_MAX >> 5) << 5 | on_device << 4 | COLLECTIVES.index(kind)


def collective_of(key: int, row: Sequence[int]) -> Collective:
    kind = COLLECTIVES[min(key & 15, len(COLLECTIVES) - 1)]
    return Collective(kind, key >> 5, bool(key & 16), row[0], row[1], row[2])


def create() -> int:
    """A new sealed page; returns its file descriptor (inheritable across a fork, not an exec)."""
    fd = os.memfd_create("holdfast-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        # A memfd is born with mode 0777: whoever gets a read-only descriptor of it could open it
        # again for writing through /proc.
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fields = map_fields(fd)
        fields[F_PHASE], fields[F_RANK] = UNKNOWN, (1 << 64) - 1
        fields[F_VERSION], fields[F_SIZE], fields[F_MAGIC] = VERSION, SIZE, MAGIC
    except OSError:
        os.close(fd)
        raise
    return fd


def readonly(fd: int) -> int:
    """Another descriptor of the page, for whoever only reads it; the caller closes it.

    It cannot be mapped writable.  F_SEAL_FUTURE_WRITE would shut out the rank as well, which maps
    its page after the fork, and for a spawned rank after the exec.  Raises OSError.
    """
    return os.open("/proc/self/fd/%d" % fd, os.O_RDONLY | os.O_CLOEXEC)


def map_fields(fd: int) -> memoryview:
    """The page behind `fd` as a writable view of 8-byte unsigned fields."""
    return memoryview(mmap.mmap(fd, SIZE)).cast("Q")


def map_readonly(fd: int) -> mmap.mmap:
    """The page behind a descriptor that came from outside, for reading.

    Raises ValueError unless it is a memfd of the right size that can no longer shrink (reading a
    mapping whose file was cut kills the reader with SIGBUS), handed over for reading alone: a
    reader that could write would be one bug away from a rank's own numbers.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("not a sealed memfd: %s" % error) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the memfd lacks F_SEAL_SHRINK")
    if os.fstat(fd).st_size < SIZE:
        raise ValueError("the page is smaller than %d bytes" % SIZE)
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
        raise ValueError("the page's descriptor is writable: hand over a read-only one")
    return mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)


def signed(value: int) -> int:
    """A field that may hold -1."""
    return value - (1 << 64) if value >> 63 else value


def double(pattern: int) -> float:
    value: float = struct.unpack("=d", struct.pack("=Q", pattern))[0]
    return value


def bits(value: float) -> int:
    pattern: int = struct.unpack("=Q", struct.pack("=d", value))[0]
    return pattern


def count(value: int) -> int:
    """A field that counts something, for whoever reads it alone."""
    return min(value, COUNT_MAX)


def check(field: Tuple[int, ...]) -> None:
    """Raises ValueError that names what no rank of ours can have written."""
    if field[F_MAGIC] != MAGIC:
        raise ValueError("no page: the magic number is missing")
    if field[F_VERSION] != VERSION:
        raise ValueError("page of version %d, this reads %d" % (field[F_VERSION], VERSION))
    if any(map(operator.gt, field, MOST)):
        number = next(n for n in range(FIELDS) if field[n] > MOST[n])
        raise ValueError("the page is damaged: its field %d (%s) holds %d" % (
            number, next(what for (what, _), at in BOUNDS.items() if number in at), field[number]))
    for name, value in (("rank", signed(field[F_RANK])), ("code", signed(field[F_CODE]))):
        if abs(value) > PID_MAX:
            raise ValueError("the page is damaged: %s is %d" % (name, value))


def read_page(mapped: "mmap.mmap | memoryview | bytes") -> PageView:
    """Reads a page.  Raises ValueError when it is not one of ours, of another version, or holds
    what no rank can have written."""
    field = struct.unpack_from("=%dQ" % FIELDS, mapped, 0)
    check(field)
    groups = min(field[F_GROUPS], GROUPS)
    ring = [
        (field[F_RING + 2 * i], field[F_RING + 2 * i + 1], field[F_STEP_NS + i])
        for i in range(RING)
        if field[F_RING + 2 * i]]
    ring.sort()
    loss, rate = double(field[F_LOSS]), double(field[F_RATE])
    outcome = field[F_OUTCOME]
    return PageView(
        generation=field[F_GENERATION], rank=signed(field[F_RANK]), pid=field[F_PID],
        step=field[F_STEP], phase=PHASES[min(field[F_PHASE], UNKNOWN)],
        phase_begin_ns=field[F_PHASE_BEGIN], step_begin=field[F_STEP_BEGIN],
        step_end=field[F_STEP_END], progress_ns=field[F_PROGRESS], beat_ns=field[F_BEAT],
        permit_ns=field[F_PERMIT], outcome=OUTCOMES[outcome] if outcome < len(OUTCOMES) else "",
        code=signed(field[F_CODE]), loss=loss, rate=rate if 0.0 <= rate < RATE_MAX else 0.0,
        total_steps=field[F_TOTAL],
        groups=tuple((field[F_SEQ + 2 * i], field[F_SEQ + 2 * i + 1]) for i in range(groups)),
        step_seq=tuple((step, seq) for step, seq, _ in ring),
        last_step_ns=tuple(took for _, _, took in ring if took),
        phase_ns=field[F_PHASE_NS:F_GRADIENTS],
        gradients=Gradients(*field[F_GRADIENTS:F_COLLECTIVES]),
        collectives=tuple(
            collective_of(field[at], field[at + 1 : at + KIND_FIELDS])
            for at in range(F_COLLECTIVES + 1, FIELDS, KIND_FIELDS) if field[at]
        ) if field[F_COLLECTIVES] else (),
    )
