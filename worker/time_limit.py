"""Limits of time for reading what a person wrote: of the processor's, and of waiting for a disk.

Owns one timer of the process.  It works in the main thread alone, since a signal ends the work; in
another thread nothing is limited, and whoever needs a limit there takes a child.  Its seconds are
those of the processor, so that a busy machine refuses nothing.  No signal ends the wait for a file
system that hangs: who has nothing else to do then leaves.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlow(ValueError):
    """The work was ended; its text says after how long."""


@contextmanager
def or_leave(seconds: float, words: str, code: int) -> Iterator[None]:
    """Ends this process with `code` where the body is not done after `seconds` of the clock.  For a
    process that has only begun: nothing is tidied up."""

    def leave() -> None:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the body after `seconds`.  Not to be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 1e-3))
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
