"""Which nodes test a link with which: a first round over all, a second one that finds the culprit.

Owns the schedule of pair tests.  A round is a row of slots; within a slot no node stands twice, so
that all pairs of a slot run at once and do not disturb each other.  What the results mean is
judge.py's.  Pure.

The idea of two rounds is DLRover's and Google's cluster-health-scanner's: whoever failed is tested
again with nodes that passed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Pair = tuple[str, str]  # in the order of their names
Slot = tuple[Pair, ...]
Round = tuple[Slot, ...]

EVERY_LINK_MAX = 16  # nodes up to which the first round tests every link: 15 slots
WITNESSES = 2  # good nodes that each suspect is tested with; see judge.py for why one is too few


def pair(a: str, b: str) -> Pair:
    return (a, b) if a < b else (b, a)


def first_round(nodes: Sequence[str]) -> Round:
    """Every link where there are few nodes; of many, the links of a ring in the order given.

    The order should be that of the job's ranks: then these are the links its collectives use.
    Raises ValueError for a name given twice.
    """
    names = list(nodes)
    if len(set(names)) != len(names):
        raise ValueError("a node is named twice: name each once")
    if len(names) < 2:
        return ()
    return _every_link(names) if len(names) <= EVERY_LINK_MAX else _ring(names)


def _every_link(names: list[str]) -> Round:
    """The circle method: one place stays, the others turn; an odd one out rests for a slot."""
    places: list[str | None] = [*names] if len(names) % 2 == 0 else [*names, None]
    half, slots = len(places) // 2, []
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]))
        slots.append(tuple(pair(a, b) for a, b in facing if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return tuple(slots)


def _ring(names: list[str]) -> Round:
    """Each node with its neighbour on either side; a ring of odd length needs a third slot."""
    links = [pair(a, b) for a, b in zip(names, [*names[1:], names[0]])]
    slots = [tuple(links[0 : len(links) - len(links) % 2 : 2]), tuple(links[1::2])]
    if len(links) % 2:
        slots.append((links[-1],))
    return tuple(slots)


def second_round(suspects: Iterable[str], good: Collection[str], tested: Collection[Pair]) -> Round:
    """Each suspect with `WITNESSES` good nodes, over links not tested yet where there are such.

    Without any good node the suspects are tested among each other, over links not tested yet: one
    of these may pass, and prove two of them.
    """
    asked = sorted(set(suspects))
    wanted: list[Pair] = []
    witnesses, load = sorted(good), dict.fromkeys(good, 0)
    for suspect in asked:
        order = sorted(witnesses, key=lambda w: (pair(suspect, w) in tested, load[w], w))
        for witness in order[:WITNESSES]:
            load[witness] += 1
            wanted.append(pair(suspect, witness))
    if not witnesses:
        every = (pair(a, b) for i, a in enumerate(asked) for b in asked[i + 1 :])
        wanted = [each for each in every if each not in tested][: len(asked) * WITNESSES]
    return slots_of(wanted)


def slots_of(pairs: Iterable[Pair]) -> Round:
    """Pairs put into slots so that no node stands twice in one: first fit."""
    slots: list[tuple[list[Pair], set[str]]] = []
    for a, b in dict.fromkeys(pairs):
        for taken, busy in slots:
            if a not in busy and b not in busy:
                taken.append((a, b))
                busy.update((a, b))
                break
        else:
            slots.append(([(a, b)], {a, b}))
    return tuple(tuple(taken) for taken, _ in slots)
