"""When a world that may be larger grows: once with all that come, not once for each of them.

Owns how long a run that trains waits for one more node.  Each growth interrupts all of its ranks,
and nodes that were lost together come back one after the other.  A node that comes and goes keeps
the others waiting no longer than LIMIT_S.  Starts and recoveries take whoever is there, and never
ask.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...model import Value

QUIET_S = 5.0  # behind the last node that came: what lost power together is back within moments
# Since the world could first have been larger.  The checks before a start take less on most nodes;
# whoever takes longer is a growth of its own.
LIMIT_S = 30.0


class Growth(Value, frozen=True):
    """The nodes with which the world would be larger now."""

    nodes: tuple[str, ...] = ()
    since_boot_s: float = 0.0  # since when there are any
    newest_boot_s: float = 0.0  # when the last of them came


NONE = Growth()


def seen(before: Growth, nodes: Iterable[str], now_s: float) -> Growth:
    """The growth after a look at the nodes that can be taken now."""
    names = tuple(sorted(nodes))
    if not names:
        return NONE
    since_s = before.since_boot_s if before.nodes else now_s
    came = not set(names) <= set(before.nodes)
    return Growth(names, since_s, now_s if came else before.newest_boot_s)


def wait_s(found: Growth, comes: bool, now_s: float) -> float:
    """Seconds for which the world still waits for one more node, 0.0 = it grows now.  `comes`:
    one is there whose own checks are not through."""
    until_s = found.since_boot_s + LIMIT_S
    if not comes:
        until_s = min(until_s, found.newest_boot_s + QUIET_S)
    return max(0.0, until_s - now_s)
