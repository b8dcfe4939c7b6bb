"""Peers that hear nothing of one another, while the store hears all of them: who leads then."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Settings

from .driver import Cluster


def started(names: str, nnodes: int, least: int = 0, grade: str = "trainer") -> Cluster:
    cluster = Cluster(names, nnodes, grade, least, max_restarts=10,
                      settings=Settings(single_node=False, gather_s=2.0))
    cluster.run(12)
    assert cluster.plan().generation == 1 and cluster.leader() == "a"
    return cluster


def leaders(cluster: Cluster, seconds: int) -> list[str]:
    """Who led, one after the other."""
    seen = [cluster.leader()]
    for _ in range(seconds):
        cluster.step()
        if cluster.leader() != seen[-1]:
            seen.append(cluster.leader())
    return seen


def nodes(cluster: Cluster) -> list[str]:
    return [node for _, node in cluster.plan().ranks]


def broken(cluster: Cluster) -> None:
    """Each rank leaves its collective, as those of a node that holds others lost are told to."""
    for lab in cluster.labs.values():
        for rank in lab.view.ranks:
            lab.park(rank.rank, 3)


def said(cluster: Cluster, name: str) -> str:
    return dict(cluster.labs[name].decision.reasons)["r"]


def test_two_halves_have_one_leader_who_goes_on_with_his_own() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("ab", "cd")
    broken(cluster)
    assert leaders(cluster, 40) == ["a"]
    assert cluster.plan().generation == 2 and nodes(cluster) == ["a", "b"]
    assert [r.state for n in "ab" for r in cluster.labs[n].view.ranks] == ["running"] * 2
    assert not [e for lab in cluster.labs.values() for e in lab.log if e.kind == "finish"]


def test_the_other_half_waits_and_says_why() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("ab", "cd")
    broken(cluster)
    cluster.run(30)
    for name in "cd":
        assert said(cluster, name).startswith("a leads the run, as the store shows"), name
        assert "cut off" in said(cluster, name)
        assert [r.state for r in cluster.labs[name].view.ranks] == ["ended"]
        assert cluster.labs[name].finishes() == []
    stages = {name: lab.node.stages()["r"] for name, lab in cluster.labs.items()}
    assert stages == {"a": "training", "b": "training", "c": "waiting", "d": "waiting"}


def test_the_others_come_back_when_peers_hear_one_another() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("ab", "cd")
    broken(cluster)
    cluster.run(30)
    cluster.heal()
    cluster.run(25)
    assert sorted(nodes(cluster)) == ["a", "b", "c", "d"]
    assert cluster.plan().unheard == () and cluster.leader() == "a"
    assert "waiting" not in {lab.node.stages()["r"] for lab in cluster.labs.values()}


def test_spares_that_are_cut_off_leave_a_run_alone_that_trains() -> None:
    cluster = started("abcd", 2)
    cluster.cut("ab", "cd")
    assert leaders(cluster, 40) == ["a"]
    assert cluster.plan().generation == 1 and cluster.plan().unheard == ("c", "d")


def test_a_half_that_cannot_go_on_takes_the_run_from_nobody() -> None:
    cluster = started("abcdef", 6, least=3)
    cluster.labs["a"].refuse_puts = 99  # what he says of whom he misses does not arrive
    cluster.cut("abcd", "ef")
    broken(cluster)
    assert leaders(cluster, 8) == ["a"]


def test_a_leader_cut_off_alone_is_followed_once() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("a", "bcd")
    broken(cluster)
    seen = leaders(cluster, 40)
    assert len(seen) == 2 and sorted(nodes(cluster)) == ["b", "c", "d"]
    cluster.heal()
    assert leaders(cluster, 10) == seen[1:]


def test_three_parts_change_their_leader_no_more_than_once_each() -> None:
    cluster = started("abcdef", 6, least=2)
    cluster.cut("ab", "cd", "ef")
    broken(cluster)
    assert leaders(cluster, 40) == ["a"] and nodes(cluster) == ["a", "b"]


@pytest.mark.parametrize("late", ["a", "c"])
def test_who_took_the_lease_while_he_was_lost_to_others_keeps_it(late: str) -> None:
    """One side knows of the cut before the other, and takes the run from a leader who could not
    say yet that he lives: nobody takes it back from who renews."""
    cluster = started("abcd", 4, least=2)
    cluster.labs["a"].refuse_puts = 99
    cluster.cut("ab", "cd")
    broken(cluster)
    cluster.run(6)
    if late == "a":
        cluster.labs["a"].restart_agent()
    cluster.labs["a"].refuse_puts = 0
    assert leaders(cluster, 40)[1:] == [] and cluster.leader() in "cd"
    assert nodes(cluster) == ["c", "d"]


def test_a_leader_who_is_cut_off_and_then_dies_is_followed_when_his_lease_ends() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("ab", "cd")
    broken(cluster)
    cluster.run(20)
    cluster.dead |= {"a", "b"}
    cluster.run(40)
    assert cluster.leader() in "cd" and nodes(cluster) == ["c", "d"]


def test_a_leader_and_another_who_die_together_are_followed_before_the_lease_ends() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.dead |= {"a", "b"}
    cluster.lost |= {"a", "b"}
    for name in "cd":
        cluster.labs[name].park(cluster.labs[name].view.ranks[0].rank, 3)
    cluster.run(5)  # of a lease of 10 s
    assert cluster.leader() in "cd" and nodes(cluster) == ["c", "d"]


def test_a_leader_who_restarts_his_agent_meanwhile_stays_who_leads() -> None:
    cluster = started("abcd", 4, least=2)
    cluster.cut("ab", "cd")
    broken(cluster)
    cluster.run(20)
    cluster.labs["a"].restart_agent()
    cluster.before = {key: one for key, one in cluster.before.items() if key[0] in "ab"}
    assert leaders(cluster, 40) == ["a"] and cluster.plan().unheard == ("c", "d")


def test_one_lost_node_is_written_down_for_nobody() -> None:
    """Nobody is with it who could take the run: a write less before it is replaced."""
    cluster = started("abc", 2)
    cluster.dead.add("b")
    cluster.lost.add("b")
    cluster.labs["a"].park(0, 3)
    cluster.run(6)
    assert cluster.plan().generation == 2 and cluster.plan().unheard == ()


def test_who_was_heard_of_before_the_loss_does_not_make_a_majority() -> None:
    """The loss of one node is known a moment before that of the next."""
    cluster = started("abcd", 4, least=2)
    cluster.dead |= {"a", "b"}
    cluster.lost |= {"a"}
    cluster.run(2)
    assert cluster.leader() == "a"
    cluster.lost |= {"b"}
    cluster.run(2)
    assert cluster.leader() in "cd"
