"""What a fault puts in question, and whether a check that fails here fails everywhere at once.

Owns the checks of each scope of faults, and the question "may a node be refused for this check?".
A roll-out of a driver or a profile with a mistake makes every node fail in the same minutes, and no
node is to blame.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..model.settings import Settings
from ..nodes import breaker

OF_SCOPE = {  # scope of a fault's runbook -> the checks that the fault puts in question
    "gpu": ("devices", "accelerators", "tensor"), "neuron": ("devices", "accelerators"),
    "nic": ("network",), "node": ("hardware", "memory", "disk", "clock"),
}
# Checks that no child of the agent makes: the core's own, the store's and the launcher's.
NOT_A_ROUND = ("incidents", "drift", "paths")
TOGETHER = ("peers",)  # and those that several nodes make, and leave with each of them
Failing = Mapping[str, Mapping[str, float]]  # check -> node -> wall_s since when it fails there


def is_common(
    failing: Failing, check: str, fleet: int, wall_s: float, settings: Settings
) -> tuple[bool, str]:
    """(True = no node is refused for it, why).  Only failures that began within the window count
    together: what broke one by one over weeks is no roll-out."""
    if fleet < settings.breaker_nodes:
        return False, f"this node knows of {fleet}: whether {check} fails elsewhere is not known"
    since = failing.get(check, {})
    last_s = max(since.values(), default=wall_s)
    nodes = tuple(node for node, at_s in since.items()
                  if last_s - at_s <= settings.gate.window_s)
    return breaker.is_open({check: nodes}, check, fleet, settings)
