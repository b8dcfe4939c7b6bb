"""Serves the page, the API and the metrics.

Owns that they are loaded in a thread, after the launchers' socket is up: the import takes longer
than everything before it.  `answers` is set once they answer, or once it is said why not.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable

from ..operators import Operators
from ..other_nodes import OtherNodes
from ..state import AgentState


class Web:
    name = "web"

    def __init__(
        self, state: AgentState, operators: Operators, others: OtherNodes,
        announce: Callable[[str], None], answers: asyncio.Event,
    ) -> None:
        self._state, self._operators, self._others = state, operators, others
        self._announce, self._answers = announce, answers

    async def run(self) -> None:
        try:
            server = await asyncio.to_thread(importlib.import_module, "holdfast.agent.web.server")
            await server.serve(self._state, self._operators, self._others, self._announce,
                               self._answers.set)
        finally:
            self._answers.set()  # it failed, which is said: launchers are served all the same
