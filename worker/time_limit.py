"""Limits of time for reading what a person wrote: of the processor's, and of waiting for a disk.

Owns one timer of the process.  It works in the main thread alone, since a signal ends the work; in
another thread nothing is limited, and whoever needs a limit there takes a child.  Its seconds are
those of the processor, so that a busy machine refuses nothing.  No signal ends the wait for a file
system that hangs: who has nothing else to do then leaves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# An exception out of a handler is lost where Python calls back and cannot raise: in __del__, in a
# callback of the garbage collector.  So the signal comes again until the work has ended.
AGAIN_S = 0.1

OUTSIDE = (__file__, contextlib.__file__)  # no place to raise: `with` would not be ended

_limit_s: float | None = None  # of the work that goes on
_fired = False


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


def _late(_number: int, frame: FrameType | None) -> None:
    global _fired
    if _limit_s is not None and (frame is None or frame.f_code.co_filename not in OUTSIDE):
        _fired = True
        raise TooSlow(f"takes longer than {_limit_s:g} s")


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the body after `seconds`, or behind it where it ended before the exception
    came through.  Not to be nested."""
    global _fired, _limit_s
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _late)
    _limit_s, _fired = seconds, False
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 1e-3), AGAIN_S)
        yield
        if _fired:
            raise TooSlow(f"takes longer than {seconds:g} s")
    except ValueError as error:
        if _fired and not isinstance(error, TooSlow):  # the body made another of it
            raise TooSlow(f"takes longer than {seconds:g} s") from error
        raise
    finally:
        _limit_s = None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        # A last signal may be on its way to another thread still, and by default it ends the
        # process: then ours, which does nothing now, stays.
        if before not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGVTALRM, before)
