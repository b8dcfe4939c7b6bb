"""Keeps the gate before orders for the whole node up to date while an incident may lead to one.

Owns when it is looked at; what is looked at is agent/actions/preconditions.py's.
"""

from __future__ import annotations

import asyncio

from ...actions import preconditions
from ...actions.evidence_store import EvidenceStore
from ..state import AgentState

LOOK_S = 5.0  # between two looks
IDLE_S = 1.0


class NodeOrderGate:
    name = "node orders"

    def __init__(self, state: AgentState, evidence: EvidenceStore) -> None:
        self._state, self._evidence = state, evidence
        self.gate = preconditions.UNSEEN

    async def run(self) -> None:
        while True:
            wanted = preconditions.wanted(self._state)
            self.gate = (await preconditions.look(self._state, self._evidence) if wanted
                         else preconditions.UNSEEN)
            await asyncio.sleep(LOOK_S if wanted else IDLE_S)
