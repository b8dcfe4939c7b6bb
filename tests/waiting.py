"""Waiting for a condition, in a loop of asyncio and without one.

A limit here only ends a test that fails: it is far longer than what is waited for may take on a
machine that is busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 30.0
LOOK_S = 0.005
Found = TypeVar("Found")


async def until(
    condition: Callable[[], Found], timeout_s: float = LIMIT_S, what: object = ""
) -> Found:
    """What the condition says once it is true; fails the test when it never is, with `what` or what
    that says when called."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        _look_at(deadline_s, what or repr(condition))
        await asyncio.sleep(LOOK_S)
    return found


def wait_for(
    condition: Callable[[], Found], timeout_s: float = LIMIT_S, what: object = "",
    look_s: float = LOOK_S,
) -> Found:
    """The same, for a test without a loop.  `look_s`: for a condition that costs what is waited
    for the processor, as a question to a process that is starting does."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        _look_at(deadline_s, what or repr(condition))
        time.sleep(look_s)
    return found


def _look_at(deadline_s: float, what: object) -> None:
    if time.monotonic() >= deadline_s:
        raise AssertionError(f"never became true: {what() if callable(what) else what}")
