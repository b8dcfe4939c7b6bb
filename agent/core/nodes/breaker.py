"""The fleet-wide breaker: the same fault on many nodes at once is a common cause.

Owns the one question "may a node be taken out now?".  Pure; the incident that tells a person once
is opened by agent/core/node.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..model import Settings


def is_open(
    faults: Mapping[str, tuple[str, ...]], fault: str, fleet: int, settings: Settings
) -> tuple[bool, str]:
    """(True = stop acting, why).  `faults` maps a fault to the nodes that have it, or were
    excluded for it; `fleet` is how many nodes are known."""
    nodes = sorted(set(faults.get(fault, ())))
    share = settings.breaker_fraction * fleet
    if len(nodes) < settings.breaker_nodes or len(nodes) <= share:
        return False, f"{fault} on {len(nodes)} of {fleet} nodes"
    need = max(settings.breaker_nodes, math.floor(share) + 1)
    listed = ", ".join(nodes[:8])
    return True, f"{fault} on {len(nodes)} of {fleet} nodes ({listed}), {need} open the breaker"
