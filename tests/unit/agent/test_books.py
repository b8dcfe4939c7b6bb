"""What a run costs and brings, by exact numbers: samples, tokens, MFU, when it will be done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Plan, RankView, Resume, Runbook, RunView
from holdfast.agent.core.run import policy
from holdfast.agent.launchers.protocol import Goal
from holdfast.agent.web import books

GOAL = Goal(team="search", deadline_wall_s=1234.0, total_steps=1000, samples_per_step=4096.0,
            tokens_per_step=8192.0, flops_per_step=3e12, peak_flops=2.5e13)
NOW_S = 1000.0
LEDGER = (("m5", "training", 60.0), ("m5", "collective_wait", 15.0), ("m5", "recovery", 25.0),
          ("other", "idle", 900.0))


def rank(number: int, step: int, step_time_s: float, state: str = "running") -> RankView:
    return RankView(number, "node-a", 100 + number, 1, state, step=step, step_time_s=step_time_s)


def state_of(goal: Goal = GOAL, ledger: Any = (), page: Any = None) -> Any:
    monitors = {0: SimpleNamespace(view=page)}
    session = SimpleNamespace(hello=SimpleNamespace(goal=goal), monitors=monitors)
    plan = Plan("m5", 3, ("node-a",), ((0, "node-a"),), Resume("fresh"), "r",
                spent=((policy.RESTARTS, 2),))
    return SimpleNamespace(
        launchers=SimpleNamespace(session=lambda run: session if run == "m5" else None),
        snapshot=SimpleNamespace(now=SimpleNamespace(wall_s=NOW_S),
                                 decision=SimpleNamespace(plans=(plan,), run_ledger=ledger)))


def view(*ranks: RankView, run: str = "m5") -> RunView:
    return RunView(run, "node-a", "trainer", 4, ranks=ranks, max_restarts=5)


def test_what_a_run_brings_is_its_step_by_the_median_of_its_ranks() -> None:
    ranks = (rank(0, 400, 0.2), rank(1, 398, 0.25), rank(2, 401, 9.0),
             rank(3, 7, 0.001, state="ended"))  # neither its step nor its time counts
    found = books.rates(state_of(), view(*ranks))
    assert found.samples_s == 4096 / 0.25 and found.tokens_s == 8192 / 0.25
    assert found.mfu == pytest.approx(0.48)  # 12 of 25 Tflop/s
    assert (found.total_steps, found.team, found.deadline_wall_s) == (1000, "search", 1234.0)
    assert found.eta_s == (1000 - 398) * 0.25  # from the last rank's step
    assert found.restarts_left == 3


def test_a_run_that_will_be_late_says_so_and_that_somebody_must_decide() -> None:
    late = books.rates(state_of(), view(rank(0, 400, 7.0)))  # 600 steps, and 234 s until then
    assert late.late_s == 600 * 7.0 - 234.0
    assert books.lateness(late) == (
        "see to its deadline: at its pace so far it is done 66 min after it; "
        "holdfast ledger says what it lost")
    far = books.rates(state_of(), view(rank(0, 400, 70.0)))
    assert "11.6 h after it" in books.lateness(far)
    in_time = books.rates(state_of(), view(rank(0, 400, 0.1)))
    assert in_time.late_s == 60.0 - 234.0 and books.lateness(in_time) == ""
    for goal, steps in ((Goal(total_steps=1000), 400), (replace(GOAL, total_steps=0), 400)):
        unknown = books.rates(state_of(goal), view(rank(0, steps, 7.0)))
        assert unknown.late_s is None and books.lateness(unknown) == ""


def test_a_budgets_rest_is_that_of_the_place_where_it_was_spent_most() -> None:
    spent = (("rank_killed/restart_ranks/run/m5/rank/0", 1), ("rank_killed/exclude_node/node/a", 1),
             ("rank_killed/restart_ranks/run/m5/rank/1", 2), ("rank_hung/restart_ranks/run/m5", 9),
             (policy.RESTARTS, 2), ("signature/rank_killed/rank 0/ValueError", 1),
             ("taken_away/restart_ranks/run/m5", 1))
    state = state_of()
    state.runbooks = {name: Runbook(name, "fatal", "rank", budget_count=3)
                      for name in ("rank_killed", "rank_hung")}
    (plan,) = state.snapshot.decision.plans
    state.snapshot.decision.plans = (replace(plan, spent=spent), replace(plan, run="other"))
    assert books.budgets_left(state, "m5") == {
        ("rank_killed", "restart_ranks"): 1, ("rank_killed", "exclude_node"): 2,
        ("rank_hung", "restart_ranks"): 0}
    assert books.budgets_left(state, "none") == {}


def test_what_it_lost_so_far_it_goes_on_losing() -> None:
    state = state_of(ledger=LEDGER)
    assert books.share(state, "m5") == 0.75
    found = books.rates(state, view(rank(0, 400, 0.25)))
    assert found.eta_s == 600 * 0.25 / 0.75
    assert found.samples_s == 4096 / 0.25  # what a second of training brings


@pytest.mark.parametrize(("ledger", "share"), [
    ((), 1.0),
    ((("m5", "startup", 59.9),), 1.0),  # too little has gone by
    ((("m5", "startup", 60.0),), 0.01),  # never 0: it would never be done
    ((("m5", "startup", 30.0), ("m5", "training", 30.0)), 0.5),
    ((("other", "training", 600.0), ("m5", "paused", 90.0), ("m5", "training", 10.0)), 0.1),
])
def test_the_share_of_training(ledger: Any, share: float) -> None:
    assert books.share(state_of(ledger=ledger), "m5") == share


def test_what_was_not_said_is_not_known() -> None:
    found = books.rates(state_of(Goal()), view(rank(0, 400, 0.25)))
    assert found == books.Rates(restarts_left=3)
    assert books.rates(state_of(), view(run="elsewhere")) == books.Rates()
    still = books.rates(state_of(), view(rank(0, 0, 0.0)))  # before its first step
    assert (still.samples_s, still.tokens_s, still.mfu, still.eta_s) == (None,) * 4
    half = Goal(flops_per_step=3e12)
    assert books.rates(state_of(half), view(rank(0, 4, 0.25))).mfu is None


def test_the_trainers_page_says_what_its_launcher_did_not() -> None:
    page = SimpleNamespace(total_steps=500, rate=640.0)
    found = books.rates(state_of(Goal(), page=page), view(rank(0, 100, 0.5)))
    assert (found.total_steps, found.tokens_s, found.eta_s) == (500, 640.0, 200.0)
    beyond = books.rates(state_of(Goal(), page=page), view(rank(0, 501, 0.5)))
    assert beyond.eta_s == 0.0
