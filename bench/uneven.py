"""When the uneven workload pauses: a pure schedule, shared by its script and its data set.

Owns the pauses, which vary a step's time more than 50-fold.  Nothing here is a fault: everything
is what healthy jobs do.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time

BASE_S = 0.1
SLOW_FIRST_STEPS = 3
# Longer than what a script is always given (60 s): without them no act by cost could happen.
LONG_EVERY = 900  # steps
LONG = {150: ("evaluation", 150.0), 300: ("slow_read", 75.0), 450: ("compile", 120.0)}
SLOW_B_S = 4e6  # bytes that a slow disk gives in a second
BURN = "import time\nend = time.time() + %f\nwhile time.time() < end: pass"


def pause_of(step: int, rank: int) -> tuple[str, float]:
    """(kind, seconds) of what this rank does before `step`, which counts from 1."""
    if step <= SLOW_FIRST_STEPS:
        return "first_step", 5.0 if rank == 0 else 4.0
    if step % LONG_EVERY in LONG:
        kind, seconds = LONG[step % LONG_EVERY]
        return kind, seconds if rank == 0 else 0.0
    if step == 12 or step % 1500 == 0:
        return "compile", 20.0 if rank == 0 else 0.0
    if step % 100 == 0:
        return "evaluation", 6.0 if rank == 0 else 0.0
    if step % 70 == 0:
        return "checkpoint", 3.0 if rank == 0 else 0.0
    draw = random.Random(step)
    if draw.random() < 0.01:
        slow_rank, seconds = draw.randrange(2), draw.uniform(1.0, 6.0)
        return "slow_read", seconds if rank == slow_rank else 0.0
    return "", 0.0


def carry_out(kind: str, seconds: float) -> None:
    """Evaluations compute, compilers are children that compute, reads get little at a time, and
    writes wait."""
    if seconds <= 0:
        return
    if kind == "compile":
        subprocess.run([sys.executable, "-c", BURN % seconds], timeout=10 * seconds, check=True)
    elif kind == "evaluation":
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            sum(range(10_000))
    elif kind == "slow_read":
        read_slowly(seconds)
    else:
        time.sleep(seconds)


def read_slowly(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    with open("/dev/zero", "rb", buffering=0) as file:
        while (left_s := end_s - time.monotonic()) > 0:
            file.read(int(0.1 * SLOW_B_S))
            time.sleep(min(0.1, left_s))
