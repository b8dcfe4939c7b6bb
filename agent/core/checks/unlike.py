"""Whether a node's drivers and libraries are those of the other members of its run.

Owns which versions count, and the judgement.  Ranks that exchange through different versions hang,
or compute differently, long after the start.  A version that more than half of the members have is
the usual one; what a node does not tell is not held against it.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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


class Split(NamedTuple):
    """One version that a minority of the nodes does not share."""

    key: str
    most: str
    agree: int
    said: dict[str, str]  # node -> version, of those that tell it
    others: tuple[str, ...]  # the minority, by name


def unlike(node: str, members: Mapping[str, Identity], settings: Settings) -> Unlike:
    """`members`: what is known of this node and of those that it would train with."""
    own = members[node].sources.get(SOURCE, {}) if node in members else {}
    why, common = [], []
    for key, most, agree, said, others in _splits(own, members):
        if node not in said:
            continue
        is_open, counted = breaker.is_open({key: others}, key, len(said), settings)
        if is_open:
            common.append(counted)
        elif node in others:
            name = key.removeprefix(KIND)
            why.append(f"{name} is {said[node]}, and {agree} of {len(said)} nodes have {most}")
    return Unlike("; ".join(why), "; ".join(common))


def unlike_nodes(members: Mapping[str, Identity], settings: Settings) -> frozenset[str]:
    """Those of which `unlike` says a reason, at the cost of one look over all."""
    keys = {key for one in members.values() for key in one.sources.get(SOURCE, {})}
    return frozenset(
        name for key, _, _, said, others in _splits(keys, members)
        if not breaker.is_open({key: others}, key, len(said), settings)[0] for name in others)


def _splits(keys: Iterable[str], members: Mapping[str, Identity]) -> Iterator[Split]:
    for key in sorted(keys):
        if not key.startswith(KIND) or key in TOOLS:
            continue
        said = {name: found for name, one in members.items()
                if (found := one.sources.get(SOURCE, {}).get(key))}
        if not said:
            continue
        most, agree = Counter(said.values()).most_common(1)[0]
        if len(said) < agree * 2 and agree < len(said):
            others = tuple(sorted(name for name, found in said.items() if found != most))
            yield Split(key, most, agree, said, others)
