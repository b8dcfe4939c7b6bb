"""What this agent knows of every node: whether it may carry ranks, why not, how old its word is.

Owns the rows that `why NODE`, `exclude`, `drain` and `release` go by.  Pure but for reading the
agent's state.
"""

from __future__ import annotations

from typing import Any

from ..core.model import node_subject
from ..core.model.subject import NODE
from ..core.run.members import read_node
from ..daemon.state import AgentState

NODES_MAX = 4096


def names(state: AgentState) -> list[str]:
    """Every node that this agent has heard of, or has a document of."""
    observed = state.snapshot.observed
    found = {beat.node for beat in observed.beats}
    found |= {name for name, _ in observed.store.docs.of(NODE)}
    return sorted({*found, state.name})


def rows(state: AgentState) -> list[dict[str, Any]]:
    """What is known here of each node: how old its word is, whether it may carry ranks, and why
    not."""
    now, observed = state.snapshot.now, state.snapshot.observed
    docs = observed.store.docs
    said = {beat.node: beat for beat in observed.beats if not beat.run}
    found = []
    for name in names(state)[:NODES_MAX]:
        doc, beat = docs.decoded(node_subject(name), read_node), said.get(name)
        mine = name == state.name
        age_s = 0.0 if mine else round(now.boot_s - beat.boot_s, 3) if beat else None
        found.append({
            "node": name, "age_s": age_s, "fatal": beat.fatal if beat else "",
            "excluded": doc.excluded, "draining": doc.draining, "reason": doc.reason,
            "by": doc.by, "fault": doc.fault, "since_wall_s": doc.since_wall_s,
            "strikes": len(doc.strikes),
        })
    return found
