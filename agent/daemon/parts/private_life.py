"""Ends a private agent when its launcher has ended.

Owns how long after: soon after a bye, later after a death, because a launcher that merely lost its
socket comes back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from ...launchers.server import LauncherServer
from ...system import procfs
from ..state import AgentState

LOOK_S = 0.1
AFTER_BYE_S = 0.5  # a private agent ends this long after its launcher said bye
AFTER_LOSS_S = 5.0  # ... or this long after the launcher's process was gone
FIRST_HELLO_S = 60.0  # ... or when no launcher ever came


class PrivateLife:
    name = "private"

    def __init__(
        self, state: AgentState, launchers: LauncherServer, stop: asyncio.Event,
        lingers: Callable[[float], bool] = lambda ended_for_s: False,
    ) -> None:
        """`lingers`: whether others need this agent for so long after its launcher's bye."""
        self._state, self._launchers, self._stop = state, launchers, stop
        self._lingers = lingers
        self._left_s = 0.0  # CLOCK_MONOTONIC when the last launcher went, 0 while one is here
        self._said_bye = False
        self.is_over = False  # the launcher has ended, and the run with it
        self.is_unserved = False  # it ended without a launcher that ever came

    def launcher_came(self) -> None:
        self._left_s, self._said_bye, self.is_over = 0.0, False, False

    def launcher_went(self, said_bye: bool) -> None:
        self._left_s, self._said_bye = time.monotonic(), said_bye
        self.is_over = said_bye

    def left_for_s(self) -> float:
        """How long the last launcher has been gone; 0 while one is here."""
        return time.monotonic() - self._left_s if self._left_s else 0.0

    async def run(self) -> None:
        if not self._state.is_private:
            return
        parent = os.getppid()
        await asyncio.sleep(LOOK_S)
        while not self._has_ended(parent):
            await asyncio.sleep(LOOK_S)
        self.is_over = True
        self._stop.set()

    def _has_ended(self, parent: int) -> bool:
        sessions = self._launchers.sessions()
        if any(session.connection is not None for session in sessions):
            return False
        if self._left_s == 0.0:
            # Nobody came yet; the process that started this one may be dead already.
            waited_s = time.monotonic() - self._state.started_s
            self.is_unserved = os.getppid() != parent or waited_s > FIRST_HELLO_S
            return self.is_unserved
        left_for_s = self.left_for_s()
        if self._said_bye and left_for_s > AFTER_BYE_S:
            return not self._lingers(left_for_s)
        is_alive = any(procfs.process_alive(session.pid) for session in sessions)
        return not is_alive and left_for_s > AFTER_LOSS_S
