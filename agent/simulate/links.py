"""Faults of a storm on the ways between nodes and to the store: cut, flapping, or leading nowhere.

Owns which ways nothing passes, and when, by the fault's own numbers alone: the same seed makes the
same links whatever the system under test does meanwhile.
"""

from __future__ import annotations

import random
from functools import partial

from .cluster import Cluster
from .store import OWN_ID

DOWN_S, UP_S = (0.2, 3.5), (0.3, 4.0)  # from too short to be noticed to longer than a lease
LASTS_S = (10.0, 35.0)


def pick_node(cluster: Cluster, u: float) -> str:
    """A node's name, chosen by `u`."""
    names = list(cluster.machines)
    return names[int(u * len(names))]


def cut_from_store(cluster: Cluster, u: float, v: float) -> None:
    """One node and the store; both ways, or only requests, or only answers."""
    name = pick_node(cluster, u)
    ways = {(name, "store"), ("store", name)}
    if v < 0.6:
        ways = {(name, "store")} if v < 0.3 else {("store", name)}
    cluster.cut(ways, 2.0 + 14.0 * v)


def isolate(cluster: Cluster, u: float, v: float) -> None:
    """One node and everybody else; sometimes all members together, apart from spares and store:
    they train on while a spare leads."""
    names = list(cluster.machines)
    chosen = {pick_node(cluster, u)}
    if v > 0.4:
        chosen = set(names[:cluster.shape.members])
    rest = [name for name in (*names, "store") if name not in chosen]
    ways = {pair for a in chosen for b in rest for pair in ((a, b), (b, a))}
    cluster.cut(ways, 4.0 + 16.0 * v)


def peers_cut(cluster: Cluster, u: float, v: float) -> None:
    """The nodes in two parts that hear nothing of one another, in halves or one and the others,
    while all of them reach the store."""
    names = list(cluster.machines)
    if len(names) < 3:
        return
    first = int(u * len(names))
    turned = names[first:] + names[:first]
    count = 1 if v < 0.3 else len(names) // 2
    ways = {pair for a in turned[:count] for b in turned[count:] for pair in ((a, b), (b, a))}
    cluster.cut(ways, 3.0 + 25.0 * u)


def flapping(cluster: Cluster, u: float, v: float) -> None:
    """A link goes up and down: of one node to everybody and the store, to all other nodes, or to
    one of them; some let words pass in one direction all the time.  It is worse than one that is
    cut: each time that it is up somebody is heard of again, and each time that it is down missed.
    """
    if cluster.single:
        return
    rng, node = random.Random(u), pick_node(cluster, u)
    rest = [one for one in cluster.machines if one != node]
    far = [*rest, "store"] if v < 0.4 else rest if v < 0.7 else [rng.choice(rest)]
    ways = {(node, one) for one in far}
    if rng.random() < 0.8:
        ways |= {(one, node) for one in far}
    lasts_s = rng.uniform(*LASTS_S)
    cluster.loop.note("STORM", f"{node}: its link to {', '.join(far)} flaps for {lasts_s:.0f} s")
    _down(cluster, ways, rng, cluster.loop.now_s + lasts_s, cluster.network.heals)


def _down(
    cluster: Cluster, ways: set[tuple[str, str]], rng: random.Random, until_s: float, heals: int
) -> None:
    if cluster.loop.now_s >= until_s or cluster.network.heals != heals:
        return
    down_s = rng.uniform(*DOWN_S)
    cluster.cut(ways, down_s)
    cluster.loop.after(down_s + rng.uniform(*UP_S),
                       partial(_down, cluster, ways, rng, until_s, heals))


def store_down(cluster: Cluster, _u: float, v: float) -> None:
    """No quorum."""
    cluster.store.available = False
    cluster.loop.note("STORM", "store: unavailable")
    cluster.loop.after(1.0 + 9.0 * v, lambda: setattr(cluster.store, "available", True))


def store_replaced(cluster: Cluster, u: float, v: float) -> None:
    """The store lost its disk, or its address leads to another one; its backup comes back later."""
    if cluster.single or cluster.store.cluster_id != OWN_ID:
        return
    cluster.store.replace("another" if u < 0.5 else "")
    cluster.loop.note("STORM", "store: is %s", "another cluster's" if u < 0.5 else "empty")
    cluster.loop.after(2.0 + 10.0 * v, cluster.store.restore)
