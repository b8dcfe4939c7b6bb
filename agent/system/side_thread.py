"""Work that may hang for ever: a thread of its own, which nobody has to wait for.

Owns one thread and what waits for it.  A file system that does not answer holds up this work and no
other: the event loop's shared threads stay free, and so does the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

WAITING_MAX = 256
CRASHED = "it ended in an error of ours: see the agent's log"


class SideThread:
    """Runs jobs one after the other, of each key the newest alone; asked by the event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped = 0
        self._waiting: OrderedDict[str, tuple[Callable[[], None], asyncio.Future[None]]]
        self._waiting = OrderedDict()
        self._begun_s = 0.0  # CLOCK_MONOTONIC of the job that runs, 0 while none does
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def busy_s(self) -> float:
        """For how long the job that runs now has been running."""
        begun_s = self._begun_s
        return time.monotonic() - begun_s if begun_s else 0.0

    def do(self, key: str, work: Callable[[], None]) -> asyncio.Future[None]:
        """Runs `work` after what came before it.  It takes the place of what still waits under the
        same key, whose future then tells of this.  The future gives OSError or ValueError as `work`
        raised it, RuntimeError for any other end, and is cancelled where too much waits."""
        with self._changed:
            _, done = self._waiting.get(key, (None, None))
            if done is None or done.done():
                done = asyncio.get_running_loop().create_future()
                done.add_done_callback(take_error)
            self._waiting[key] = (work, done)
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popitem(last=False)[1][1].cancel()
                self.dropped += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return done

    async def close(self, limit_s: float) -> None:
        """Ends the thread when it has done what waits, or leaves it behind after `limit_s`."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        until_s = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            await asyncio.sleep(0.01)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                _, (work, done) = self._waiting.popitem(last=False)
                self._begun_s = time.monotonic()
            error: Exception | None = RuntimeError(CRASHED)
            try:
                work()
                error = None
            except (OSError, ValueError) as failed:
                error = failed
            finally:
                self._begun_s = 0.0
                tell(done, error)


def tell(done: asyncio.Future[None], error: Exception | None = None) -> None:
    """Ends a future of the event loop from another thread."""

    def end() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    try:
        done.get_loop().call_soon_threadsafe(end)
    except RuntimeError:
        pass  # the loop has ended; nobody waits any more


def take_error(done: asyncio.Future[Any]) -> None:
    """Whoever waited may have given up: the error is no surprise then, for asyncio to warn of."""
    if not done.cancelled():
        done.exception()
