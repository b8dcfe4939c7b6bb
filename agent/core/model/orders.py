"""NodeOrder: a verb that leaves for the node's root unit; Gate: what stands before it; RemoveLock.

Owns the value that crosses from the core to the edge when a node is drained, rebooted or replaced
or one of its GPUs is reset, and the one that says what stands before it.  A leaf, so that model.py
may use it.
"""

from __future__ import annotations

import msgspec


class NodeOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="node"):
    """`verb` is one of drain, reboot, replace, reset_gpu: the unit knows no other.  `incident` is
    why, and is written to evidence.store before.  `device` is the address on PCI of what is reset,
    as 0000:4e:00.0, and `cures` the incidents of it that are over then; for no other verb."""

    verb: str
    node: str
    incident: str
    reason: str
    device: str = ""
    cures: tuple[str, ...] = ()


class RemoveLock(msgspec.Struct, frozen=True, omit_defaults=True, tag="unlock"):
    """A launcher takes this file away, when it still finds it to be a stale lock of its user."""

    run: str
    path: str


class Gate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found at the node's edge, so that nothing is ended for an order that cannot leave,
    nor under the hands of somebody whom this agent does not serve."""

    closed: str = ""  # why no order could leave now
    seen: tuple[tuple[int, str], ...] = ()  # (pid, device) as drivers said last; these still live
    ours: tuple[int, ...] = ()  # of those: they descend from our runs' launchers, or are its ranks
    gone: tuple[int, ...] = ()  # as drivers say still; these live no more
    others: tuple[str, ...] = ()  # sockets of other agents here, which serve runs of their own
