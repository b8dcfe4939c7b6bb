"""When a run that trains takes more nodes: once for all that come, and never much later."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.detect.ranks import growth
from holdfast.agent.core.model import Beat
from holdfast.agent.core.run.members import ASKING

from .driver import Cluster

replace = msgspec.structs.replace
UNFIT = "drivers unlike the others'"


# ---------------------------------------------------------------- by value


def test_a_growth_is_counted_from_the_first_and_from_the_newest_node() -> None:
    first = growth.seen(growth.NONE, ["c"], 10.0)
    assert first == growth.Growth(("c",), 10.0, 10.0)
    assert growth.seen(first, ["c"], 12.0) == first
    second = growth.seen(first, ["d", "c"], 13.0)
    assert second == growth.Growth(("c", "d"), 10.0, 13.0)
    assert growth.seen(second, ["d"], 14.0) == growth.Growth(("d",), 10.0, 13.0)
    assert growth.seen(second, [], 14.0) == growth.NONE


@pytest.mark.parametrize(("newest_s", "comes", "now_s", "left_s"), [
    (0.0, False, 0.0, growth.QUIET_S),
    (0.0, False, growth.QUIET_S, 0.0),
    (4.0, False, growth.QUIET_S, 4.0),  # from the newest on
    (0.0, True, growth.QUIET_S, growth.LIMIT_S - growth.QUIET_S),  # one is on its way
    (growth.LIMIT_S - 1.0, False, growth.LIMIT_S - 1.0, 1.0),  # no longer than the limit
    (growth.LIMIT_S, True, growth.LIMIT_S, 0.0),
    (0.0, False, 1000.0, 0.0)])
def test_how_long_a_growth_waits(
    newest_s: float, comes: bool, now_s: float, left_s: float
) -> None:
    found = growth.Growth(("c",), 0.0, newest_s)
    assert growth.wait_s(found, comes, now_s) == pytest.approx(left_s)


# ---------------------------------------------------------------- in a run


def shrunk(names: str = "abcd", lost: str = "cd") -> Cluster:
    """A run of these nodes that lost some, and trains on without them."""
    cluster = Cluster(names, len(names), least=2)
    cluster.run(6)
    assert len(cluster.plan().members) == len(names)
    train(cluster, 3)
    cluster.run(2)
    cluster.dead |= set(lost)
    for name in sorted({*names} - {*lost}):
        lab = cluster.labs[name]
        lab.park(lab.view.ranks[0].rank, 3)
    cluster.run(20)
    assert {*cluster.plan().members} == {*names} - {*lost} and cluster.plan().generation == 2
    train(cluster, 4)
    cluster.run(12)  # the lease of the new generation is over
    train(cluster, 5)
    return cluster


def train(cluster: Cluster, step: int) -> None:
    for name, lab in cluster.labs.items():
        if lab.view.ranks and name not in cluster.dead:
            lab.all(step=step, phase="forward_backward", step_time_s=0.5, parked=None,
                    state="running")


def come(cluster: Cluster, name: str) -> None:
    """The node is back, and its launcher starts anew."""
    lab = cluster.labs[name]
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(),
                       registered_boot_s=lab.boot_s)
    cluster.dead.discard(name)


def waits(cluster: Cluster) -> bool:
    return any("waits for one more" in why for _, why in
               cluster.labs[cluster.leader()].decision.reasons)


def grown_s(cluster: Cluster, most_s: int = 60) -> int:
    """Seconds until the next generation is planned."""
    before = cluster.plan().generation
    for second in range(most_s):
        if cluster.plan().generation > before:
            return second
        cluster.step()
    raise AssertionError(f"no growth in {most_s} s")


def beat(cluster: Cluster, name: str, held: str = "") -> None:
    """What is heard of a node whose agent is not simulated."""
    now_s = cluster.labs["a"].boot_s
    cluster.heard[name, "r"] = Beat(name, "r", 0, 0.0, sent_boot_s=now_s, grade="trainer", nproc=1,
                                    nnodes_min=2, nnodes_max=len(cluster.labs), held=held)
    cluster.at_s[name, "r"] = now_s


def test_nodes_that_come_one_after_the_other_are_one_growth() -> None:
    cluster = shrunk()
    come(cluster, "c")
    cluster.run(4)
    assert waits(cluster)
    come(cluster, "d")
    cluster.run(15)
    plan = cluster.plan()
    assert (plan.generation, sorted(plan.members)) == (3, ["a", "b", "c", "d"])


def test_one_that_comes_alone_is_taken_when_no_other_follows() -> None:
    cluster = shrunk()
    come(cluster, "c")
    assert growth.QUIET_S <= grown_s(cluster) <= growth.QUIET_S + 5
    assert sorted(cluster.plan().members) == ["a", "b", "c"]


def test_a_world_that_is_whole_again_waits_for_nobody() -> None:
    cluster = shrunk("abc", "c")
    come(cluster, "c")
    assert grown_s(cluster) < growth.QUIET_S and not waits(cluster)


def test_a_node_whose_checks_are_on_their_way_is_waited_for_and_taken_along() -> None:
    cluster = shrunk()
    come(cluster, "c")
    for _ in range(int(growth.QUIET_S) + 10):
        beat(cluster, "d", ASKING)
        cluster.step()
    assert cluster.plan().generation == 2 and waits(cluster)
    come(cluster, "d")
    assert grown_s(cluster) <= growth.QUIET_S + 5
    assert len(cluster.plan().members) == 4


@pytest.mark.parametrize(("held", "least_s", "most_s"), [
    ((UNFIT,), growth.QUIET_S, growth.QUIET_S + 5),
    ((ASKING,), growth.LIMIT_S, growth.LIMIT_S + 5),
    ((UNFIT, UNFIT, ""), growth.LIMIT_S, growth.LIMIT_S + 5),
], ids=["refused", "asks for ever", "comes and goes"])
def test_a_node_that_never_comes_to_stay_delays_a_growth_for_no_longer_than_the_limit(
    held: tuple[str, ...], least_s: float, most_s: float
) -> None:
    """c is back and stays; e is lost, so that the world is not whole with d either."""
    cluster = shrunk("abcde", "cde")
    come(cluster, "c")
    turn, before_s = 0, cluster.labs["a"].boot_s
    while cluster.plan().generation == 2 and turn < 2 * growth.LIMIT_S:
        beat(cluster, "d", held[turn % len(held)])
        cluster.step()
        turn += 1
    assert least_s <= cluster.labs["a"].boot_s - before_s <= most_s
    assert "c" in cluster.plan().members and cluster.plan().generation == 3


def test_a_recovery_takes_whoever_is_there_and_waits_for_nobody() -> None:
    cluster = shrunk()
    come(cluster, "c")
    cluster.run(2)
    assert waits(cluster)
    lab = cluster.labs["b"]
    lab.kill(lab.view.ranks[0].rank)
    other = cluster.labs["a"]
    other.park(other.view.ranks[0].rank, other.view.ranks[0].step)
    assert grown_s(cluster) <= 3
    assert sorted(cluster.plan().members) == ["a", "b", "c"]
    assert "can take ranks" not in cluster.plan().reason


def test_what_was_waited_for_before_a_generation_says_nothing_of_the_next() -> None:
    cluster = shrunk()
    come(cluster, "c")
    grown_s(cluster)
    cluster.run(3)
    train(cluster, 6)
    cluster.run(15)
    train(cluster, 7)
    cluster.step()
    state = cluster.labs[cluster.leader()].node.cases["r"].state
    assert state.suspects.growth == growth.NONE
