"""Which ranks are near one another, and what the groups that follow from it send over slow links.

Owns the order of ranks by their labels.  Pure: every rank comes to the same groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import ConfigError
from .strategy import Member, Ranks


def divisors(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def labels(given: Mapping[str, Any], members: Sequence[Member]) -> list[str]:
    """By rank: where it is.  [topology] names a rank's number or a node; without it, the node."""
    if not given:
        return [member.node for member in members]
    found, missing = [], []
    for rank, member in enumerate(members):
        label = given.get(str(rank), given.get(member.node))
        found.append(str(label))
        if label is None:
            missing.append(f"{member.node or 'of no name'} (rank {rank})")
    if missing:
        raise ConfigError([
            f"topology: no label for node {', '.join(missing[:8])}: set topology.NODE or "
            "topology.RANK for each, or none at all"])
    return found


def near_first(labels: Sequence[str], size: int) -> list[Ranks]:
    """Groups of `size` ranks, those of one label together as far as they fill groups.

    Whole groups of one label come first; what is left over of each is filled up in label order.
    """
    by_label: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        by_label.setdefault(label, []).append(rank)
    groups: list[Ranks] = []
    left: list[int] = []
    for label in sorted(by_label, key=lambda label: by_label[label][0]):
        ranks = by_label[label]
        whole = len(ranks) - len(ranks) % size
        groups += [tuple(ranks[first : first + size]) for first in range(0, whole, size)]
        left += ranks[whole:]
    groups += [tuple(sorted(left[first : first + size])) for first in range(0, len(left), size)]
    return sorted(groups)


def ranks_a_label(labels: Sequence[str], groups: Sequence[Ranks]) -> int:
    """How many ranks of one label stand side by side in every group; 1 where it is not as many
    each time, or where no group spans labels: one hop is all there is to do then."""
    sizes = set[int]()
    for ranks in groups:
        runs = [(label, len(list(run)))
                for label, run in itertools.groupby(ranks, key=lambda rank: labels[rank])]
        if len(runs) < 2 or len({label for label, _ in runs}) < len(runs):
            return 1
        sizes.update(number for _, number in runs)
    return sizes.pop() if len(sizes) == 1 else 1


def slow_bytes(
    labels: Sequence[str], groups: Sequence[Ranks], weights: int, micro_steps: int,
    gathers: int = 2, near: int = 1,
) -> int:
    """Bytes that the busiest rank sends to ranks of another label in one step."""
    return int(max(sent_far(labels, groups, weights, micro_steps, gathers, near)))


def sent_far(
    labels: Sequence[str], groups: Sequence[Ranks], weights: int, micro_steps: int,
    gathers: int = 2, near: int = 1,
) -> list[float]:
    """By rank: bytes that it sends to ranks of another label in one step, as counted from the
    algorithms: a ring for all-gather (`gathers` a micro-step: for the forward pass and for the
    backward pass) and all-reduce (once a step), direct sends for reduce-scatter (once a
    micro-step).  An all-gather in two hops is a ring of every `near`-th rank."""
    size, sent = len(groups[0]), [0.0] * len(labels)
    part = weights / size
    for ranks in groups:
        for place, rank in enumerate(ranks):
            after = ranks[(place + near) % size]
            far = sum(labels[rank] != labels[other] for other in ranks)
            sent[rank] += micro_steps * part * far
            if labels[after] != labels[rank]:
                sent[rank] += micro_steps * gathers * (size // near - 1) * part
    copies = len(groups)
    for shard in range(size):
        ranks = tuple(sorted(group[shard] for group in groups))
        for place, rank in enumerate(ranks):
            if labels[ranks[(place + 1) % copies]] != labels[rank]:
                sent[rank] += 2 * (copies - 1) / copies * part
    return sent
