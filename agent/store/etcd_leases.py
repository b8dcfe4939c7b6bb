"""Who holds a lease in etcd: a run's, or the name of a node, which one agent alone may have.

Owns the value of such a key, and what is remembered of a lease of one's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from ..core.model import UNREADABLE

NAME_S = 30.0  # a node's name is another's so long after its agent was heard of last
NAME = "@"  # begins the lease of a node's name; no run's name does


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Value of lease/RUN, and of lease/@NODE, by which one agent alone has a node's name.  Its
    bytes tell one taking of the lease from every other."""

    node: str = ""
    agent: str = ""  # state folder and boot: the same agent, started anew, takes its lease over
    lease: str = ""
    host: str = ""  # for people, where two agents have one name


class Held(msgspec.Struct):
    """A lease of this node's."""

    id: str
    value: bytes
    until_boot_s: float


def holder_of(value: bytes) -> Holder:
    try:
        return msgspec.json.decode(value, type=Holder) if value else Holder()
    except UNREADABLE:
        return Holder()


def names_in(holders: Mapping[str, bytes]) -> frozenset[str]:
    """The nodes whose names are held."""
    return frozenset(holder_of(value).node for run, value in holders.items()
                     if run.startswith(NAME))


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
