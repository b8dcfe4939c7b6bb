"""The pure rules at their edges: what must hold for every input, on both sides of a limit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.detect.ranks import collective, ended, limits
from holdfast.agent.core.effects import in_flight
from holdfast.agent.core.model import (
    Beat,
    Commit,
    Effect,
    Ended,
    Lease,
    Now,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
)
from holdfast.agent.core.nodes import breaker
from holdfast.agent.core.run import members, policy, reconcile, validity
from holdfast.agent.core.run import plan as plans
from holdfast.agent.core.series.wait_history import History

replace = msgspec.structs.replace
RANKS = ((0, "a"), (1, "a"), (2, "b"))


def rank(number: int, **more: Any) -> RankView:
    return RankView(rank=number, pid=100 + number,
                    **{"node": "a", "generation": 1, "state": "running", **more})


def plan(generation: int = 2, **more: Any) -> Plan:
    return Plan("r", generation, ("a", "b"), RANKS, Resume("fresh"), "x", **more)


def view(**more: Any) -> RunView:
    return RunView(**{"run": "r", "node": "a", "grade": "trainer", "nproc": 2, **more})


# ------------------------------------------------------------------------------ the breaker


@given(st.integers(0, 60), st.integers(0, 400))
def test_the_breaker_opens_on_three_nodes_that_are_more_than_a_twentieth(
    sick: int, fleet: int
) -> None:
    faults = {"f": tuple(f"n{number}" for number in range(sick)) * 2, "other": ("x",) * 50}
    opened, why = breaker.is_open(faults, "f", fleet, Settings())
    assert opened == (sick >= 3 and 20 * sick > max(fleet, 1))
    assert f"f on {sick} of {fleet} nodes" in why
    if opened:  # the number that is told is the least that would have opened it
        need = int(why.rsplit(", ", 1)[1].split()[0])
        assert need == next(n for n in range(1, 500) if n >= 3 and 20 * n > max(fleet, 1))


# ------------------------------------------------------------------------------ one chain

PLANS = st.lists(st.integers(0, 30), max_size=12)  # where each generation resumed


@given(PLANS, st.integers(1, 14), st.integers(0, 31))
def test_a_history_voids_exactly_what_a_later_plan_went_back_behind(
    resumed: list[int], generation: int, step: int
) -> None:
    history: validity.History = ()
    for number, at in enumerate(resumed, 1):
        history = validity.extend_history(history, number, at)
    void = any(number > generation and at < step for number, at in enumerate(resumed, 1))
    assert validity.is_valid(generation, step, history) == (not void)
    steps = [at for _, at in history]
    assert steps == sorted(set(steps)) and [g for g, _ in history] == sorted(dict(history))


def test_a_generation_told_again_replaces_its_entry() -> None:
    """A plan whose write was lost is made once more, with the same number."""
    assert validity.extend_history(((1, 0), (3, 9)), 3, 12) == ((1, 0), (3, 12))
    assert validity.extend_history(((1, 0), (5, 9)), 3, 12) == ((1, 0), (3, 12))


# ------------------------------------------------------------------------------ plan and launcher


@pytest.mark.parametrize("finished", [0, 1, 76])
def test_a_run_that_is_over_is_not_started_again(finished: int) -> None:
    behind = view(generation=1)
    assert reconcile.start(plan(), behind, 5.0) is not None
    assert reconcile.start(plan(finished=finished), behind, 5.0) is None
    assert reconcile.start(plan(), view(generation=2), 5.0) is None
    assert reconcile.start(plan(), view(node="c"), 5.0) is None


def test_who_is_kept_is_of_this_node_and_parked() -> None:
    parked = [rank(number, state="parked") for number in (0, 2)]
    dead = rank(1, state="ended", ended=Ended(1))
    effect = reconcile.start(plan(keep=(0, 1, 2)), view(ranks=(*parked, dead)), 5.0)
    assert effect is not None and effect.body.keep == (0,) and effect.body.ranks == (0, 1)
    raised = rank(1, state="parked", ended=Ended(1, outcome="exception"))
    effect = reconcile.start(plan(keep=(0, 1, 2)), view(ranks=(*parked, raised)), 5.0)
    assert effect is not None and effect.body.keep == (0, 1), "it raised, and its process stays"
    assert effect.body.world == 3
    # Its processes go on as the ranks that their places have now.
    moved = replace(plan(keep=(1, 2)), ranks=((0, "x"), (1, "a"), (2, "a")))
    effect = reconcile.start(moved, view(ranks=(rank(4, state="parked"), rank(5))), 5.0)
    assert effect is not None and effect.body.ranks == (1, 2) and effect.body.keep == (1,)


@pytest.mark.parametrize(("grade", "permit_s"), [("trainer", 0.0), ("opaque", 5.0),
                                                 ("script", 5.0)])
def test_what_commits_to_no_history_of_ours_runs_by_permit(grade: str, permit_s: float) -> None:
    effect = reconcile.start(plan(), view(grade=grade), 5.0)
    assert effect is not None and effect.body.permit_s == permit_s


def test_what_runs_elsewhere_now_is_stopped_at_once() -> None:
    old = view(node="c", ranks=(rank(0),))
    effect = reconcile.stale(plan(), old)
    assert effect is not None and effect.body.grace_s == 0.0
    assert reconcile.stale(plan(), view(ranks=(rank(0),))) is None
    assert reconcile.stale(plan(generation=1), old) is None


@given(leader=st.booleans(), here=st.integers(1, 3), state=st.sampled_from(["running", "idle"]),
       newer=st.booleans(), same=st.booleans(), finished=st.sampled_from([-1, 0, 76]))
def test_checkpoints_are_deleted_by_the_leader_of_what_runs_alone(
    leader: bool, here: int, state: str, newer: bool, same: bool, finished: int
) -> None:
    shown = view(generation=here, state=state, checkpoint_dir="d" if same else "e",
                 commits=())
    commits = (Commit(3 if newer else 2, 5, "p"),)
    allowed = reconcile.may_delete(
        plan(checkpoint_dir="d", finished=finished), shown, commits, leader)
    assert allowed == (leader and here == 2 and state == "running" and not newer and same
                       and finished < 0)


# ------------------------------------------------------------------------------ whose ranks


def test_a_ranks_own_node_is_believed_before_a_beat() -> None:
    now, settings = Now(100.0, 1000.0, "b"), Settings()

    def beat(node: str, number: int, generation: int = 1, run: str = "r") -> Beat:
        there = rank(number, generation=generation, step=7, node=node)
        return Beat(node, run, generation, boot_s=100.0, ranks=(there,))

    mine = rank(0, step=5)
    beats = (beat("b", 1), beat("z", 2), beat("a", 0), beat("c", 3, generation=2),
             beat("d", 4, run="other"))
    found = members.ranks_of(view(ranks=(mine, rank(5, generation=9))), 1, beats, now, settings)
    assert [(r.rank, r.node, r.step) for r in found] == [(0, "a", 5), (1, "b", 7), (2, "z", 7)]


@given(st.floats(0, 1e4))
def test_a_member_is_lost_after_two_leases_and_a_leader_until_its_own_ends(silent_s: float) -> None:
    now, settings = Now(2e4, 1000.0, "b"), Settings()
    lost = silent_s > members.LOST_LEASES * settings.lease_s
    assert members.is_lost(now.boot_s - silent_s, now, settings) == lost
    ended_s = now.boot_s - silent_s
    for holder, until_s, leads in (("a", now.boot_s + 0.1, True), ("b", now.boot_s + 0.1, False),
                                   ("a", ended_s, False)):
        assert plans.is_leader("r", "a", (Lease("r", holder, until_s),), now) == leads
    assert not plans.is_leader("r", "a", (Lease("other", "a", now.boot_s + 9),), now)


# ------------------------------------------------------------------------------ ends


@pytest.mark.parametrize(("how", "well"), [
    (Ended(0), True), (Ended(1), False), (Ended(137, 9), False), (Ended(0, 9), False),
    (Ended(134, 6, "done"), True), (Ended(0, 0, "exit"), True), (Ended(1, 0, "exit"), False),
    (Ended(0, 0, "exception"), False), (Ended(0, 0, "bad_checkpoint"), False)])
def test_the_workers_own_word_decides_whether_it_ended_well(how: Ended, well: bool) -> None:
    assert ended.ended_well(how) is well


def end(number: int, boot_s: float, error: str = "") -> RankView:
    how = Ended(1, 0, "exception", error, boot_s=boot_s)
    return rank(number, state="ended", ended=how)


def test_the_first_that_is_no_consequence_is_the_root() -> None:
    victim = end(0, 10.0, "RuntimeError: Connection closed by peer")
    root, late = end(1, 10.2, "ValueError: bad row"), end(2, 10.0 + ended.CASCADE_S + 1, "KeyError")
    failed = ended.failed_ranks((late, root, victim))
    assert [r.rank for r in failed] == [0, 1, 2]
    assert ended.first_root(failed) == (root, True)
    assert ended.first_root([victim, late]) == (victim, False)
    assert ended.first_root([]) == (None, False)


def test_whose_fault_an_end_was() -> None:
    def cause(code: int, number: int = 0, outcome: str = "", error: str = "",
              oom: bool = False) -> ended.Cause:
        one = rank(3, ended=Ended(code, number, outcome, error))
        return ended.cause_of(one, 0, (one.pid,) if oom else ())

    for said, fault, user in (
        (cause(1, 0, "exception", "ValueError: x"), "rank_exited", True),
        (cause(3, 0, "exit"), "rank_exited", True), (cause(3), "rank_exited", True),
        (cause(139, 11), "rank_exited", True), (cause(137, 9), "rank_killed", False),
        (cause(137, 9, oom=True), "rank_oom_killed", False),
        (cause(1, 0, "bad_checkpoint"), "checkpoint_bad", False),
    ):
        assert (said.fault, said.user, said.rank) == (fault, user, 3), said
    unseen = ended.victims_only(end(0, 1.0, "Connection closed by peer"), 2, ())
    assert (unseen.rank, unseen.pid, unseen.node) == (-1, 0, "")
    assert "rank 0 and 2 more" in unseen.reason


# ------------------------------------------------------------------------------ hangs


@given(active=st.booleans(), phase=st.sampled_from(["unknown", "startup", "eval"]),
       still_s=st.floats(0, 1e6), compiled=st.booleans())
def test_a_working_script_without_an_optimizer_is_never_ended(
    active: bool, phase: str, still_s: float, compiled: bool
) -> None:
    """It shows no steps, so that stillness of its page says nothing while it works."""
    costs = limits.Costs("script", startup_s=2.0, started=False,
                         compiling="cc" if compiled else "")
    one = rank(0, phase=phase, active=active, still_s=still_s)
    limit_s = limits.act_s(one, costs, History(), Settings())
    if active and not compiled:
        assert limit_s == limits.NEVER
    else:
        assert limit_s >= Settings().script_floor_s


@given(st.floats(0.1, 50), st.booleans(), st.sampled_from(["script", "trainer"]))
def test_a_script_is_never_ended_by_cost_within_its_floor(
    startup_s: float, active: bool, grade: str
) -> None:
    costs = limits.Costs(grade, startup_s=startup_s)
    settings = Settings()
    limit_s = limits.act_s(rank(0, step=9, active=active), costs, History(), settings)
    odds = settings.odds_active if active else settings.odds
    cost_s = max(limits.base(History(), settings), odds * startup_s)
    assert limit_s == (max(cost_s, settings.script_floor_s) if grade == "script" else cost_s)


def test_pages_that_still_move_prove_nothing_about_collectives() -> None:
    """What two pages show of one collective was not read at the same moment."""
    first = rank(0, step=5, flight=((9, "all_reduce", "[4]"),), step_seq=((4, 8), (5, 9)))
    other = rank(1, step=5, flight=((9, "broadcast", "[4]"),), step_seq=((4, 8), (5, 8)))
    bases = {0: 0, 1: 0}

    def proven(**more: Any) -> tuple[Any, Any]:
        pair = tuple(replace(one, **more) for one in (first, other))
        return collective.mismatch(pair, 1.0), collective.skipped(pair, 0, 1.0, bases)

    assert proven() == (None, None)
    assert proven(still_s=collective.SETTLED_S - 0.01) == (None, None)
    for settled in ({"still_s": collective.SETTLED_S}, {"state": "parked"}):
        mismatch, skipped = proven(**settled)
        assert mismatch is not None and skipped is not None and skipped.rank == 1
    # Nor does one that moves, beside one that stands: it may be a collective ahead.
    assert collective.mismatch((replace(first, still_s=9.0), other), 1.0) is None


# ------------------------------------------------------------------------------ budgets


def test_only_what_a_generation_made_itself_gives_its_restarts_back() -> None:
    """A checkpoint that an earlier generation left proves nothing of this one."""
    now = plan(generation=4, granted=("charged:restarts", "x"), spent=(("restarts", 2), ("o", 1)))
    assert not policy.made_progress(now, 0, None)
    assert not policy.made_progress(now, 0, (3, 900))
    assert not policy.made_progress(now, policy.PROGRESS_STEPS - 1, (5, 1))
    assert policy.made_progress(now, 0, (4, 1))
    assert policy.made_progress(now, policy.PROGRESS_STEPS, None)
    assert policy.give_back(now.spent, now) == (("restarts", 1), ("o", 1))


@pytest.mark.parametrize(("grade", "step", "quick", "counted"), [
    ("trainer", 0, False, True), ("trainer", 7, False, True), ("trainer", -1, False, False),
    ("script", 0, False, True), ("script", 7, False, False), ("script", -1, False, False),
    ("opaque", 0, False, False), ("opaque", 0, True, True)])
def test_what_can_be_called_the_same_failure(
    grade: str, step: int, quick: bool, counted: bool
) -> None:
    cause = ended.Cause("rank_exited", 1, "x", step=step, error="e")
    account = policy.Account("r", 9, grade=grade, quick=quick)
    assert bool(policy.signature(cause, account)) is counted


# ------------------------------------------------------------------------------ effects


def test_what_came_true_may_be_asked_again_at_once() -> None:
    """A failure makes the next one wait; that levels show the effect ends it as done."""
    body: Any = None
    table, draft = in_flight.InFlight(), Effect("", "finish", "run/r", "x", 5.0, body)
    first = table.add(1, draft, 0.0)
    assert first is not None and table.retry_at_s(4.5) == 0.5 and table.retry_at_s(5.0) == 3600.0
    table.settle((), 5.1)
    assert table.failures(1, "run/r", "finish") == 1 and table.add(1, draft, 5.1) is None
    again = table.add(1, draft, 100.0)
    assert again is not None and again.id != first.id
    table.came_true(again.id)
    assert not table.pending and table.failures(1, "run/r", "finish") == 0
    assert table.add(1, draft, 0.0) is not None


def counted(*rows: tuple[tuple[int, int], ...], still_s: float = 1.0) -> tuple[RankView, ...]:
    """Ranks with these numbers of collectives at the ends of their steps."""
    return tuple(RankView(number, "a", 7, 1, "running", step=row[-1][0], step_seq=row,
                          still_s=still_s) for number, row in enumerate(rows))


def steps(first: int, each: int = 10) -> tuple[tuple[int, int], ...]:
    return tuple((step, first + each * step) for step in range(1, 6))


def test_ranks_of_a_script_that_advance_alike_are_compared_however_many_and_from_where() -> None:
    for ranks in (2, 3, 5):
        alike = counted(*(steps(100 * number) for number in range(ranks)))
        assert collective.learn_bases(alike) == {n: 100 * n + 10 for n in range(ranks)}
        apart = counted(*(steps(0) for _ in range(ranks - 1)), steps(0, 11))
        assert collective.learn_bases(apart) is None
    assert collective.learn_bases(counted(steps(0))) is None, "one has nobody to be compared with"
    still = counted(steps(0, 0), steps(0, 0))
    assert collective.learn_bases(still) is None, "steps without any"


@pytest.mark.parametrize(("agreed", "bad_from"), [(True, 8), (False, 4)])
def test_where_no_common_step_is_good_all_since_the_resume_is_in_doubt(
    agreed: bool, bad_from: int
) -> None:
    whole, less = ((7, 70), (8, 80), (9, 90)), ((7, 70), (8, 79), (9, 89))
    start = 0 if agreed else 1
    cause = collective.skipped(counted(whole[start:], less[start:]), 3, 1.0, {})
    assert cause is not None and (cause.rank, cause.bad_from) == (1, bad_from)


def test_three_that_all_differ_are_a_mismatch_without_a_culprit() -> None:
    ranks = tuple(RankView(number, "a", 7, 1, "running", still_s=1.0,
                           flight=((41, "all_reduce", f"[{number}]"),)) for number in range(3))
    cause = collective.mismatch(ranks, 1.0)
    assert cause is not None and (cause.fault, cause.rank) == ("collective_mismatch", -1)
    assert len(cause.evidence) == 3
