"""Questions that may never be answered, each asked in a thread of its own.

Owns those threads, how long each has waited, and the last answers.  For the children of the probes
alone: a thread that the kernel holds is left and named by the age of its question, and the other
questions go on.  The process can then be killed as a whole, if the kernel lets it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
WAITING_MAX = 64  # threads; beyond that nothing more is asked
SETTLE_S = 0.5  # a round waits this long; a later answer is in the next one, with its true time


class Answer(NamedTuple, Generic[T]):
    """The outcome of one question."""

    value: T | None  # None when the question failed
    error: OSError | None
    took_s: float
    boot_s: float  # CLOCK_BOOTTIME at which it was asked


class Questions(Generic[T]):
    """At most one open question a key, and none before its last answer was looked at: a late answer
    is handed out before it is replaced."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._since_s: dict[str, float] = {}  # key -> CLOCK_MONOTONIC of its open question
        self._answers: dict[str, Answer[T]] = {}
        self._untold: set[str] = set()

    def round(
        self, calls: Mapping[str, Callable[[], T]], boot_s: float, every_s: float = 0.0
    ) -> Iterator[tuple[str, float, Answer[T] | None]]:
        """Asks each question whose last answer is `every_s` old, waits a little, and forgets all
        others.  Of each: its key, how long it has waited, and the last answer; none while it
        waits, since the answer from before it hung no longer holds."""
        for key, call in calls.items():
            before = self._answers.get(key)
            if before is None or boot_s - before.boot_s >= every_s:
                self.ask(key, call, boot_s)
        self.settle(SETTLE_S)
        self.keep(calls)
        for key in calls:
            waited_s = self.waited_s(key)
            yield key, waited_s, self.answer(key) if waited_s == 0.0 else None

    def ask(self, key: str, call: Callable[[], T], boot_s: float) -> None:
        """Asks, unless the key has an open question or an unread answer.  `call` may raise OSError
        and nothing else."""
        with self._changed:
            busy = key in self._since_s or key in self._untold
            if busy or len(self._since_s) >= WAITING_MAX:
                return
            self._since_s[key] = time.monotonic()
        thread = threading.Thread(target=self._run, args=(key, call, boot_s), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: nothing was asked, so nothing hangs
            with self._changed:
                del self._since_s[key]
            raise OSError(f"{key} cannot be asked: {error}") from error

    def _run(self, key: str, call: Callable[[], T], boot_s: float) -> None:
        begin_s, value, error = time.monotonic(), None, None
        try:
            value = call()
        except OSError as problem:
            error = problem
        answer = Answer(value, error, time.monotonic() - begin_s, boot_s)
        with self._changed:
            del self._since_s[key]
            self._answers[key] = answer
            self._untold.add(key)
            self._changed.notify_all()

    def settle(self, limit_s: float) -> None:
        """Waits until no question is open, at most this long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._since_s, limit_s)

    def keep(self, keys: Iterable[str]) -> None:
        """Forgets the answers of all other keys."""
        wanted = set(keys)
        with self._changed:
            self._answers = {key: one for key, one in self._answers.items() if key in wanted}
            self._untold &= wanted

    def answer(self, key: str) -> Answer[T] | None:
        """The last answer; None before the first."""
        with self._changed:
            self._untold.discard(key)
            return self._answers.get(key)

    def waited_s(self, key: str) -> float:
        """Age of the open question; 0.0 when there is none."""
        with self._changed:
            since_s = self._since_s.get(key)
        return 0.0 if since_s is None else time.monotonic() - since_s
