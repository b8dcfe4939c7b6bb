"""A simulated node: its clocks, its freezing, its death; and a process on it.

Owns what is common to everything that runs on one machine.  Work scheduled through `after` is
lost when the machine dies and waits while it is frozen, as a process's would; nothing on a
machine may schedule itself in any other way.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple, Unpack

from ..core.model import Now
from .loop import Action, Loop

Ts = TypeVarTuple("Ts")
SLOW, BROKEN = "slow", "broken"
UNBEGUN = inspect.CORO_CREATED


class Machine:
    """One node's hardware and kernel."""

    def __init__(self, loop: Loop, name: str, drift: float, wall_ahead_s: float,
                 booted_s: float = 1000.0) -> None:
        self.loop = loop
        self.name = name
        self.up = True
        self.frozen = False
        self.fatal = ""  # the truth: name of the fatal fault of this hardware, "" = fit
        self.fatal_cursor = 0  # of the line in which its kernel said so
        self.fatal_s = 0.0  # since when
        self.was_fatal = ""
        self.weak = ""  # the truth: SLOW or BROKEN, of its way to all others
        self.weak_s = -1e9  # when it was that last, or became it
        self.was_paused = False  # with its clock, ever
        self.gone = False  # dead for good
        self.boots = 1
        self.rate = 1.0 + drift
        self.wall_ahead_s = wall_ahead_s  # a jump of the wall clock changes this and no more
        self._zero_s = -booted_s  # since when it is up, each for another time
        self._frozen_at_s = 0.0
        self._clock_stops = False
        self._waiting: list[Action] = []

    def boot_s(self) -> float:
        """CLOCK_BOOTTIME of this machine."""
        at_s = self._frozen_at_s if self.frozen and self._clock_stops else self.loop.now_s
        return (at_s - self._zero_s) * self.rate

    def now(self) -> Now:
        """What the core is told of time."""
        wall_s = 1.7e9 + self.loop.now_s + self.wall_ahead_s
        return Now(self.boot_s(), wall_s, f"{self.name}-boot-{self.boots}")

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` here in `delay_s`: dropped by death, held back by a freeze."""
        boots = self.boots

        def fire() -> None:
            if self.boots != boots or not self.up:
                return
            if self.frozen:
                self._waiting.append(fire)
            else:
                action()

        self.loop.after(delay_s, fire)

    def freeze(self, clock_stops: bool) -> None:
        """Stop everything on the machine; `clock_stops` as a paused guest's boot clock does."""
        self.frozen = True
        self._clock_stops = clock_stops
        self.was_paused = self.was_paused or clock_stops
        self._frozen_at_s = self.loop.now_s

    def thaw(self) -> None:
        """Go on: whatever was due runs now, in the order in which it was due."""
        if not self.frozen:
            return
        self.frozen = False
        if self._clock_stops:
            self._zero_s += self.loop.now_s - self._frozen_at_s
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def break_down(self, fault: str) -> None:
        """Its hardware breaks for good."""
        self.fatal = self.was_fatal = fault
        self.fatal_cursor += 1
        self.fatal_s = self.loop.now_s

    def crash(self) -> None:
        """Power off: nothing that was scheduled here ever runs."""
        self.up = False
        self.frozen = False
        self._waiting = []

    def boot(self) -> None:
        """Power on with a new boot id and a boot clock that starts at nought."""
        self.up = True
        self.boots += 1
        self._zero_s = self.loop.now_s


class Process(asyncio.BaseEventLoop):
    """A process of asyncio's on a machine: its loop, in virtual time.  Nobody waits in it: each
    event of the simulator enters by `run`, and what became ready runs before it leaves."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.alive = True
        self._due: deque[asyncio.Handle] = deque()

    def __del__(self) -> None:
        """It has nothing to close."""

    def kill(self) -> None:
        """It ends between two callbacks; nothing is told, nothing is tidied."""
        self.alive = False
        for task in asyncio.all_tasks(self):
            work = task.get_coro()
            if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == UNBEGUN:
                work.close()  # Python would warn that nobody awaited it

    def time(self) -> float:
        return self.machine.loop.now_s

    def later(self, delay_s: float, action: Action) -> None:
        """Run `action` in this process, which may be gone by then."""
        self.machine.after(delay_s, lambda: self.run(action))

    def run(self, action: Action) -> None:
        """Run `action`, and what it makes ready."""
        if not self.alive:
            return
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            action()
            while self._due and self.alive and outer is not self:
                handle = self._due.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a task that nobody waits for."""
        def begin() -> None:
            self.create_task(work)

        self.run(begin)

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts,
                  context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts,
                context: Context | None = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.later(when - self.time(), lambda: None if handle.cancelled() else handle._run())
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays among the machine's events, and does nothing."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raises ends the simulation; a task that dies with its process does not.
        """
        if "handle" in context:
            raise context["exception"]
