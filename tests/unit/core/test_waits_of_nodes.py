"""How long a node of a run waits for what only others can give it: the store, ranks, an end."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Settings
from holdfast.agent.core.run.ending import SHUTDOWN_CODES, STOP_WAIT_S

from .driver import Cluster, Lab, replace

LIMIT_S = 20.0
AWAY = Settings(single_node=False, store_node="n1", gang_limit_s=LIMIT_S)


def without_store(grade: str = "trainer", boot_s: float = 100.0, **view: float) -> Lab:
    lab = Lab(grade=grade, settings=AWAY, nnodes_min=2, nnodes_max=2, **view)
    lab.boot_s, lab.store_up = boot_s, False
    return lab


def reasons(lab: Lab) -> list[str]:
    """Why its launcher was ordered to leave."""
    return [one.body.reason for one in lab.log  # type: ignore[union-attr]
            if one.kind == "finish"]


def ended(lab: Lab, seconds: int) -> int:
    """After how many of so many seconds the launcher was ordered to leave; -1 = it was not."""
    for second in range(seconds):
        lab.step(1.0)
        if lab.finishes():
            (reason,) = reasons(lab)
            assert lab.finishes() == [75]
            assert "--rdzv-endpoint n1, which was out of reach" in reason
            return second
    return -1


@pytest.mark.parametrize("boot_s", [100.0, -0.5])  # the first steps of a machine count as well
def test_whoever_stands_still_waits_for_the_store_as_long_as_for_nodes(boot_s: float) -> None:
    assert ended(without_store(boot_s=boot_s), 60) == LIMIT_S + 1
    assert ended(without_store(boot_s=boot_s, gang_limit_s=5.0), 60) == 6, "its own limit"


def test_a_store_that_came_back_is_waited_for_anew() -> None:
    lab = without_store()
    assert ended(lab, 15) == -1
    lab.store_up = True
    lab.step(1.0)
    lab.store_up = False
    assert ended(lab, 21) == -1 and ended(lab, 2) >= 0


def test_a_store_that_is_no_nodes_own_is_waited_for_without_end() -> None:
    lab = without_store()
    lab.settings = lab.node.settings = replace(AWAY, store_node="")
    assert ended(lab, 60) == -1


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_ranks_that_train_wait_for_no_store(grade: str) -> None:
    cluster = Cluster("ab", grade=grade, settings=AWAY)
    cluster.run(5)
    lab = cluster.labs["a"]
    lab.store_up = False
    for second in range(60):
        lab.all(step=second, still_s=0.0)
        cluster.step()
    assert not lab.finishes()
    if grade == "script":
        return  # its ranks live by their permits
    for second in range(int(2 * LIMIT_S) + 3):
        lab.all(still_s=float(second))
        cluster.step()
    assert lab.finishes() == [75]


def test_a_scripts_spare_is_stranded_only_where_nobody_is_heard_of() -> None:
    cluster = Cluster("abc", nnodes=2, grade="script", settings=replace(AWAY, store_node=""))
    cluster.run(int(2 * LIMIT_S))
    (spare,) = set("abc") - set(cluster.plan().members)
    lab = cluster.labs[spare]
    assert not lab.finishes()
    assert "nothing is heard of" not in dict(lab.decision.reasons)["r"]


@pytest.mark.parametrize(("shutdown", "drain", "code", "reason"), [
    ("", "maintenance", 75, "the run was drained: maintenance"),
    ("preempted", "", 75, "the run was preempted"),
    ("preempted", "maintenance", 75, "the run was preempted"),  # the caller's word is the reason
    ("interrupted", "maintenance", 130, "the run was interrupted"),
])
def test_a_run_that_is_asked_to_end_gives_its_ranks_a_grace_and_says_who_asked(
    shutdown: str, drain: str, code: int, reason: str
) -> None:
    lab = Lab()
    lab.begin()
    lab.train(3)
    lab._stop = lambda body: None  # type: ignore[method-assign]  # the ranks take their time
    if drain:
        lab.node.cases["r"].operator.drain(drain)
    lab.view = replace(lab.view, shutdown=shutdown)
    grace_s = lab.settings.stop_grace_s
    for _ in range(int(grace_s + STOP_WAIT_S) + 1):
        lab.step(1.0)
        assert not lab.finishes()
    (order,) = [one.body for one in lab.log if one.kind == "stop"]
    assert (order.grace_s, order.leave, order.ranks) == (  # type: ignore[union-attr]
        grace_s, not shutdown, ())
    lab.step(1.0)
    lab.settle()
    assert lab.finishes() == [code]
    assert reasons(lab) == [reason]
    assert lab.plan().finished == code


def test_ranks_that_leave_sooner_hold_nobody() -> None:
    lab = Lab()
    lab.begin()
    lab.view = replace(lab.view, shutdown="preempted")
    lab.settle()
    assert lab.finishes() == [75]


@pytest.mark.parametrize("first", [0, 75, 130])
def test_the_first_end_that_is_decided_stands(first: int) -> None:
    lab = Lab()
    lab.begin()
    case = lab.node.cases["r"]
    case.ending.decide(first, "one")
    case.ending.decide(76, "another")
    assert case.state.ending is not None
    assert (case.state.ending.code, case.state.ending.reason) == (first, "one")
    lab.settle()
    assert lab.finishes() == [first]


@pytest.mark.parametrize("shutdown", ["preempted", "interrupted"])
def test_who_is_told_to_end_waits_for_no_leaders_word(shutdown: str) -> None:
    """The caller of one launcher ends it soon, whatever the others are about."""
    made = Cluster("abc", 3)
    made.run(8)
    asked = next(name for name in "bc" if name != made.leader())
    made.dead |= set("abc") - {asked}
    lab = made.labs[asked]
    lab.view = replace(lab.view, shutdown=shutdown)
    made.run(lab.settings.stop_grace_s + STOP_WAIT_S + 2)
    assert lab.finishes() == [SHUTDOWN_CODES[shutdown]]
