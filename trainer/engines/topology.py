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

DOMAIN = "nvlink_domain"  # inside of one, links are as fast as inside a node
# Of the labels that agents give their nodes, those that say where one is: the widest first.
LEVELS = ("efa_group", "rack", "rail", DOMAIN)
Parts = tuple[str, ...]


def divisors(world: int) -> list[int]:
    return [size for size in range(1, world + 1) if world % size == 0]


def labels(given: Mapping[str, Any], members: Sequence[Member]) -> list[str]:
    """By rank: what it is in whose links are fast.  [topology] names a rank's number or a node;
    without it, that is the NVLink domain among the labels of the nodes' agents, or the node.

    Raises ConfigError as a run starts in which [topology] leaves a rank out.  In one that goes on,
    a node that came later is one of its own: no setting is worth what was trained."""
    missing = unlabelled(given, members)
    if given and missing and not goes_on(members):
        raise ConfigError([
            f"topology: no label for node {', '.join(missing[:8])}: set topology.NODE or "
            "topology.RANK for each, or none at all"])
    if not given:
        return ["/" + "/".join(parts) if (member.labels or {}).get(DOMAIN) else member.node
                for member, parts in zip(members, _parts(members))]
    return [str(given.get(str(rank), given.get(member.node, member.node)))
            for rank, member in enumerate(members)]


def places(given: Mapping[str, Any], members: Sequence[Member]) -> list[Parts]:
    """By rank: what it is in, the widest first.  Parts that are wider than an NVLink domain say who
    is nearer, not that links are fast.  A node without labels is in parts of its own.  Raises
    ConfigError as `labels` does."""
    if given:
        return [(label,) for label in labels(given, members)]
    return [(*(parts if any(parts) else (member.node,) * len(parts)), member.node)
            for member, parts in zip(members, _parts(members))]


def kinds(members: Sequence[Member]) -> list[str]:
    """The kinds of labels of the nodes' agents that say anything.  One that is the same wherever it
    is known tells no node from another: an agent that has yet to learn its own, as on EC2, makes no
    stranger of its node."""
    known = {level: {member.labels.get(level, "") for member in members if member.labels} - {""}
             for level in LEVELS}
    return [level for level in LEVELS if len(known[level]) > (level != DOMAIN)]


def _parts(members: Sequence[Member]) -> list[Parts]:
    """By rank: its node's labels of these kinds, "" where it has none of one."""
    levels = kinds(members)
    return [tuple((member.labels or {}).get(level, "") for level in levels) for member in members]


def unlabelled(given: Mapping[str, Any], members: Sequence[Member]) -> list[str]:
    """The ranks that [topology], or else the nodes' agents, leave out where they name any: each by
    its node and number."""
    named = ([str(rank) in given or member.node in given for rank, member in enumerate(members)]
             if given else [any(parts) for parts in _parts(members)])
    return [f"{member.node or 'of no name'} (rank {rank})" for rank, member in enumerate(members)
            if not named[rank] and (given or any(named))]


def goes_on(members: Sequence[Member]) -> bool:
    """Whether one of them has trained in this run."""
    return any(member.held for member in members)


def source(given: Mapping[str, Any]) -> str:
    """Whose labels these are."""
    return "[topology]" if given else "the nodes' agents"


def words(given: Mapping[str, Any], members: Sequence[Member]) -> str:
    """For the layout's words: whose labels were taken, and who goes without one; "" where none
    says anything."""
    found = kinds(members)
    if not given and not found:
        return ""
    missing = unlabelled(given, members)
    said = f"; labels of {source(given)}" + ("" if given else f" ({', '.join(found)})")
    if not missing:
        return said
    return f"{said}, none for node {', '.join(missing[:8])}: near no other node"


def near_first(places: Sequence[Sequence[str]], size: int) -> list[Ranks]:
    """Groups of `size` ranks, those of one place together as far as they fill groups.

    Whole groups of the narrowest parts come first, then of what is left over those of the next
    wider ones; what is left over of all is filled up in the order of their places.
    """
    groups: list[Ranks] = []
    left = list(range(len(places)))
    for depth in range(len(places[0]), -1, -1):
        parts: dict[Sequence[str], list[int]] = {}
        for rank in left:
            parts.setdefault(places[rank][:depth], []).append(rank)
        left = []
        for ranks in parts.values():
            whole = len(ranks) - len(ranks) % size
            groups += [tuple(sorted(ranks[first : first + size]))
                       for first in range(0, whole, size)]
            left += ranks[whole:]
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


def ranks_a_hop(
    given: Mapping[str, Any], members: Sequence[Member], groups: Sequence[Ranks]
) -> int:
    """As `ranks_a_label`; by node where groups span NVLink domains, and not alike, as after one has
    lost a node: inside a node links are fast all the same."""
    found = labels(given, members)
    near = ranks_a_label(found, groups)
    spans = any(len({found[rank] for rank in ranks}) > 1 for ranks in groups)
    if near > 1 or given or not spans:
        return near
    return ranks_a_label([member.node for member in members], groups)


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
