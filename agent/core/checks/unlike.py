"""Whether a node's drivers and libraries are those of the other members of its run.

Owns which versions count, and the judgement.  Ranks that exchange through different versions hang,
or compute differently, long after the start.  A version that more than half of the members have is
the usual one; what a node does not tell is not held against it.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ..model import Settings
from ..nodes import breaker
from ..nodes.identity import Identity

DRIFT = "drift"
SOURCE, KIND = "node", "software."
TOOLS = frozenset(("software.dcgm", "software.neuron_tools"))  # no rank loads them


class Unlike(NamedTuple):
    """`why`: what differs here, "" for nothing; `common`: what differs on too many nodes to be the
    fault of any."""

    why: str = ""
    common: str = ""


def unlike(node: str, members: Mapping[str, Identity], settings: Settings) -> Unlike:
    """`members`: what is known of this node and of those that it would train with."""
    own = members[node].sources.get(SOURCE, {}) if node in members else {}
    why, common = [], []
    for key, value in sorted(own.items()):
        if not key.startswith(KIND) or key in TOOLS or not value:
            continue
        said = {name: found for name, one in members.items()
                if (found := one.sources.get(SOURCE, {}).get(key))}
        most, agree = Counter(said.values()).most_common(1)[0]
        if agree * 2 <= len(said) or agree == len(said):
            continue
        others = tuple(sorted(name for name, found in said.items() if found != most))
        is_open, counted = breaker.is_open({key: others}, key, len(said), settings)
        if is_open:
            common.append(counted)
        elif value != most:
            name = key.removeprefix(KIND)
            why.append(f"{name} is {value}, and {agree} of {len(said)} nodes have {most}")
    return Unlike("; ".join(why), "; ".join(common))
