"""Launchers that are asked to end, one of a run over nodes or all of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from .driver import Cluster


@pytest.mark.parametrize(("nnodes", "grade", "goes_on"), [
    ((3, 4), "trainer", True), ((4, 4), "trainer", False), ((3, 4), "script", False)])
def test_the_leaders_launcher_that_is_asked_to_end_ends_its_own_part_alone(
    nnodes: tuple[int, int], grade: str, goes_on: bool
) -> None:
    """One pod of an elastic job is evicted, and it happens to be the leader's."""
    made = Cluster("abcd", nnodes=nnodes[1])
    for lab in made.labs.values():
        lab.view = replace(lab.view, nnodes_min=nnodes[0], grade=grade)
    made.run(6)
    leader = made.labs[made.leader()]
    for lab in made.labs.values():
        lab.all(step=40, state="running")
    made.step()
    leader.view = replace(leader.view, shutdown="preempted")
    for _ in range(40):
        made.step()
        if leader.finishes():  # its launcher has left; its agent lives, and answers its peers
            leader.view = replace(leader.view, connected=False, ranks=())
    assert leader.finishes() == [75]
    plan = made.plan()
    others = [name for name in "abcd" if name != leader.name]
    if goes_on:
        assert (plan.finished, sorted(plan.members)) == (-1, others)
        assert all(not made.labs[name].finishes() for name in others)
    else:
        assert plan.finished == 75
        assert all(made.labs[name].finishes() == [75] for name in others)


def test_a_signal_to_all_ends_an_elastic_run_for_all() -> None:
    made = Cluster("abcd", nnodes=4)
    for lab in made.labs.values():
        lab.view = replace(lab.view, nnodes_min=2)
    made.run(6)
    for lab in made.labs.values():
        lab.view = replace(lab.view, shutdown="preempted")
    made.run(40)
    assert all(lab.finishes() == [75] for lab in made.labs.values())
    assert made.plan().finished == 75


def test_who_is_asked_to_end_has_all_leave_behind_one_step_with_a_checkpoint() -> None:
    made = Cluster("abc", nnodes=3)
    made.run(6)
    first = made.plan()
    asked = next(name for name in first.members if name != made.leader())
    for lab in made.labs.values():
        lab.all(step=40, state="running")
    made.step()
    made.labs[asked].view = replace(made.labs[asked].view, shutdown="preempted")
    made.run(3)
    plan = made.plan()
    assert (plan.generation, plan.saves, plan.finished) == (1, True, -1)
    assert plan.park == f"{asked}: its launcher was preempted" and plan.park_after >= 42
    told = {name: {e.body.after for e in lab.log if e.kind == "stop" and e.body.park}
            for name, lab in made.labs.items() if name != asked}
    assert list(told.values()) == [{plan.park_after}] * 2
