"""The next generation of a script or command waits for permits that a node may still hold."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Doc, Now, Plan, Resume, RunView, Settings
from holdfast.agent.core.run import fences
from holdfast.agent.core.run.fences import Fences
from holdfast.agent.core.run.layout import Member
from holdfast.agent.core.run.members import FENCE_LEASES, LOST_LEASES
from holdfast.agent.core.run.stage import StageView, may_start
from holdfast.agent.core.run.state import RunState

from .driver import Cluster, Lab

LEASE_S = Settings().lease_s
FENCE_S = FENCE_LEASES * LEASE_S
GRADE = "script"


@pytest.fixture(params=["script", "opaque"], autouse=True)
def _each_grade_without_valid_commits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command (--no-python) may write as a script does: both are fenced."""
    monkeypatch.setattr(sys.modules[__name__], "GRADE", request.param)


def started(names: str = "abc", nnodes: int = 2, grade: str = "") -> Cluster:
    cluster = Cluster(names, nnodes, grade or GRADE)
    cluster.run(8)
    assert cluster.plan().generation == 1 and cluster.leader() == "a"
    assert [node for _, node in cluster.plan().ranks] == ["a", "b"]
    return cluster


def until(cluster: Cluster, holds, most: int = 60) -> int:  # type: ignore[no-untyped-def]
    """Seconds until a condition on the plan holds."""
    for second in range(most):
        if holds(cluster.plan()):
            return second
        cluster.step()
    raise AssertionError(f"not within {most} s: {cluster.plan()}")


def said(cluster: Cluster) -> str:
    return dict(cluster.labs[cluster.leader()].decision.reasons)["r"]


def test_a_node_that_may_compute_on_reads_that_it_is_missed_and_its_permit_is_waited_for() -> None:
    cluster = started()
    cluster.dead.add("b")
    named_s = until(cluster, lambda plan: plan.unheard == ("b",))
    planned_s = named_s + until(cluster, lambda plan: plan.generation == 2)
    assert planned_s >= named_s + FENCE_S
    assert planned_s <= named_s + FENCE_S + 3
    assert cluster.plan().ranks == ((0, "a"), (1, "c"))


def test_the_wait_says_for_whom() -> None:
    cluster = started()
    cluster.dead.add("b")
    until(cluster, lambda plan: plan.unheard == ("b",))
    cluster.run(FENCE_S - 2)
    assert "permits of this script's ranks on b have run out" in said(cluster)


def test_a_node_known_to_be_lost_costs_no_more_than_its_permit_and_margin() -> None:
    """A silence that may end is waited out for longer."""
    cluster = started()
    cluster.dead.add("b")
    cluster.lost.add("b")
    assert until(cluster, lambda plan: plan.unheard == ("b",)) <= 3
    waited_s = until(cluster, lambda plan: plan.generation == 2)
    assert FENCE_S <= waited_s <= FENCE_S + 2 < LOST_LEASES * LEASE_S
    assert cluster.plan().reason.startswith(
        "b: other nodes reach neither its agent nor its kernel")


def test_who_leads_anew_counts_from_its_own_word() -> None:
    """The nodes that are missed read the document, whoever wrote it, and not each other's thoughts.
    """
    cluster = started("abcd", 2)
    cluster.dead |= {"a", "b"}
    cluster.run(LEASE_S * 0.6)
    assert cluster.plan().unheard == ()
    named_s = until(cluster, lambda plan: "b" in plan.unheard)
    assert cluster.leader() in ("c", "d")
    planned_s = until(cluster, lambda plan: plan.generation == 2)
    assert named_s and planned_s >= FENCE_S
    assert {node for _, node in cluster.plan().ranks} == {"c", "d"}


def test_a_node_that_is_heard_of_again_goes_on() -> None:
    cluster = started()
    cluster.dead.add("b")
    until(cluster, lambda plan: plan.unheard == ("b",))
    cluster.dead.clear()
    until(cluster, lambda plan: plan.unheard == ())
    cluster.run(30)
    assert cluster.plan().generation == 1


def test_nobody_is_told_to_end_where_no_other_can_take_its_ranks() -> None:
    cluster = started("ab")
    cluster.dead.add("b")
    cluster.run(40)
    assert cluster.plan().generation == 1 and cluster.plan().unheard == ()


def test_ranks_that_were_seen_to_end_hold_no_permit() -> None:
    cluster = started()
    cluster.labs["b"].kill(1)
    cluster.step()
    cluster.step(0.1)  # the leader has seen it, and plans nothing yet
    assert cluster.plan().generation == 1
    cluster.dead.add("b")
    del cluster.heard["b", "r"]
    assert until(cluster, lambda plan: plan.generation == 2) < LEASE_S
    assert cluster.plan().unheard == ()


def test_a_trainers_node_is_replaced_without_any_such_wait() -> None:
    """What its old ranks commit is void."""
    cluster = started(grade="trainer")
    cluster.dead.add("b")
    cluster.lost.add("b")
    assert until(cluster, lambda plan: plan.generation == 2) <= 4
    assert cluster.plan().unheard == ()


def test_who_leads_does_not_miss_itself() -> None:
    cluster = Cluster("abcde", 5, "trainer", 2, settings=Settings(single_node=False, gather_s=2.0))
    cluster.run(12)
    cluster.cut("ab", "cde")
    until(cluster, lambda plan: plan.unheard == ("c", "d", "e"))
    cluster.dead |= {"a", "b", "d"}
    cluster.heal()
    cluster.run(12)
    assert cluster.leader() in ("c", "e")
    assert {"c", "e"}.isdisjoint(cluster.plan().unheard)


def test_only_a_node_that_is_not_missed_renews_its_permits() -> None:
    plan = Plan("r", 1, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test", unheard=("b",))
    assert fences.may_renew(plan, "a") and not fences.may_renew(plan, "b")


def test_a_version_that_was_not_read_begins_the_count_anew() -> None:
    """It may have said that the node is heard of, and so renewed its permits."""
    named = Plan("r", 1, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test", unheard=("b",))
    member, made = Member("b", fresh=False, lost=True), Plan(
        "r", 2, ("a", "c"), ((0, "a"), (1, "c")), Resume("fresh"), "test")

    def waits(*versions: int) -> bool:
        """Whether it is still waited for, when these versions were read in turn for that long."""
        lab, kept = Lab(grade=GRADE, name="a", settings=Settings(single_node=False)), Fences()
        for number, version in enumerate(versions):
            now = Now(100.0 + number * FENCE_S / (len(versions) - 1), 1e9, "b")
            ctx = lab.node._context(now, lab.observed(), lab.view, [], [], [], {})
            kept.see(ctx, named, version)
        return bool(kept.waits(ctx, named, made, (member,)))

    assert not waits(5, 5) and not waits(5, 6)
    assert waits(5, 7)


def unfit(cluster: Cluster) -> None:
    """Who leads hears of b's fault with its next beat."""
    cluster.fatal["b"] = "host_disk_error"
    cluster.step()


def test_a_node_that_is_found_unfit_and_cut_off_in_the_same_moment_is_waited_for() -> None:
    """It was heard of just now, and yet the order to stop does not reach it."""
    cluster = started()
    unfit(cluster)
    cluster.dead.add("b")
    named_s = until(cluster, lambda plan: plan.unheard == ("b",))
    assert named_s <= 2
    assert until(cluster, lambda plan: plan.generation == 2) >= FENCE_S
    assert cluster.plan().ranks == ((0, "a"), (1, "c"))


@pytest.mark.parametrize("how", ["fatal", "excluded", "drained"])
def test_ranks_of_an_unfit_node_that_do_not_end_are_waited_for_until_their_permits_have(
    how: str,
) -> None:
    """It reads that it renews none, though all hear of it; what it is told changes nothing."""
    cluster = started()
    cluster.labs["b"]._stop = lambda _: None  # type: ignore[method-assign]
    if how == "fatal":
        unfit(cluster)
    else:
        mark = b'"draining":true' if how == "drained" else b'"strikes":[]'
        cluster.docs["node/b"] = Doc("node/b", 1, b'{"excluded":true,' + mark + b"}")
    until(cluster, lambda plan: plan.unheard == ("b",), 150)  # a drain has them save first
    assert until(cluster, lambda plan: plan.generation == 2) >= FENCE_S
    assert "b" in {rank.node for rank in cluster.labs["b"].view.ranks if rank.ended is None}


def test_an_unfit_node_whose_ranks_end_is_followed_as_soon_as_it_says_so() -> None:
    cluster = started()
    unfit(cluster)
    assert until(cluster, lambda plan: plan.generation == 2) <= 2
    assert cluster.plan().unheard == ()


def test_ranks_of_its_own_are_waited_for_by_who_leads() -> None:
    cluster = started()
    cluster.labs["a"]._stop = lambda _: None  # type: ignore[method-assign]
    cluster.docs["node/a"] = Doc("node/a", 1, b'{"excluded":true}')
    assert until(cluster, lambda plan: plan.generation == 2) >= FENCE_S
    assert cluster.plan().ranks == ((0, "c"), (1, "b"))


def test_a_node_that_is_missed_begins_no_ranks_of_a_script() -> None:
    """They would have a permit of a whole lease, from whenever it came to that."""
    plan = Plan("r", 1, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test", unheard=("b",))
    for grade, starts in ((GRADE, False), ("trainer", True)):
        view = RunView("r", "b", grade, 1)
        assert may_start(RunState("r"), StageView(view, plan, single_node=False)) is starts
        heard = replace(plan, unheard=())
        assert may_start(RunState("r"), StageView(view, heard, single_node=False))
        # What the store said minutes ago, others may have counted past: no permit begins by it.
        away = StageView(view, heard, single_node=False, up=False)
        assert may_start(RunState("r"), away) is starts


def test_who_waits_looks_again_when_the_permits_have_run_out() -> None:
    lab, kept = Lab(grade="script", name="a", settings=Settings(single_node=False)), Fences()
    old, made = (
        Plan("r", generation, ("a", other), ((0, "a"), (1, other)), Resume("fresh"), "test",
             unheard=("b",)) for generation, other in ((1, "b"), (2, "c")))
    for after_s, waits, wakes_s in (
            (0.0, True, 1.0), (FENCE_S - 0.25, True, 0.25), (FENCE_S, False, 1.0)):
        now = Now(100.0 + after_s, 1e9, "b")
        ctx = lab.node._context(now, lab.observed(), lab.view, [], [], [], {})
        kept.see(ctx, old, 5)
        assert bool(kept.waits(ctx, old, made, (Member("b", False, lost=True),))) is waits
        assert ctx.wake_s == pytest.approx(wakes_s)
