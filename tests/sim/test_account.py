"""The simulator's own account of a run: which hand-made histories it calls a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.simulate import account

MOST = 3
CRASH, LOST, ANOTHERS = (("charged:restarts", f"charged:{fault}/restart_run/job")
                         for fault in ("rank_crash", "node_lost", "rank_hang"))
DEATHS = [4, 5, 6]


def found(hits: list[int], answers: dict[int, tuple[str, ...]], committed: tuple[int, ...] = ()
          ) -> list[int]:
    """`answers`: generation -> what its plan was charged for; the newest is being judged."""
    job: Any = SimpleNamespace(bug_hits=hits, committed=dict.fromkeys(committed, 1.0))
    plans: dict[int, Any] = {one: SimpleNamespace(granted=granted)
                             for one, granted in answers.items()}
    plan = plans.pop(max(plans))
    return account.looped(job, plans, plan, MOST)


CRASHES = dict.fromkeys((4, 5, 6, 7), CRASH)


def test_as_many_deaths_of_one_bug_in_a_row_are_a_loop_whatever_each_was_answered_as() -> None:
    assert found(DEATHS, CRASHES) == DEATHS
    assert found([1, *DEATHS], {1: CRASH, **CRASHES}) == DEATHS
    assert found(DEATHS, CRASHES | {6: ANOTHERS}) == DEATHS


@pytest.mark.parametrize(("hits", "answers", "committed"), [
    pytest.param(DEATHS[1:], CRASHES, (), id="too few deaths"),
    pytest.param([3, 4, 5], CRASHES, (), id="the last generation did not die of it"),
    pytest.param([3, 5, 6], {3: CRASH, **CRASHES}, (), id="one between did not die of it"),
    pytest.param(DEATHS, CRASHES, (5,), id="a checkpoint between two deaths"),
    pytest.param(DEATHS, CRASHES | {6: LOST}, (), id="a lost node was answered in its place"),
    pytest.param(DEATHS, CRASHES | {7: LOST}, (), id="and by the plan that is judged"),
    pytest.param(DEATHS, CRASHES | {6: ()}, (), id="a death that cost nothing"),
])
def test_and_anything_between_makes_it_none(
    hits: list[int], answers: dict[int, tuple[str, ...]], committed: tuple[int, ...]
) -> None:
    assert found(hits, answers, committed) == []


def test_a_checkpoint_before_the_first_death_and_what_was_answered_there_do_not_count() -> None:
    assert found(DEATHS, CRASHES | {4: LOST}, committed=(3, 4)) == DEATHS
