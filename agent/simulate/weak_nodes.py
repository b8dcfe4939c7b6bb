"""A fault of a storm: a network card that works badly, and of which nothing is said.

Owns what such a card does to the ranks of its node, until a person changes it.  Tests between the
nodes are all that can tell it from ranks that stand still of themselves.
"""

from __future__ import annotations

from functools import partial

from ..core.actions import RELEASE_NODE
from ..core.model import Request, node_subject
from .cluster import Cluster
from .edge import Edge
from .machine import BROKEN, SLOW

AGAIN_S = 1.5  # ranks that begun there stand still this soon again


def node_weak(cluster: Cluster, u: float, v: float) -> None:
    """On one node more, while as many are left as the runs need."""
    edges, shape = list(cluster.edges.values()), cluster.shape
    edge = edges[int(u * len(edges))]
    hurt = [one for one in cluster.machines.values() if one.weak or one.fatal or one.gone]
    if cluster.single or edge.machine.weak or len(hurt) >= len(edges) - shape.need:
        return
    edge.machine.weak = SLOW if v < 0.5 else BROKEN
    cluster.loop.note("STORM", f"{edge.machine.name}: its card is {edge.machine.weak}")
    _hold_up(cluster, edge)


def change_cards(cluster: Cluster) -> None:
    """Who was taken out for one is let in again."""
    for edge in cluster.edges.values():
        if edge.machine.weak:
            edge.machine.weak = ""
            edge.ask(Request(id=f"release-{edge.machine.name}", action=RELEASE_NODE, by="storm",
                             subject=node_subject(edge.machine.name), reason="its card is new"))


def _hold_up(cluster: Cluster, edge: Edge) -> None:
    machine = edge.machine
    if not machine.weak:
        return
    machine.weak_s = cluster.loop.now_s
    for job, rank in cluster.ranks():
        gang = rank.gang
        if rank.machine is machine and rank.moves() and gang and rank.step > gang.began_at:
            rank.hung = True
            job.harm(rank.generation, rank.pid)
    cluster.loop.after(AGAIN_S, partial(_hold_up, cluster, edge))
