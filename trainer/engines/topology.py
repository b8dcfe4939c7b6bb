"""Which ranks are near one another, and what the groups that follow from it send over slow links.

Owns the order of ranks by their labels, and which of a group's ranks holds which shard.  Pure:
every rank comes to the same groups.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import ConfigError
from .strategy import IN_ORDER, Member, Ranks


def divisors(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def labels(given: Mapping[str, Any], members: Sequence[Member]) -> list[str]:
    """By rank: where it is.  [topology] names a rank's number or a node; without it, the node.

    Raises ConfigError as a run starts in which a rank has none.  In one that goes on, a node that
    came later is one of its own: no setting is worth what was trained."""
    missing = unlabelled(given, members)
    if missing and not goes_on(members):
        raise ConfigError([
            f"topology: no label for node {', '.join(missing[:8])}: set topology.NODE or "
            "topology.RANK for each, or none at all"])
    return [str(given.get(str(rank), given.get(member.node, member.node)))
            for rank, member in enumerate(members)]


def unlabelled(given: Mapping[str, Any], members: Sequence[Member]) -> list[str]:
    """The ranks that [topology] leaves out, where it names any: each by its node and number."""
    return [f"{member.node or 'of no name'} (rank {rank})" for rank, member in enumerate(members)
            if given and str(rank) not in given and member.node not in given]


def goes_on(members: Sequence[Member]) -> bool:
    """Whether one of them has trained in this run."""
    return any(member.held for member in members)


def strangers(given: Mapping[str, Any], members: Sequence[Member]) -> str:
    """For the layout's words: who goes without a label in a run that goes on."""
    missing = unlabelled(given, members)
    if not missing or not goes_on(members):
        return ""
    return f"; [topology] has no label for node {', '.join(missing[:8])}: near no other node"


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


def apart(
    groups: Sequence[Ranks], members: Sequence[Member], first: int = 0, shards: int = 0
) -> list[Ranks]:
    """The same groups, each in the order of its ranks' shards: number `first` of `shards` and
    those that follow it.

    A rank keeps what it holds.  Beyond that no shard has all its copies on one node where the order
    can help it: who loses that node would lose the shard.  As few ranks as can be leave their place
    for it, and of those that hold a shard none does that is the last."""
    size = len(groups[0])
    if not IN_ORDER or any(member.held is None for member in members):
        return list(groups)
    nodes = [member.node for member in members]
    made = [list(ranks) for ranks in groups]
    _spread(made, nodes, {})
    keeps = {rank: member.held[0] - first for rank, member in enumerate(members)
             if member.held and member.held[1] == shards and 0 <= member.held[0] - first < size}
    if len({*keeps.values()}) == size:  # else nobody goes on with what it holds
        for ranks in made:
            _keep_seats(ranks, keeps)
        _spread(made, nodes, keeps)
    return [tuple(ranks) for ranks in made]


def _keep_seats(ranks: list[int], keeps: Mapping[int, int]) -> None:
    """Whoever keeps a shard has its place, the others theirs or what is free."""
    seats = dict[int, int]()
    for rank in ranks:
        if rank in keeps:
            seats.setdefault(keeps[rank], rank)
    for shard, rank in enumerate(ranks):
        if rank not in seats.values():
            seats.setdefault(shard, rank)
    left = iter([rank for rank in ranks if rank not in seats.values()])
    ranks[:] = [seats[shard] if shard in seats else next(left) for shard in range(len(ranks))]


def _spread(made: list[list[int]], nodes: Sequence[str], keeps: Mapping[int, int]) -> None:
    """Has two ranks of a group change places for each shard whose copies are all on one node.  One
    change is enough: another shard has two copies elsewhere, or the other nodes have too few ranks.
    """
    size = len(made[0])
    keepers = Counter(shard for ranks in made for shard, rank in enumerate(ranks)
                      if keeps.get(rank) == shard)

    def kept(rank: int, shard: int) -> bool:
        return keeps.get(rank) == shard

    for shard in range(size):
        node = nodes[made[0][shard]]
        if any(nodes[ranks[shard]] != node for ranks in made):
            continue
        found = [
            (kept(ranks[shard], shard) + kept(ranks[other], other), number, other)
            for other in range(size)
            if sum(nodes[ranks[other]] != node for ranks in made) > 1
            for number, ranks in enumerate(made)
            if nodes[ranks[other]] != node
            and all(keepers[at] > 1 for at in (shard, other) if kept(ranks[at], at))]
        if not found:
            continue
        _, number, other = min(found)
        ranks = made[number]
        keepers.subtract(at for at in (shard, other) if kept(ranks[at], at))
        ranks[shard], ranks[other] = ranks[other], ranks[shard]


def exposed(copies: Sequence[Ranks], members: Sequence[Member]) -> str:
    """For the layout's words: how many shards a lost node takes with it, copies and all."""
    if len(copies[0]) < 2 or len({member.node for member in members}) < 2:
        return ""
    number = sum(len({members[rank].node for rank in ranks}) == 1 for ranks in copies)
    return f"; {number} shard(s) with all copies on one node" if number else ""


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
