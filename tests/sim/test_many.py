"""A run over more nodes than each is near to: found lost, left alone and led as one of few is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.agent.core.model import TRAINER
from holdfast.agent.core.run.members import STALE_LEASES
from holdfast.agent.peers.choice import ALL_NEAR
from holdfast.agent.simulate.cluster import Cluster, Shape, build
from holdfast.agent.simulate.faults import node_gone
from holdfast.agent.simulate.storms import MANY, shipped

NODES = ALL_NEAR + 10
BEGUN_S, KNOWN_S, BACK_S = 15.0, 1.0, 5.0


def world(seed: int) -> Cluster:
    cluster = build(seed, Shape(NODES, 1, 1, 1, NODES // 2), MANY, shipped())
    for job in cluster.jobs.values():
        job.grade, job.target = TRAINER, 10**9
    until(cluster, lambda: begun(cluster, 1), BEGUN_S)
    return cluster


def begun(cluster: Cluster, generation: int) -> bool:
    gang = next(iter(cluster.jobs.values())).gangs.get(generation)
    return gang is not None and gang.formed


def until(cluster: Cluster, holds: Callable[[], bool], limit_s: float) -> None:
    end_s = cluster.loop.now_s + limit_s
    while not holds():
        assert cluster.loop.now_s < end_s, "\n".join(cluster.loop.trace.lines())
        cluster.loop.run_until(cluster.loop.now_s + 0.02)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_know_of_a_lost_node_within_a_second_and_the_run_goes_on(seed: int) -> None:
    cluster = world(seed)
    cluster.loop.run_until(cluster.loop.now_s + 6.0)
    edges = list(cluster.edges.values())
    leader = cluster.store.holder("run-0")
    victim = next(one for one in edges[NODES // 3:] if one.machine.name != leader)
    others = [one for one in edges if one is not victim]
    assert not any(one.lost for one in others)
    oldest_s = max(leads.machine.boot_s() - beat.boot_s for leads in others
                   for beat in leads.words.heard() if beat.node != victim.machine.name)
    assert oldest_s < STALE_LEASES * MANY.lease_s
    node_gone(cluster, (edges.index(victim) + 0.5) / len(edges), 0.0)
    assert not victim.machine.up
    until(cluster, lambda: all(one.lost == {victim.machine.name} for one in others), KNOWN_S)
    until(cluster, lambda: begun(cluster, 2), BACK_S)


def test_a_node_that_two_do_not_reach_keeps_its_place() -> None:
    """A switch that lost one way: all others hear both sides of it, and the run trains on."""
    cluster = world(4)
    third = "node-12"
    leader = cluster.store.holder("run-0")
    two = [name for name in cluster.edges if name not in (third, leader)][:2]
    ways = {pair for one in two for pair in ((one, third), (third, one))}
    job = next(iter(cluster.jobs.values()))
    job.reachable = lambda _a, _b: True  # its collectives go elsewhere
    cluster.cut(ways, 60.0)
    before = job.best
    for _ in range(40):
        cluster.loop.run_until(cluster.loop.now_s + 1.0)
        lost = {name: one.lost for name, one in cluster.edges.items() if one.lost}
        assert lost.keys() <= {*two, third}, lost
    assert max(job.gangs) == 1 and job.best > before + 10
