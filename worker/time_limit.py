"""A limit of time for work that holds the processor: parsing, and compiling what a person wrote.

Owns one timer of the process.  It works in the main thread alone, since a signal ends the work; in
another thread nothing is limited, and whoever needs a limit there takes a child.  Seconds are those
of the processor, so that a busy machine refuses nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlow(ValueError):
    """The work was ended; its text says after how long."""


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
