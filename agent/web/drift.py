"""What nodes are made of and where they differ, as plain JSON values.

Owns which nodes are asked about: those of a run's plan, or every node that the store knows.  The
comparison itself is in agent/core/nodes/identity.py.  Pure but for reading the agent's state.
"""

from __future__ import annotations

from typing import Any

from ..core.nodes import identity
from ..daemon.state import AgentState

NODES_MAX = 4096


def drift(state: AgentState, run: str) -> dict[str, Any]:
    """GET /api/v1/drift: nodes, where they differ from most, and what changed on each."""
    docs = state.snapshot.observed.store.docs
    documents = {
        doc.key.removeprefix(identity.PREFIX): found
        for doc in docs if doc.key.startswith(identity.PREFIX)
        and (found := identity.read(doc)) is not None}
    nodes = members(state, run) if run else sorted({*documents, state.name})
    return identity.answer(state.name, run, nodes[:NODES_MAX], documents)


def members(state: AgentState, run: str) -> list[str]:
    """The nodes of a run's plan, spares included; this one alone while there is no plan."""
    plans = (plan for plan in state.snapshot.decision.plans if plan.run == run)
    found = {node for plan in plans for node in (*plan.members, *plan.spares)}
    return sorted({*found, state.name})
