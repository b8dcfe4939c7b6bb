"""What a run's own modules decide, by value: who is heard, who keeps what, how long is waited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.actions import RESTART_RANKS
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.model import (
    FATAL,
    Beat,
    Commit,
    Ended,
    Now,
    Parked,
    Plan,
    Resume,
    Runbook,
    Settings,
    SnapshotView,
    Stop,
)
from holdfast.agent.core.run import members, policy, progress, reconcile
from holdfast.agent.core.run import plan as plans
from holdfast.agent.core.run.layout import World
from holdfast.agent.core.run.operator import Operator, born
from holdfast.agent.core.run.plan import Member, PlanView
from holdfast.agent.core.run.state import DocumentSeen, Held, Progress, RunState

from .driver import replace
from .test_rules import plan, rank, view

MANY = Settings(single_node=False)
NOW = Now(1000.0, 5000.0, "b")


# ------------------------------------------------------------------------------ orders


@pytest.mark.parametrize(("change", "parks"), [
    ({}, True), ({"park": ""}, False), ({"finished": 0}, False), ({"generation": 3}, False)])
def test_ranks_leave_when_the_plan_that_they_run_says_so(
    change: dict[str, Any], parks: bool
) -> None:
    asked = replace(plan(park="drained", park_after=9, saves=True), **change)
    here = view(generation=2, ranks=(rank(0), rank(1, state="parked")))
    effect = reconcile.park(asked, here, 7.0)
    assert (effect is not None) is parks
    if effect is not None:
        body = effect.body
        assert isinstance(body, Stop) and body.park and body.save and not body.ranks
        assert (body.grace_s, body.after, body.generation) == (7.0, 9, 2)
        assert effect.reason == "drained"
    gone = view(generation=2, ranks=(rank(0, ended=Ended(0)), rank(1, state="parked")))
    assert reconcile.park(asked, gone, 7.0) is None, "nobody is left to tell"


@pytest.mark.parametrize(("states", "ranks", "park", "generation", "true"), [
    (("ended", "running"), (0,), False, 2, True), (("ended", "running"), (1,), False, 2, False),
    (("ended", "running"), (), False, 2, False), (("ended", "ended"), (), False, 2, True),
    (("ended", "running"), (), False, 3, True),  # what was to end is another generation's
    (("parked", "running"), (0,), True, 2, True), (("parked", "ended"), (), True, 2, True),
    (("parked", "running"), (), True, 3, False), (("parked", "ended"), (0,), False, 2, False),
])
def test_an_order_to_stop_has_come_true_once_all_whom_it_names_left(
    states: tuple[str, ...], ranks: tuple[int, ...], park: bool, generation: int, true: bool
) -> None:
    shown = view(generation=generation,
                 ranks=tuple(rank(at, state=state) for at, state in enumerate(states)))
    body = Stop("r", 2, ranks, 0.0, "x", park=park)
    assert reconcile.stop_came_true(body, shown) is true


@pytest.mark.parametrize(("keep", "deleted"), [
    (1, "p1 p2 p3 p4"), (2, "p1 p2 p3"), (3, "p1 p2"), (4, "p1"), (5, ""), (9, ""),
    (0, "p1 p2 p3 p4"),  # one is always kept
])
def test_the_newest_so_many_that_were_read_back_are_kept(keep: int, deleted: str) -> None:
    commits = [Commit(1, step, f"p{step}", verified=True) for step in (5, 3, 1, 2, 4)]
    assert " ".join(reconcile.deletable(commits, (), keep, ())) == deleted


def test_what_is_bad_or_put_aside_is_neither_counted_nor_deleted() -> None:
    commits = [Commit(1, 1, "p1", verified=True), Commit(1, 2, "p2", bad="x", verified=True),
               Commit(1, 3, "p3", verified=True), Commit(1, 4, "p4"),
               Commit(1, 5, "p5", verified=True)]
    assert reconcile.deletable(commits, (), 1, ("p3",)) == ("p1", "p4")
    assert reconcile.deletable(commits, (), 2, ("p3",)) == ()  # p1 is the second
    assert reconcile.deletable(commits, (), 3, ("p3",)) == ()
    void = [*commits, Commit(1, 9, "p9", verified=True)]
    assert "p9" not in reconcile.deletable(void, ((2, 5),), 1, ()), "a person may want to see it"


# ------------------------------------------------------------------------------ who is heard


@given(st.floats(0, 100), st.booleans())
def test_a_beat_counts_for_three_fifths_of_a_lease(age_s: float, lost: bool) -> None:
    beat = Beat("b", "r", 1, boot_s=NOW.boot_s - age_s, lost=lost)
    age_s = NOW.boot_s - beat.boot_s  # as it can be told apart
    assert members.is_fresh(beat, NOW, MANY) == (
        not lost and age_s <= members.STALE_LEASES * MANY.lease_s)


@pytest.mark.parametrize(("held", "refused"), [
    ("", False), (members.ASKING, False), ("check devices: 7 of 8", True), ("a", True),
    ("z", True)])
def test_only_a_verdict_is_a_refusal(held: str, refused: bool) -> None:
    assert members.is_refused(held) is refused


@pytest.mark.parametrize(("uid", "own", "anothers"), [
    (0, 0, False), (0, 5, True), (5, 0, True), (5, 6, True), (5, 5, False), (-1, 5, False),
    (5, -1, False), (-1, -1, False)])
def test_two_users_are_two_only_where_both_are_known(uid: int, own: int, anothers: bool) -> None:
    assert members.is_anothers(uid, own) is anothers


def commits_of(*steps: int, **marks: Any) -> tuple[Commit, ...]:
    return tuple(Commit(1, step, f"p{step}", **marks) for step in steps)


def test_what_is_known_of_checkpoints_is_known_on_any_node() -> None:
    here = view(checkpoint_dir="m", commits=commits_of(1, 5, 6), snapshot=SnapshotView(1, 6, 2))
    there = Beat("b", "r", 1, boot_s=1000.0, checkpoint_dir="m", snapshot=SnapshotView(1, 6, 1),
                 commits=(*commits_of(5, verified=True), *commits_of(6, bad="digest"),
                          *commits_of(7)))
    found = members.known(here, (there,), NOW, MANY, {})
    assert {c.path: (c.verified, c.bad) for c in found.commits} == {
        "p1": (False, ""), "p5": (True, ""), "p6": (False, "digest"), "p7": (False, "")}
    assert dict(found.listed) == {"a": {"p1", "p5", "p6"}, "b": {"p1", "p5", "p6", "p7"}}, (
        "p1 is older than all that a beat has room for")
    assert [node for node, _ in found.snapshots] == ["a", "b"] and found.checkpoint_dir == "m"


@pytest.mark.parametrize("change", [
    {"checkpoint_dir": "k"}, {"checkpoint_dir": "n"}, {"checkpoint_dir": ""}, {"run": "s"},
    {"lost": True}, {"boot_s": 0.0}, {"node": "a"}, {"uid": 9}])
def test_what_concerns_another_folder_run_or_user_is_not_believed(change: dict[str, Any]) -> None:
    here = view(checkpoint_dir="m", commits=commits_of(5), uid=8)
    told = Beat("b", "r", 1, boot_s=1000.0, checkpoint_dir="m", uid=8,
                commits=commits_of(5, bad="digest"))
    assert members.known(here, (told,), NOW, MANY, {}).commits[0].bad
    assert not members.known(here, (replace(told, **change),), NOW, MANY, {}).commits[0].bad
    assert not members.known(here, (told,), NOW, Settings(), {}).commits[0].bad, "of one node"
    spare = view(checkpoint_dir="", uid=8)  # it leads, and has nothing of its own
    assert members.known(spare, (told,), NOW, MANY, {}).checkpoint_dir == "m"


@pytest.mark.parametrize(("generation", "seen"), [(1, False), (2, True), (3, False)])
def test_ranks_are_those_of_one_generation(generation: int, seen: bool) -> None:
    there = rank(1, node="b", generation=generation)
    told = Beat("b", "r", generation, boot_s=1000.0, ranks=(there,))
    found = members.ranks_of(view(ranks=(rank(0, generation=generation),)), 2, (told,), NOW, MANY)
    assert [one.rank for one in found] == ([0, 1] if seen else [])


def test_every_other_nodes_ranks_are_seen_and_this_ones_only_as_it_sees_them() -> None:
    def told(node: str, number: int) -> Beat:
        return Beat(node, "r", 1, boot_s=1000.0, ranks=(rank(number, node=node),))

    here = view(node="m", ranks=(rank(0, node="m"),))
    beats = (told("a", 1), told("z", 2), told("m", 3))  # its own beat of a while ago
    assert [one.rank for one in members.ranks_of(here, 1, beats, NOW, MANY)] == [0, 1, 2]


def test_generations_grow_over_everything_that_shows_one() -> None:
    here = view(generation=3, commits=(Commit(2, 5, "p"),))
    assert members.highest_generation(here, None, ()) == 3
    assert members.highest_generation(here, plan(generation=7), ()) == 7
    late = replace(here, commits=(Commit(9, 5, "p"),))
    assert members.highest_generation(late, plan(generation=7), ()) == 9
    beats = (Beat("b", "r", 11, boot_s=0.0), Beat("c", "other", 99, boot_s=0.0))
    assert members.highest_generation(late, plan(generation=7), beats) == 11
    sent = (Beat("b", "r", 1, boot_s=0.0, commits=(Commit(12, 5, "q"),)),
            Beat("c", "other", 1, boot_s=0.0, commits=(Commit(98, 5, "q"),)))
    assert members.highest_generation(late, plan(generation=7), sent) == 12
    assert members.highest_generation(view(generation=0), None, ()) == 0


def test_a_store_that_knows_nothing_is_told_what_the_launcher_runs() -> None:
    made = members.plan_of_launcher(view(generation=4, ranks=(rank(0), rank(1))))
    assert (made.generation, made.members, made.ranks) == (4, ("a",), ((0, "a"), (1, "a")))
    assert made.resume.kind == "fresh" and made.finished < 0


def test_another_machines_times_are_told_by_how_long_ago_they_were() -> None:
    beat = Beat("b", "r", 1, boot_s=995.0, sent_boot_s=70_995.0)  # it booted long before this one
    there = rank(1, node="b", start_boot_s=70_900.0)
    seen = members.here(there, beat, NOW)
    assert (seen.start_boot_s, seen.told_s, seen.ended) == (900.0, 5.0, None)
    dead = members.here(replace(there, ended=Ended(1, boot_s=70_990.0)), beat, NOW)
    assert dead.ended is not None and dead.ended.boot_s == 990.0 and dead.start_boot_s == 900.0
    quiet = members.here(rank(1, node="b", ended=Ended(1, boot_s=70_990.0)), beat, NOW)
    assert quiet.start_boot_s == 0.0 and quiet.ended.boot_s == 990.0  # type: ignore[union-attr]
    old = members.here(there, replace(beat, sent_boot_s=0.0), NOW)  # of a release that says none
    assert (old.start_boot_s, old.told_s) == (70_900.0, 5.0)
    assert members.here(there, replace(beat, boot_s=1001.0), NOW).told_s == 0.0


def test_who_is_asked_to_end_is_named_until_a_step_is_agreed() -> None:
    asked = (Beat("b", "r", 2, boot_s=1000.0, shutdown="preempted"),)
    here = view(generation=2)
    said = members.asked_to_end(here, plan(), asked, NOW, MANY)
    assert said == "b: its launcher was preempted"
    for agreed in ({"park": "x"}, {"finished": 0}, {"finished": 75}):
        assert not members.asked_to_end(here, plan(**agreed), asked, NOW, MANY)
    for nobody in ((replace(asked[0], run="s"),), (replace(asked[0], lost=True),),
                   (replace(asked[0], node="c"),), ()):  # c has no rank of it
        assert not members.asked_to_end(here, plan(), nobody, NOW, MANY)
    mine = replace(here, shutdown="interrupted")
    assert members.asked_to_end(mine, plan(), asked, NOW, MANY) == (
        "a: its launcher was interrupted")


# ------------------------------------------------------------------------------ pauses


def paused(until_s: float = 0.0, since_s: float = 0.0, on: bool = True) -> Plan:
    return replace(plan(), paused=on, paused_until_wall_s=until_s, paused_since_wall_s=since_s)


def operator(plan_: Plan | None = None, **held: Any) -> Operator:
    return Operator(RunState("r", document=DocumentSeen(plan=plan_), held=Held(**held)))


@pytest.mark.parametrize(("until_s", "wall_s", "over"), [
    (0.0, 1e9, False), (500.0, 499.9, False), (500.0, 500.0, True), (500.0, 501.0, True)])
def test_a_pause_ends_when_its_time_is_over_and_one_without_a_time_never(
    until_s: float, wall_s: float, over: bool
) -> None:
    asking = operator(paused=True, until_wall_s=until_s)
    asking.pass_time(Now(1.0, wall_s, "b"), leads=True)
    assert (asking.state.held.paused, asking.state.held.resumed) == (not over, over)


def test_a_pause_in_the_document_lasts_as_long_here_whatever_the_clock_shows() -> None:
    """Who leads next counts from when he read it: his clock may be an hour ahead."""
    asking = operator(paused(until_s=600.0, since_s=500.0))
    for wall_s, over in ((9000.0, False), (9099.9, False), (9100.0, True)):
        asking.pass_time(Now(1.0, wall_s, "b"), leads=True)
        assert asking.state.held.resumed is over
    follows = operator(paused(until_s=600.0, since_s=500.0))
    for wall_s in (9000.0, 9999.0):
        follows.pass_time(Now(1.0, wall_s, "b"), leads=False)
    assert not follows.state.held.resumed, "who leads ends it"
    follows.state.document = DocumentSeen(plan=paused(on=False))
    follows.pass_time(Now(1.0, 9999.0, "b"), leads=False)
    assert follows.state.held == Held(), "another pause is counted anew"


def test_whoever_wrote_a_pause_and_leads_no_more_keeps_no_mark_of_his_own() -> None:
    asking = operator(paused(), paused=True, until_wall_s=700.0)
    asking.pass_time(Now(1.0, 100.0, "b"), leads=True)
    assert asking.state.held.paused
    asking.pass_time(Now(1.0, 100.0, "b"), leads=False)
    assert not asking.state.held.paused and not asking.state.held.until_wall_s
    unheard = operator(None, paused=True)
    unheard.pass_time(Now(1.0, 100.0, "b"), leads=False)
    assert unheard.state.held.paused, "nobody has read of it yet"


def test_a_resume_is_done_when_the_document_says_so() -> None:
    asking = operator(paused(), resumed=True)
    asking.shown(paused())
    assert asking.state.held.resumed
    for done in (paused(on=False), None):
        asking = operator(done, resumed=True)
        asking.shown(done)
        assert not asking.state.held.resumed
    assert born(True, 5.0) == Held(paused=True, until_wall_s=5.0)
    assert born(False, 5.0) == Held()


# ------------------------------------------------------------------------------ progress


@pytest.mark.parametrize(("quick", "wait_s"), [
    (0, 0.0), (5, 0.0), (6, 0.1), (7, 0.2), (8, 0.4), (14, 25.6), (15, 30.0), (500, 30.0)])
def test_a_loop_of_quick_failures_waits_twice_as_long_each_time(quick: int, wait_s: float) -> None:
    state = RunState("r", progress=Progress(quick=quick))
    assert progress.pause_s(state) == pytest.approx(wait_s)


def step_of(grade: str, boot_s: float = 1000.0) -> Any:
    return SimpleNamespace(now=Now(boot_s, 5000.0, "b"), view=view(grade=grade))


@pytest.mark.parametrize(("grade", "steps", "on"), [
    ("trainer", (7, 7), False), ("trainer", (8, 7), False), ("trainer", (8, 8), True),
    ("script", (1, 0), False), ("script", (1, 1), True), ("opaque", (0, 0), True)])
def test_it_goes_on_once_every_rank_did_a_step_that_nobody_had_done(
    grade: str, steps: tuple[int, ...], on: bool
) -> None:
    state = RunState("r", progress=Progress(base_step=7, peak_step=9))
    ranks = tuple(rank(at, step=step) for at, step in enumerate(steps))
    assert progress.goes_on(step_of(grade), state, ranks) is on
    starts = (replace(ranks[0], state="starting"), ranks[1])
    assert not progress.goes_on(step_of(grade), state, starts)
    done = tuple(replace(one, state="ended", ended=Ended(0), step=0) for one in ranks)
    assert progress.goes_on(step_of(grade), state, done), "it has ended well"
    one_done = (ranks[0], done[1])
    assert progress.goes_on(step_of(grade), state, one_done) is (grade == "opaque")


@pytest.mark.parametrize(("grade", "step", "went_s"), [
    ("trainer", 8, 990.0), ("trainer", 10, 986.0), ("script", 1, 990.0), ("script", 3, 986.0),
    ("script", 0, 990.0)])
def test_when_it_went_on_is_reckoned_back_to_the_first_new_step(
    grade: str, step: int, went_s: float
) -> None:
    state = RunState("r", progress=Progress(base_step=7, broken_boot_s=980.0))
    ranks = (rank(0, step=step, step_time_s=2.0, still_s=4.0, told_s=6.0),
             rank(1, step=step, step_time_s=2.0, still_s=9.0, told_s=6.0))
    assert progress.went_on_boot_s(step_of(grade), state, ranks) == went_s
    late = RunState("r", progress=Progress(base_step=7, broken_boot_s=999.0))
    assert progress.went_on_boot_s(step_of(grade), late, ranks) == 999.0


def test_what_a_generation_earned_is_its_own_steps_alone() -> None:
    cause = Cause("rank_killed", 2, "x", step=30)
    was = Progress(peak_step=40, base_step=10, seen_step=30, began_boot_s=900.0,
                   last_step_boot_s=960.0, trained_s=100.0, quick=3)
    state = RunState("r", progress=was, document=DocumentSeen(plan=plan(generation=2, peak=25)))
    progress.broken_off(step_of("trainer"), state, cause, False)
    now = state.progress
    assert (now.earned_steps, now.moved, now.base_step) == (5, True, 40)
    assert (now.trained_s, now.quick, now.broken_boot_s) == (160.0, 0, 1000.0)
    older = RunState("r", progress=was, document=DocumentSeen(plan=plan(generation=1, peak=25)))
    progress.broken_off(step_of("trainer"), older, cause, False)
    assert older.progress.earned_steps == 20, "a plan of another generation says nothing"
    none = RunState("r", progress=replace(was, seen_step=9, last_step_boot_s=0.0))
    progress.broken_off(step_of("trainer"), none, cause, False)
    assert (none.progress.earned_steps, none.progress.moved) == (0, False)
    assert none.progress.trained_s == 100.0
    script = RunState("r", progress=replace(was, seen_step=1, began_boot_s=999.0))
    progress.broken_off(step_of("script"), script, cause, False)
    assert script.progress.moved and script.progress.quick == 4, "its steps begin anew"
    unpaid = RunState("r", progress=replace(was, seen_step=0, began_boot_s=999.0))
    progress.broken_off(step_of("trainer"), unpaid, replace(cause, charged=False), False)
    assert unpaid.progress.quick == 0


# ------------------------------------------------------------------------------ survivors


@pytest.mark.parametrize(("held", "step", "whole"), [
    ([(7, 0, 1)], 7, True), ([(7, 0, 1)], 8, False), ([], 7, False),
    ([(7, 0, 2)], 7, False), ([(7, 0, 2), (7, 1, 2)], 7, True),
    ([(7, 0, 2), (7, 0, 2)], 7, False), ([(7, 0, 2), (6, 1, 2)], 7, False),
    ([(7, 0, 2), (7, 2, 2)], 7, False),  # there is no third shard
    ([(7, 0, 1), (7, 0, 2), (7, 1, 2)], 7, True),
])
def test_a_step_is_whole_where_every_shard_of_it_is_held(
    held: list[tuple[int, int, int]], step: int, whole: bool
) -> None:
    parked = [Parked(at, False, "x", shard=shard, shards=shards) for at, shard, shards in held]
    assert plans.is_whole(parked, step) is whole
    assert not plans.is_whole([replace(one, torn=True) for one in parked], step)
    ready = [replace(one, step=step - 1, ready=True) for one in parked]
    if whole:
        assert plans.is_whole(ready, step), "they can end that step by themselves"
        assert not plans.is_whole([replace(one, step=step - 2) for one in ready], step)
        assert not plans.is_whole([replace(one, ready=False) for one in ready], step)


def survivors(
    *parked: tuple[int, bool], places: dict[int, str] | None = None, **more: Any
) -> Any:
    """Ranks 0, 1, ... of this node, parked at (step, torn); the resume that a plan makes of it."""
    current = replace(plan(generation=2), ranks=tuple((at, "a") for at in range(len(parked))),
                      resume=Resume("disk", step=5))
    ranks = tuple(rank(at, generation=2, state="parked", parked=Parked(step, torn, "x"))
                  for at, (step, torn) in enumerate(parked))
    seen = PlanView(**{"run": "r", "grade": "trainer", "leader": True, "highest": 2, "nproc": 2,
                       "reason": "x", "members": (), "current": current, "ranks": ranks} | more)
    return plans.survivor_resume(seen, dict(current.ranks) if places is None else places)


def test_the_highest_untorn_step_is_resumed_from_and_who_parked_lives_on() -> None:
    assert survivors((7, False), (8, False)) == (Resume("survivor", step=8, generation=2), (0, 1))
    assert survivors((7, False), (8, True)) == (Resume("survivor", step=7, generation=2), (0, 1))
    assert survivors((8, True), (8, True)) is None
    assert survivors((4, False)) is None, "it never took over its generation's state"
    assert survivors((5, False))[0].step == 5
    assert survivors((7, False), (8, False), bad_from=8)[0].step == 7
    assert survivors((8, False), bad_from=8) is None
    assert survivors((0, False), current=None)[0].step == 0, "of a run that no plan has yet"
    dead = rank(0, generation=2, state="ended", parked=Parked(9, False, "x"), ended=Ended(1))
    moved = rank(1, generation=2, state="parked", parked=Parked(9, False, "x"), node="z")
    assert survivors((7, False), (8, False), ranks=(dead, moved)) is None
    raised = replace(dead, state="parked")
    assert survivors((7, False), (8, False), ranks=(raised, moved)) == (
        Resume("survivor", step=9, generation=2), (0,)), "it raised, and its process is there"


def test_a_process_lives_on_as_the_rank_that_its_place_on_its_node_has_now() -> None:
    """A smaller world moves nodes to other slots: who is there keeps the state, not the number."""
    both = survivors((7, False), (8, False), places={4: "a", 5: "a", 0: "b"})
    assert both == (Resume("survivor", step=8, generation=2), (4, 5))
    assert survivors((7, False), (8, False), places={3: "a"}) == (
        Resume("survivor", step=7, generation=2), (3,)), "there is a place for one of them"
    assert survivors((7, False), (8, False), places={0: "b", 1: "b"}) is None


def test_a_replica_that_a_smaller_world_moves_is_resumed_from() -> None:
    """Two groups of two nodes; one of the first is lost, and the others' ranks become 0 and 1."""
    nodes = ("a", "b", "c", "d")
    current = replace(plan(generation=2), ranks=tuple(enumerate(nodes)), members=nodes,
                      resume=Resume("fresh"))
    ranks = tuple(rank(at, generation=2, node=node, state="parked",
                       parked=Parked(6, False, "x", shard=at % 2, shards=2))
                  for at, node in enumerate(nodes) if node != "b")
    seen = PlanView(
        run="r", grade="trainer", leader=True, highest=2, nproc=1, reason="x", current=current,
        ranks=ranks, world=World(2, 4, unit=2),
        members=tuple(Member(node, fresh=node != "b", lost=node == "b") for node in nodes))
    made, why = plans.plan_run(seen)
    assert made is not None, why
    assert made.ranks == ((0, "c"), (1, "d")) and made.keep == (0, 1)
    assert made.resume == Resume("survivor", step=6, generation=2)


@pytest.mark.parametrize(("snapshots", "usable"), [
    ({"a": (2, 9, 2), "b": (2, 9, 1)}, True),
    ({"a": (2, 9, 3), "b": (2, 9, 1)}, True),
    ({"a": (2, 9, 1), "b": (2, 9, 1)}, False),  # a has two ranks
    ({"a": (2, 9, 2)}, False), ({"a": (2, 9, 2), "b": (2, 8, 1)}, False),
    ({"a": (1, 9, 2), "b": (1, 9, 1)}, False),  # ranks of it may have been elsewhere
    ({}, False),
])
def test_memory_is_resumed_from_where_all_nodes_hold_one_step_of_it(
    snapshots: dict[str, tuple[int, int, int]], usable: bool
) -> None:
    current = plan(generation=2)
    seen = PlanView("r", "trainer", True, 2, 2, "x", (), current=current, snapshots=tuple(
        (node, SnapshotView(*one)) for node, one in snapshots.items()))
    found = plans.whole_snapshot(seen, dict(current.ranks))
    assert (found is not None) is usable
    assert plans.whole_snapshot(seen, dict(current.ranks) | {2: "a"}) is None, "a rank moved"
    assert plans.whole_snapshot(replace(seen, current=None), dict(current.ranks)) is None
    nobody = replace(seen, current=replace(current, ranks=()))
    assert plans.whole_snapshot(nobody, {}) is None


def test_one_nodes_memory_may_be_of_the_generation_before() -> None:
    current = replace(plan(generation=2), ranks=((0, "a"),))
    seen = PlanView("r", "trainer", True, 2, 1, "x", (), current=current,
                    snapshots=(("a", SnapshotView(1, 9, 1)),))
    assert plans.whole_snapshot(seen, {0: "a"}) == SnapshotView(1, 9, 1)


# ------------------------------------------------------------------------------ policy


def test_while_the_breaker_is_open_no_node_is_taken_out_or_paid_for() -> None:
    key = "f/exclude_node/node/b"
    given = policy.Grant("restart", "f", spent=((key, 1), ("o/x/run/r", 2), ("restarts", 3)),
                         charged=(key, "restarts"), rung="exclude_node")
    held = policy.unexcluded(given, "too many")
    assert held.spent == (("o/x/run/r", 2), ("restarts", 3)) and held.charged == ("restarts",)
    assert held.action == "restart" and not held.rung
    assert held.reason == "f; no node is excluded: the breaker is open: too many"
    twice = policy.unexcluded(replace(given, spent=((key, 2),)), "too many")
    assert twice.spent == ((key, 1),)


@pytest.mark.parametrize(("code", "user", "told"), [
    (3, True, 3), (0, True, 1), (75, True, 1), (76, True, 1), (78, True, 1), (3, False, 76),
    (0, False, 76)])
def test_a_script_never_speaks_with_a_code_of_ours(code: int, user: bool, told: int) -> None:
    assert policy.finish_code(Cause("f", 1, "x", code=code, user=user)) == told


@pytest.mark.parametrize(("spent", "count", "restarts", "reason"), [
    (2, 2, 9, "f of run/r used up its 2 restarts within 24 h, all that its runbook allows (9 of "
              "the run's 9)"),
    (5, 2, 9, "f of run/r used up its 5 restarts within 24 h, all that its runbook allows (9 of "
              "the run's 9)"),  # its budget was made smaller meanwhile
    (1, 2, 9, "all 9 restarts are used up"), (1, 2, 0, "no restart is allowed (--max-restarts 0)"),
])
def test_why_no_restart_is_left_is_said_by_what_was_spent(
    spent: int, count: int, restarts: int, reason: str
) -> None:
    book = Runbook("f", FATAL, "rank", (RESTART_RANKS,), budget_count=count)
    account = policy.Account(
        "r", restarts, spent=((f"f/{RESTART_RANKS}/run/r", spent), ("restarts", restarts)))
    over = policy.grant(Cause("f", 1, "x", step=-1), account, {"f": book}, Settings())
    assert (over.action, over.fault, over.reason, over.code) == (
        policy.FINISH, "budget_spent", reason, 76)


def test_ten_new_steps_are_progress_and_thirty_two_failures_are_remembered() -> None:
    assert [policy.made_progress(plan(), steps, None) for steps in (9, 10)] == [False, True]
    signs = {f"signature/f/{step:02}/e": 1 for step in range(40)} | {"restarts": 3}
    kept = dict(policy.bounded(signs | {"signature/f/39/e": 2}))
    assert len(kept) == 33 and kept["restarts"] == 3 and kept["signature/f/39/e"] == 2


def test_what_is_done_again_after_progress_forgets_where_it_failed() -> None:
    spent = (("a/b/c", 2), ("restarts", 1), ("signature/f/7/e", 2))
    assert policy.cleared(spent) == spent[:2]
    now = plan(granted=("charged:a/b/c", "charged:restarts", "seen"))
    assert policy.give_back(spent, now) == (("a/b/c", 1), ("signature/f/7/e", 2))
