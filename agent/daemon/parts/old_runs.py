"""Removes what old private runs have left, once, while a private agent begins.

Owns when: beside everything else, in a thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from ...history import old_runs
from ...system.side_thread import SideThread
from ..state import AgentState

AFTER_S = 1.0  # the run's own start comes first
DAY_S = 86400.0
GB = 10**9


class OldRuns:
    name = "old runs"

    def __init__(self, state: AgentState) -> None:
        self._state = state

    async def run(self) -> None:
        agent = self._state.config.agent
        folder = Path(agent.state_dir)
        if not self._state.is_private or folder.parent.name != "runs":
            return
        await asyncio.sleep(AFTER_S)
        await SideThread(self.name).do(self.name, functools.partial(
            old_runs.tidy, folder, Path(agent.runtime_dir), agent.runs_kept_days * DAY_S,
            int(agent.runs_kept_gb * GB)))
