"""What `holdfast check` found on this node last, for whoever asks the agent.

Owns the look at results.json below the state directory: read again when it is another file, in a
thread, and nothing is concluded from it.  What is of an earlier boot counts as not known.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ...checks import results
from ..state import AgentState

EVERY_S = 15.0


class CheckResults:
    name = "check results"

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._folder = Path(state.config.agent.state_dir) / "checks"
        self._seen: tuple[int, int, int] | None = None

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        found = await asyncio.to_thread(self._changed)
        if found is not None:
            here = found.boot_id == self._state.boot_id
            self._state.checks = tuple(found.verdicts.values()) if here else ()

    def _changed(self) -> results.Results | None:
        """The results; None where they are the same as before."""
        try:
            stat = os.stat(self._folder / results.FILE, follow_symlinks=False)
            seen = stat.st_ino, stat.st_mtime_ns, stat.st_size
        except OSError:
            seen = (0, 0, 0)
        if seen == self._seen:
            return None
        self._seen = seen
        return results.load(self._folder)
