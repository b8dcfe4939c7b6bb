"""Runs the collectors, and hands their readings to every reader.

Owns when they begin: anew, with the configuration of that moment, each time this part begins.
"""

from __future__ import annotations

import asyncio

from ...telemetry.collectors import Runner
from ..state import AgentState


class Collectors:
    name = "collectors"

    def __init__(self, state: AgentState) -> None:
        self._state = state

    async def run(self) -> None:
        await asyncio.sleep(0)
        state = self._state
        state.runner = Runner(state.config, state.errors, state.launchers.compile_caches)
        await state.runner.run()
