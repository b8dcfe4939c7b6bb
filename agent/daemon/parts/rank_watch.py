"""Reads the scheduler's state of every rank, so that a stop is dated to 0.1 s.

Owns that interval, and how late the event loop is, which is measured on the way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...launchers.server import LauncherServer
from ..state import AgentState

WATCH_S = 0.1  # how often scheduler states are read while ranks exist
IDLE_WATCH_S = 1.0
LAG_FADES = 0.9  # per look: the shown lag is the worst of about the last ten seconds


class RankWatch:
    name = "watch"

    def __init__(
        self, state: AgentState, launchers: LauncherServer, wake: Callable[[str], None]
    ) -> None:
        self._state, self._launchers, self._wake = state, launchers, wake

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            has_ranks = any(session.monitors for session in self._launchers.sessions())
            pause_s = WATCH_S if has_ranks else IDLE_WATCH_S
            due_s = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            late_s = max(0.0, loop.time() - due_s)
            faded_s = self._state.loop_lag_s * LAG_FADES ** (pause_s / WATCH_S)
            self._state.loop_lag_s = max(late_s, faded_s)
            if has_ranks and self._launchers.look(time.monotonic()):
                self._wake("stop state")
