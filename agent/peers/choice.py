"""Which of the other agents this one keeps a connection to.

Owns the choice alone: all of the nodes that share a run with this one, and of the others so many
that they tell how the fleet is and see each other die.  Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

NEIGHBOURS_MAX = 256  # of the nodes that share no run with this one
LINES_MAX = 2048  # of those that do: docs/scale.md says what so many cost
ALL_NEAR = 8  # with so many connections or fewer each is near
NEAR = 4  # of more: these are, half of them to either side


class Choice(NamedTuple):
    """Names of other nodes."""

    wanted: frozenset[str]
    left_out: int = 0  # that share no run with this one
    missing: int = 0  # that do, and are one too many


def choice(own: str, known: Collection[str], mates: Collection[str]) -> Choice:
    """`known`: every node with an address.  `mates`: those that share a run with node `own`.

    Neighbours are those whose names are next to the own one, of all names in a ring: so each is
    its neighbours' neighbour, which a detector of silence needs, and those who watch one node
    watch one another.
    """
    others = sorted(one for one in known if one != own)
    sharing = [one for one in others if one in mates]
    wanted = set(sharing[:LINES_MAX])
    around = beside(own, others, NEIGHBOURS_MAX)
    missing = frozenset(sharing[LINES_MAX:])
    wanted.update(one for one in around if one not in missing)
    left_out = len(others) - len(wanted) - len(missing)
    return Choice(frozenset(wanted), left_out, len(missing))


def near(own: str, others: Collection[str]) -> Collection[str]:
    """Whom of those that it is connected to a node speaks to often: by these others its loss is
    known first.  Of a whole rack that is lost those in the middle have none left."""
    return others if len(others) <= ALL_NEAR else beside(own, sorted(others), NEAR)


def beside(own: str, others: Sequence[str], most: int) -> Sequence[str]:
    """Those next to `own` among `others`, which are sorted names in a ring."""
    if len(others) <= most:
        return others
    at, half = bisect_left(others, own), most // 2
    return [others[place % len(others)] for place in range(at - half, at + half)]
