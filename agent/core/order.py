"""NodeOrder: a verb that leaves for the node's root unit.

Owns the value that crosses from the core to the edge when a node is drained, rebooted or replaced.
A leaf, so that model.py may use it.
"""

from __future__ import annotations

import msgspec


class NodeOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="node"):
    """`verb` is one of drain, reboot, replace: the unit knows no other.  `incident` is why, and is
    written to evidence.store before."""

    verb: str
    node: str
    incident: str
    reason: str
