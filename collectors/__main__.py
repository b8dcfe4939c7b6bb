"""The child that runs one collector whose source may never answer.

    python -m holdfast.collectors NAME ROOTS     (ROOTS: JSON list, as in contract.py)

Each line on standard input is a CLOCK_BOOTTIME to read at; each answer is one line of JSON:
{"samples": [[name, subject, value, boot_s], ...], "dropped": N}, {"absent": why} or
{"error": why}.  It keeps no deadline: its parent does, and kills it.  It dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

from . import PROBED
from .contract import NoData, Roots, legible, sound

PR_SET_PDEATHSIG = 1
SAMPLES_MAX = 10_000


def main(name: str, roots: Roots) -> int:
    """Serves until its standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.dup(1)  # what a library prints must not stand between two answers
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    collector = {one.name: one for one in PROBED}[name]()
    for line in sys.stdin.buffer:
        text = json.dumps(_answer(collector, roots, float(line))).encode() + b"\n"
        while text:
            text = text[os.write(answers, text) :]
    return 0


def _answer(collector: Any, roots: Roots, boot_s: float) -> dict[str, object]:
    begin_s = time.monotonic()
    try:
        samples = collector.collect(roots, boot_s)
    except NoData as reason:
        return {"absent": legible(str(reason)) or "not on this machine"}
    except OSError as error:
        return {"error": legible(str(error)[:500])}
    except Exception as error:  # border of a collector: promise 1
        return {"error": legible(f"{type(error).__name__}: {error}"[:500])}
    took_s = time.monotonic() - begin_s
    good = sound(samples, collector.metrics)
    return {"samples": good[:SAMPLES_MAX], "dropped": len(samples) - len(good), "took_s": took_s}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Roots(*json.loads(sys.argv[2]))))
