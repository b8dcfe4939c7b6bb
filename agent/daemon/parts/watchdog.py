"""Tells systemd's watchdog that the agent lives, for as long as steps are made.

Owns that word alone: a loop that turns without steps is no agent, and is not kept alive by it.
"""

from __future__ import annotations

import asyncio

from ...system.systemd import notify, watchdog_s
from ..state import AgentState


class Watchdog:
    name = "watchdog"

    def __init__(self, state: AgentState) -> None:
        self._state = state

    async def run(self) -> None:
        every_s = watchdog_s()
        if not every_s:
            return
        seen = -1
        while True:
            if self._state.turns != seen:
                seen = self._state.turns
                notify("WATCHDOG=1")
            await asyncio.sleep(max(every_s, self._state.config.agent.tick_s))
