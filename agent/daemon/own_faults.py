"""Faults of the agent itself, which only its shell can see.

Owns these verdicts, which join those of the core.  They are shown, never acted on.
"""

from __future__ import annotations

import time

from ..core.model import DEGRADED, UNKNOWN, WARN, Verdict, node_subject
from .state import AgentState


def verdicts(state: AgentState) -> tuple[Verdict, ...]:
    found = []
    if not state.reload_ok:
        found.append(Verdict(
            "agent_config_bad", node_subject(state.name), WARN, 1.0,
            f"reload refused: {state.reload_error[:300]}", detector="config"))
    for health in state.runner.health() if state.runner is not None else ():
        if not health.up and not health.absent and health.read_s:
            found.append(Verdict(
                "collector_failed", node_subject(state.name, f"collector/{health.name}"), UNKNOWN,
                1.0, f"collector {health.name}: {health.error}", detector="collectors"))
    now_s = time.monotonic()
    for child in state.stuck_children():
        found.append(Verdict(
            "probe_stuck", node_subject(state.name, f"probe/{child.name}"), DEGRADED, 1.0,
            f"probe {child.name} (pid {child.pid}) cannot be ended: it hangs in {child.wchan} "
            f"since {now_s - child.since_s:.0f} s", detector="probes"))
    return tuple(found)
