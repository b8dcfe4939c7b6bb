"""Which nodes carry a run's ranks, slot by slot: who stays, who follows, how many there are.

Owns the size of a world and the order of its nodes.  Survivors keep their slots, so that their
processes live on; what is free goes next to its neighbours by the labels of the network.  Pure, and
linear in the nodes but for the slots that are to be filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import eq

from ..model import LEVELS, MODEL, Labels, Plan, Value
from ..nodes.labels import LABEL_MAX

WAITING = "waiting for nodes"  # how the reason begins where there are too few
HELD_SHOWN = 4  # nodes that their own gates or models keep out, in that reason
WEIGHED_MAX = 100_000  # pairs of a slot and a free node: beyond, neighbours follow by their labels
WRITTEN_MAX = 200_000  # bytes of a plan for labels; the store takes 1 MB, and ranks need most
Place = tuple[str, ...]  # a node's label at each level of the network, the widest first


class Member(Value, frozen=True):
    """A node that may carry ranks of the run, as the leader sees it now."""

    node: str
    fresh: bool  # heard of lately; not fresh and not lost = unknown
    lost: bool = False  # silent beyond the lease and its margin, or known to be gone
    fatal: str = ""  # name of a fatal fault there
    excluded: bool = False
    draining: bool = False  # excluded as soon as its ranks have somewhere to go
    labels: Labels = ()
    nproc: int = 0  # ranks that its launcher starts; 0 = as the leader's
    held: str = ""  # what its own gate has against it; "" = it passed
    node_rank: int = -1  # the slot that its caller asked for; -1 = any

    @property
    def is_fit(self) -> bool:
        """Only a node that is heard of, without a fatal fault, not excluded, and that passed its
        own gate, gets ranks."""
        return self.fresh and not (self.lost or self.fatal or self.excluded or self.held)


class World(Value, frozen=True):
    """What a run asks of its nodes."""

    least: int = 1  # with so many it goes on
    most: int = 1
    unit: int = 1  # so many live and move together
    mixed: bool = False  # different models of accelerators may be one world


def arranged(
    world: World, members: Sequence[Member], before: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    """(the nodes by slot, why) or ((), why not).  `before`: the slots of the present world.  A node
    that is to be drained carries ranks only where there is no world without it."""
    made, why = without_drained(world, members, before)
    if not made and any(m.draining for m in members):
        made, why = _arranged(world, [m for m in members if m.is_fit], before)
    if made:
        return made, why
    held = [f"; {m.node}: {_against(m)}" for m in members if m.fresh and _against(m)]
    return made, why + "".join(held[:HELD_SHOWN])


def _against(member: Member) -> str:
    """What keeps a node that is heard of out of a world; "" = nothing."""
    if member.fatal:
        return f"{member.fatal} is open there"
    return "excluded" if member.excluded else member.held


def without_drained(
    world: World, members: Sequence[Member], before: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    """The same of the nodes that nobody wants to be empty."""
    return _arranged(world, [m for m in members if m.is_fit and not m.draining], before)


def _arranged(
    world: World, members: Sequence[Member], before: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    fit, others = _same_model(world, members, before)
    size = min(world.most, len(fit))
    size -= size % world.unit
    need = world.least + -world.least % world.unit
    if size < need:
        return (), f"{WAITING}: {len(fit)} of {need} can take ranks{others}"
    units = _units(world, before, fit)
    slots = _kept(units, size // world.unit, world.unit)
    taken = {node for unit in slots for node in unit if node}
    free = [node for node in sorted(fit) if node not in taken]
    if not taken:
        asked = {m.node: m.node_rank for m in members if m.node in fit and m.node_rank >= 0}
        if asked:
            return _as_asked(free, size, asked), "new"
        chosen = _near(free, size, fit)
        return tuple(node for unit in _packed(chosen, world.unit, fit) for node in unit), "new"
    return _filled(slots, free, fit), "every slot has a node"


def _as_asked(free: Sequence[str], size: int, asked: Mapping[str, int]) -> tuple[str, ...]:
    """A first world in the order that its caller gave the nodes; the others fill it by name."""
    slots = [""] * size
    for node in free:
        place = asked.get(node, size)
        if place < size and not slots[place]:
            slots[place] = node
    rest = (node for node in free if node not in slots)
    return tuple(node or next(rest) for node in slots)


def _same_model(
    world: World, members: Sequence[Member], before: Sequence[str]
) -> tuple[dict[str, Place], str]:
    """Node -> place of those whose accelerators are one model, and what is said of the others.  The
    model of who is in the world already counts first; a node that tells none fits to all."""
    places = {m.node: _place(m.labels) for m in members}
    models = {m.node: dict(m.labels).get(MODEL, "") for m in members}
    inside = [models[node] for node in before if models.get(node)]
    known = Counter(inside or [model for model in models.values() if model])
    if world.mixed or not known:
        return places, ""
    most = max(sorted(known), key=lambda model: known[model])
    other = sorted(node for node, model in models.items() if model not in ("", most))
    if not other:
        return places, ""
    same = {node: place for node, place in places.items() if models[node] in ("", most)}
    named = [f"{node} has {models[node]}" for node in other[:HELD_SHOWN]]
    more = len(other) - len(named)
    named += [f"{more} more have others"] if more else []
    return same, (f"; {', '.join(named)} where the others have {most}, and a mixed world is not "
                  "allowed (--allow-mixed)")


def _place(labels: Labels) -> Place:
    found = dict(labels)
    return tuple(found.get(level, "") for level in LEVELS)


def labelled(
    members: Iterable[Member], nodes: Sequence[str]
) -> tuple[tuple[Labels, tuple[str, ...]], ...]:
    """For a plan: where these nodes are in the network, those of one place together, so that a
    rack's labels are written once.  () where none has labels, or where there is so much of them
    that the store might refuse the document: near nodes are worth less than a plan."""
    found: dict[Labels, list[str]] = {}
    told: dict[Labels, list[str]] = {}  # a node's own labels, of whichever order and kinds
    known = {m.node: m.labels for m in members}
    for node in nodes:
        own = known.get(node, ())
        if own not in told:
            labels = tuple((level, text) for level, text in zip(LEVELS, _place(own))
                           if 0 < len(text) <= LABEL_MAX)
            told[own] = found.setdefault(labels, []) if labels else []
        told[own].append(node)
    written = sum(len(level) + len(text) + 6 for labels in found for level, text in labels)
    if written + len("','".join(nodes)) * bool(found) > WRITTEN_MAX:
        return ()
    return tuple((labels, tuple(those)) for labels, those in found.items())


def labels_at(plan: Plan, node: str) -> Labels | None:
    """A node's by the plan; None where the plan knows of nobody's."""
    if not plan.labels:
        return None
    return next((labels for labels, those in plan.labels if node in those), ())


def _units(world: World, before: Sequence[str], fit: Mapping[str, Place]) -> list[list[str]]:
    """The present slots by unit, "" where a node is missing, and empty ones up to the most."""
    slots = [node if node in fit else "" for node in before]
    slots += [""] * max(0, world.most - world.most % world.unit - len(slots))
    slots += [""] * (-len(slots) % world.unit)
    return [slots[at:at + world.unit] for at in range(0, len(slots), world.unit)]


def _kept(units: list[list[str]], count: int, unit: int) -> list[list[str]]:
    """The `count` units with the fewest nodes missing: where they are, and the rest of them in the
    places of those that are given up.  A smaller world thus moves as few survivors as can be."""
    order = set(sorted(range(len(units)), key=lambda at: (units[at].count(""), at))[:count])
    slots = [units[at] if at in order else [] for at in range(count)]
    moved = iter(sorted(at for at in order if at >= count))
    return [list(one) if one else list(units[next(moved)]) for one in slots]


def _filled(
    slots: list[list[str]], free: list[str], fit: Mapping[str, Place]
) -> tuple[str, ...]:
    """Each missing node by the free one that is nearest to its unit, or to the slot before."""
    last, missing = "", sum(unit.count("") for unit in slots)
    if missing * len(free) > WEIGHED_MAX:
        order = iter(sorted(free, key=lambda node: (fit[node], node)))
        return tuple(node or next(order) for unit in slots for node in unit)
    for unit in slots:
        for at, node in enumerate(unit):
            if not node:
                mates = [one for one in unit if one] or [one for one in (last,) if one]
                node = max(free, key=lambda one: _shared(fit[one], [fit[m] for m in mates]))
                free.remove(node)
                unit[at] = node
            last = node
    return tuple(node for unit in slots for node in unit)


def _shared(place: Place, others: Iterable[Place]) -> int:
    """At how many levels a place is that of others."""
    return sum(sum(map(eq, place, other)) for other in others)


def _near(free: Sequence[str], count: int, fit: Mapping[str, Place]) -> list[str]:
    """So many nodes that share the narrowest part of the network that holds them all; of several
    such parts the smallest, so that larger ones stay whole."""
    for depth in range(len(LEVELS), -1, -1):
        groups: dict[Place, list[str]] = {}
        for node in free:
            groups.setdefault(fit[node][:depth], []).append(node)
        large = [key for key, nodes in groups.items() if len(nodes) >= count]
        if large:
            best = min(large, key=lambda key: (len(groups[key]), key))
            return sorted(groups[best], key=lambda node: (fit[node], node))[:count]
    return []


def _packed(nodes: Iterable[str], unit: int, fit: Mapping[str, Place]) -> list[list[str]]:
    """The nodes in units, each within as narrow a part of the network as can be, neighbours beside
    each other."""
    found: list[list[str]] = []
    left = sorted(nodes, key=lambda node: (fit[node], node))
    for depth in range(len(LEVELS), -1, -1):
        groups: dict[Place, list[str]] = {}
        for node in left:
            groups.setdefault(fit[node][:depth], []).append(node)
        left = []
        for group in groups.values():
            whole = len(group) - len(group) % unit
            found += [group[at:at + unit] for at in range(0, whole, unit)]
            left += group[whole:]
    return sorted(found, key=lambda one: (fit[one[0]], one[0]))
