"""Stillness: who is suspected, when, with what evidence, and when acting is cheaper."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.core.detect.ranks.hang import HangView, look, name_culprits
from holdfast.agent.core.detect.ranks.limits import Costs
from holdfast.agent.core.model import RankView, Settings, Stop, Verdict
from holdfast.agent.core.series.wait_history import History

from .driver import Cluster, Lab, replace


def trained(grade: str = "trainer", nproc: int = 2, to: int = 20, **view: Any) -> Lab:
    lab = Lab(grade=grade, nproc=nproc, **view)
    lab.begin()
    lab.train(to)
    return lab


def stand(lab: Lab, seconds: float, step_s: float = 0.5) -> list[str]:
    """Let every live rank stand still for so long, in ticks; the kinds of effects asked for."""
    kinds: list[str] = []
    done = 0.0
    while done < seconds - 1e-9:
        tick = min(step_s, seconds - done)
        for rank in lab.view.ranks:
            if rank.state == "running":
                lab.change(rank.rank, still_s=rank.still_s + tick)
        kinds += lab.kinds(lab.step(tick))
        done += tick
    return kinds


def hang(lab: Lab) -> list[Verdict]:
    return [v for v in lab.decision.verdicts if v.detector == "hang"]


def stall(lab: Lab, culprit: int = 1, phase: str = "data", **fields: Any) -> None:
    """The culprit stops in a phase of its own; the others wait for it in a collective."""
    for rank in lab.view.ranks:
        mine = rank.rank == culprit
        lab.change(rank.rank, phase=phase if mine else "collective", still_s=0.0,
                   seq=((0, 40 if mine else 41),), **(fields if mine else {}))


def test_a_stopped_process_is_proof_after_a_second() -> None:
    lab = trained()
    lab.change(1, proc_state="T", beat_age_s=0.5)
    assert lab.kinds(lab.step(0.5)) == ["evidence"] and hang(lab) == []
    assert 0.5 < lab.decision.next_step_s < 0.6
    lab.change(1, beat_age_s=1.06, still_s=1.0)
    effects = lab.step(0.56)
    assert [(v.fault, v.subject, v.act) for v in hang(lab)] == [
        ("rank_stopped", "run/r/rank/1", True)
    ]
    body = effects[-1].body
    assert isinstance(body, Stop) and (body.ranks, body.grace_s) == ((1,), 0.0)
    lab.park(0, 20)
    assert lab.kinds(lab.settle()) == ["put", "start"]
    assert lab.starts()[-1].keep == (0,) and lab.starts()[-1].resume.kind == "survivor"


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_a_stopped_rank_whose_page_was_not_read_is_at_no_step(grade: str) -> None:
    """As when its process was stopped before it was told its new generation."""
    lab = trained(grade)
    lab.change(1, page=False, step=0, phase="unknown", proc_state="T", stopped_s=1.2)
    lab.step(0.1)
    (verdict,) = hang(lab)
    assert verdict.act and dict(verdict.evidence)["step"] == "unknown"
    lab.settle()
    if grade == "trainer":
        lab.park(0, 20)
    lab.settle()
    assert lab.view.generation == 2
    assert not [key for key, _ in lab.plan().spent if key.startswith("signature/")]


@pytest.mark.parametrize(("read", "step", "told"), [
    ((), -1, "unknown"), ((0,), 20, "20"), ((0, 1), 21, "20")])
def test_ranks_that_nothing_tells_apart_are_at_the_highest_step_that_was_read(
    read: tuple[int, ...], step: int, told: str
) -> None:
    ranks = tuple(
        RankView(number, "a", 100 + number, 1, "running", page=number in read, still_s=50.0,
                 step=20 + number if number in read else 0) for number in (0, 1))
    found = look(HangView("r", ranks, Costs("script"), 1000.0), History(), Settings())
    cause = found.findings[0].cause
    assert (cause.rank, cause.step) == (-1, step)
    assert f"step {told};" in dict(cause.evidence)["rank 0"]


@pytest.mark.parametrize(("steps", "named"), [
    ((20, 20, None), ()), ((20, 19, None), ()), ((20, 19, 20), (1,)), ((None, None, None), ())])
def test_a_rank_whose_page_was_not_read_is_no_step_behind(
    steps: tuple[int | None, ...], named: tuple[int, ...]
) -> None:
    """It may be the one, as whoever is behind may; that it is at step 0 says nothing."""
    ranks = tuple(
        RankView(number, "a", 100 + number, 1, "running", page=step is not None, still_s=50.0,
                 step=step or 0) for number, step in enumerate(steps))
    found, how = name_culprits(ranks, History(), None, "trainer")
    assert tuple(rank.rank for rank in found if len(found) == 1) == named, how
    assert all(rank in found for rank in ranks if not rank.page)


def test_a_stop_under_a_debugger_is_left_to_the_person() -> None:
    lab = trained()
    lab.change(1, proc_state="t", traced=True, stopped_s=900.0, still_s=900.0)
    assert stand(lab, 3.0) == [] and hang(lab) == []
    lab.change(1, proc_state="T", traced=True)
    assert stand(lab, 3.0) == [] and hang(lab) == []


def test_a_verdict_waits_at_most_a_fifth_of_a_second_for_evidence() -> None:
    lab = trained()
    lab.hold = {"evidence"}
    lab.change(1, proc_state="T", stopped_s=1.2)
    assert lab.kinds(lab.step(0.1)) == ["evidence"]
    assert lab.decision.next_step_s <= 0.2
    assert lab.kinds(lab.step(0.2)) == ["stop"]


def test_a_stall_is_suspected_with_the_right_rank_and_then_taken_back() -> None:
    lab = trained()
    stall(lab, 1)
    stand(lab, 2.3)
    assert hang(lab) == [] and lab.decision.next_step_s < 0.2
    assert stand(lab, 0.2) == ["evidence"]
    verdict = hang(lab)[0]
    assert (verdict.subject, verdict.severity, verdict.act) == ("run/r/rank/1", "warn", False)
    assert "sequence" in verdict.reason
    assert stand(lab, 1.0) == []
    assert ("where", "train.py:12 in step") in lab.decision.incidents[0].evidence
    lab.all(still_s=0.0, step=21)
    lab.step(0.1)
    assert lab.decision.incidents[0].state == "taken_back"
    assert lab.decision.detector_counts == (("hang", "false", 1),)


def test_acting_waits_for_the_cost_of_a_restart() -> None:
    for active, limit_s in ((False, 6.0), (True, 18.0)):
        lab = trained(startup_s=2.0)
        stall(lab, 1, active=active)
        assert "stop" not in stand(lab, limit_s - 0.1)
        assert "stop" in stand(lab, 0.2, 0.1)
        assert lab.decision.verdicts[0].fault == "rank_hung"


def test_after_a_measured_restart_its_cost_is_what_counts() -> None:
    lab = trained(startup_s=60.0)
    lab.kill(1)
    lab.step()
    lab.park(0, 20)
    lab.settle()
    lab.train(40, 0.4)
    stall(lab, 1)
    assert "stop" in stand(lab, 4.0)


def test_never_before_three_times_the_longest_wait_that_ended_well() -> None:
    lab = trained(startup_s=1.5)
    lab.all(phase="data", still_s=0.0)
    lab.step(0.1)
    stand(lab, 4.0)
    lab.all(still_s=0.0, step=21)
    lab.step(0.05)
    stall(lab, 1, phase="data")
    assert "stop" not in stand(lab, 11.5)
    assert "stop" in stand(lab, 1.5)


def test_the_same_step_stalling_again_doubles_the_wait() -> None:
    lab = trained(startup_s=2.0)
    for wait_s in (6.2, 12.2):
        stall(lab, 1)
        assert "stop" not in stand(lab, wait_s - 0.4)
        assert "stop" in stand(lab, 0.4, 0.1)
        lab.park(0, 20)
        lab.settle()
        lab.node.kept.runs["r"].history.restarts_s = []
        lab.all(phase="data", still_s=0.0)


def test_a_held_gil_is_a_stale_ticker_in_a_living_process() -> None:
    lab = trained()
    lab.change(1, beat_age_s=1.6, still_s=1.6, proc_state="R", active=True)
    lab.step(0.1)
    assert [(v.fault, v.subject) for v in hang(lab)] == [("rank_gil_held", "run/r/rank/1")]


def test_every_ticker_stale_at_once_is_a_frozen_machine_not_a_held_gil() -> None:
    lab = trained()
    lab.all(beat_age_s=1.6, still_s=1.6, proc_state="R")
    lab.step(0.1)
    assert hang(lab) == []


def test_quiet_phases_are_never_killed_by_the_limits_of_a_step() -> None:
    for phase in ("checkpoint", "eval", "compile", "exit"):
        lab = trained(startup_s=1.0)
        stall(lab, 0, phase=phase)
        assert "stop" not in stand(lab, 300.0, 2.5), phase


def test_a_later_start_is_measured_against_the_first() -> None:
    lab = trained(startup_s=7.0)
    lab.kill(1)
    lab.step()
    lab.park(0, 20)
    lab.settle()
    lab.all(phase="startup", still_s=0.0)
    assert "stop" not in stand(lab, 69.0, 2.5)
    assert "stop" in stand(lab, 2.0)


def test_a_compiler_under_way_excuses_everybody() -> None:
    lab = trained(startup_s=1.0, compiling="inductor")
    stall(lab, 1, phase="forward_backward", active=True)
    assert stand(lab, 1200.0, 2.5) == []


def test_a_scripts_first_step_is_startup_though_another_of_its_name_made_steps() -> None:
    """It reads its data for ten minutes, in a phase that its hooks do not know."""
    lab = trained("script", startup_s=5.0, to=500)
    lab.kill(1)
    lab.settle()
    lab.train(500)
    assert lab.node.cases["r"].state.history.restarts_s
    lab.view = replace(lab.view, connected=False)
    lab.step(2.0)
    lab.view = replace(lab.view, connected=True, registered_boot_s=lab.boot_s, generation=0,
                       ranks=(), state="idle", startup_s=0.0)
    lab.step(1.0)
    lab.begin()
    lab.all(phase="unknown")
    assert "stop" not in stand(lab, 600.0, 2.5) and not any(one.act for one in hang(lab))


def test_a_slow_first_step_is_startup_until_a_step_was_finished() -> None:
    lab = Lab(startup_s=0.0)
    lab.begin()
    lab.all(phase="forward_backward")
    assert stand(lab, 500.0, 2.5) == []


def test_a_script_is_not_ended_before_its_floor_and_ten_times_its_p99() -> None:
    lab = trained(grade="script", startup_s=1.0)
    stall(lab, 1, phase="unknown")
    assert "stop" not in stand(lab, 59.5)
    assert hang(lab)[0].subject == "run/r/rank/1"
    assert "stop" in stand(lab, 1.0)


def test_a_users_limit_overrides_both_ways_but_not_start_up() -> None:
    lab = trained(grade="script", hang_limit_s=2.0)
    stall(lab, 1, phase="unknown")
    assert "stop" not in stand(lab, 1.9)
    assert "stop" in stand(lab, 0.15, 0.05)
    patient = trained(hang_limit_s=500.0)
    stall(patient, 1)
    assert "stop" not in stand(patient, 499.0, 2.5)
    compiles = trained(hang_limit_s=10.0, compiling="rank 1: neuronx-cc")
    stall(compiles, 1, phase="compile")
    assert "stop" not in stand(compiles, 9.5) and "stop" in stand(compiles, 1.0)
    uploading = trained(grade="script", hang_limit_s=2.0)
    stall(uploading, 1, phase="exit", beat_age_s=60.0)
    assert stand(uploading, 60.0, 1.0) == []
    starting = Lab(grade="script", hang_limit_s=2.0)
    starting.begin()
    assert stand(starting, 60.0, 1.0) == []


def test_an_opaque_job_is_left_alone_unless_stopped_or_limited() -> None:
    lab = Lab(grade="opaque")
    lab.begin()
    assert stand(lab, 4000.0, 2.5) == []
    lab.change(1, proc_state="T", stopped_s=1.0)
    assert "stop" in lab.kinds(lab.settle())


def test_when_nothing_tells_them_apart_nobody_is_blamed() -> None:
    lab = trained()
    lab.all(phase="forward_backward", seq=((0, 41),), still_s=0.0)
    kinds = stand(lab, 2.6)
    assert kinds == ["evidence", "evidence"]
    verdict = hang(lab)[0]
    assert verdict.subject == "run/r" and "culprit unknown" in verdict.reason


@pytest.mark.parametrize("stuck", [(), (1,)])
def test_ranks_that_nothing_tells_apart_leave_with_their_state_and_who_cannot_is_ended(
    stuck: tuple[int, ...],
) -> None:
    lab = trained()
    carry_out = lab._stop

    def leaves(body: Stop) -> None:
        for number in {0, 1} - set(stuck) if body.park else ():
            lab.park(number, 20)
        if not body.park:
            carry_out(body)

    lab._stop = leaves  # type: ignore[method-assign]
    lab.all(phase="forward_backward", seq=((0, 41),), still_s=0.0)
    stand(lab, 30.0)
    plan = lab.plan()
    assert (plan.generation, plan.resume.kind, plan.resume.step) == (2, "survivor", 20)
    assert set(plan.keep) == {0, 1} - set(stuck)
    stops = [one.body for one in lab.log if isinstance(one.body, Stop)]
    assert [(one.park, one.ranks) for one in stops] == [(True, ()), *((False, (1,)) for _ in stuck)]

    # A generation that has done nothing holds nothing more than what it was given: all are ended.
    lab.log.clear()
    lab.all(phase="forward_backward", seq=((0, 41),), still_s=0.0, step=20)
    stand(lab, 60.0)
    stops = [one.body for one in lab.log if isinstance(one.body, Stop)]
    assert stops and not any(one.park for one in stops) and set(stops[0].ranks) == {0, 1}


@pytest.mark.parametrize("deaf_s", [0, 3, 60])
def test_a_leader_without_ranks_has_those_of_other_nodes_leave_and_waits_for_the_first(
    deaf_s: int,
) -> None:
    """The word goes over the links that the ranks may be waiting for: it may be long on its way."""
    cluster = Cluster("abc", 2, startup_s=1.0)
    cluster.run(6)
    spare = (set("abc") - {node for _, node in cluster.plan().ranks}).pop()
    cluster.leases["r"] = (spare, 1e9)
    working = [lab for lab in cluster.labs.values() if lab.name != spare]
    for lab in working:
        lab.all(step=9, phase="forward_backward", step_time_s=0.5, still_s=0.0)
    cluster.run(2)
    ordered: list[int] = []
    for lab in working:
        carry_out = lab._stop

        def obey(body: Stop, carry_out: Any = carry_out) -> None:
            ordered.append(second)
            if not body.park or second - ordered[0] >= deaf_s:
                carry_out(body)

        lab._stop = obey  # type: ignore[method-assign]
    for second in range(1, 60):
        for lab in working:
            if lab.view.ranks[0].state == "running" and lab.view.generation == 1:
                lab.change(lab.view.ranks[0].rank, still_s=float(second))
        cluster.step()
        if cluster.plan().generation == 2:
            break
    plan = cluster.plan()
    assert plan.generation == 2
    if deaf_s < 5:
        assert (plan.resume.kind, plan.resume.step, plan.keep) == ("survivor", 9, (0, 1))
    else:
        assert plan.resume.kind == "fresh" and second - ordered[0] <= 7


def test_the_one_that_stood_still_first_is_named_when_the_rest_is_equal() -> None:
    lab = trained()
    lab.all(phase="forward_backward", seq=((0, 41),))
    lab.change(1, still_s=0.3)
    stand(lab, 2.5)
    assert hang(lab)[0].subject == "run/r/rank/1"


def test_ranks_that_counted_apart_from_the_start_are_compared_from_there() -> None:
    """One of them made ten collectives more before the common step, and one less since."""
    lab = trained("script")
    lab.all(still_s=1.0, phase="forward_backward")
    for numbers, bases, who in (((42, 51), {0: 0, 1: 10}, (1,)), ((42, 53), {0: 0, 1: 10}, (0,)),
                                ((42, 51), {}, (0,)), ((42, 52), {0: 0, 1: 10}, (0, 1)),
                                ((42, 51), None, (0, 1))):
        for rank, number in enumerate(numbers):
            lab.change(rank, seq=((0, number),))
        named, _ = name_culprits(lab.view.ranks, History(), bases, "script")
        assert tuple(one.rank for one in named) == who, (numbers, bases)


def test_a_trainers_rank_that_is_a_step_behind_is_the_one() -> None:
    """Stages of a pipeline count different collectives, and their steps tell all the same."""
    for grade, named in (("trainer", "run/r/rank/1"), ("script", "run/r")):
        lab = trained(grade, 3)
        for rank in lab.view.ranks:
            lab.change(rank.rank, still_s=0.0, phase="forward_backward", seq=(),
                       step=rank.step + (rank.rank != 1))
        stand(lab, 90.0 if grade == "script" else 5.0)
        assert {verdict.subject for verdict in hang(lab)} == {named}, grade


def test_a_waiting_rank_is_not_suspected_while_another_still_moves() -> None:
    lab = trained()
    stall(lab, 1)
    lab.change(0, still_s=3.0)
    lab.step(0.1)
    assert hang(lab) == []


def test_collectives_that_differ_name_the_odd_one() -> None:
    lab = trained(nproc=3)
    for rank, size in ((0, 512), (1, 512), (2, 256)):
        lab.change(
            rank, flight=((40, "all_reduce", "[8]"), (41, "all_reduce", f"[{size}]")),
            still_s=0.6, phase="collective",
        )
    lab.step(0.6)
    verdict = hang(lab)[0]
    assert (verdict.fault, verdict.subject) == ("collective_mismatch", "run/r/rank/2")
    assert ("rank 2", "collective 41: all_reduce [256]") in verdict.evidence


def test_where_nobody_is_named_nobody_is_looked_at() -> None:
    lab = trained()
    for rank, size in ((0, 512), (1, 256)):
        lab.change(rank, flight=((41, "all_reduce", f"[{size}]"),), still_s=0.6,
                   phase="collective")
    assert "evidence" not in lab.kinds(lab.step(0.6))
    assert (hang(lab)[0].fault, hang(lab)[0].subject) == ("collective_mismatch", "run/r")


def test_of_two_ranks_nobody_is_blamed_and_who_left_its_habit_is_told() -> None:
    """It may be the one that went on as it should: its peer forgot the evaluation."""
    habit = tuple((n, "all_reduce", "[512]" if n % 2 else "[8]") for n in range(30, 41))
    for new, mine, other in ((True, "[4096]", "[512]"), (False, "[4096]", "[1]")):
        lab = trained()
        lab.change(1, flight=(*habit, (41, "all_reduce", mine)), still_s=0.6, phase="collective")
        lab.change(0, flight=(*habit, (41, "all_reduce", other)), still_s=0.6, phase="collective")
        lab.step(0.6)
        verdict = hang(lab)[0]
        assert (verdict.fault, verdict.subject) == ("collective_mismatch", "run/r")
        assert verdict.confidence < 1.0
        assert ("rank 1 alone never made one like its own before" in verdict.reason) == new


def test_a_skipped_collective_blames_the_rank_behind_not_the_one_that_raised() -> None:
    lab = trained()
    lab.change(0, step_seq=((17, 170), (18, 180), (19, 190)))
    lab.change(1, step_seq=((17, 170), (18, 179), (19, 189)), still_s=0.1)
    lab.commit(17)
    lab.commit(18)
    lab.raises(0, "RuntimeError: Gloo: Connection closed by peer")
    lab.step(0.1)
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject) == ("collective_skipped", "run/r/rank/1")
    lab.park(1, 19)
    lab.settle()
    # What both made from step 18 on is wrong, survivors' and commits' alike.
    assert (lab.starts()[-1].resume.kind, lab.starts()[-1].resume.step) == ("disk", 17)


def test_whatever_ends_the_ranks_nothing_behind_a_skipped_collective_is_resumed_from() -> None:
    """One differing step of moving ranks is no proof yet, and the kill came before the next."""
    lab = trained()
    lab.change(0, step_seq=((17, 170), (18, 180), (19, 190)))
    lab.change(1, step_seq=((17, 170), (18, 180), (19, 189)))
    lab.commit(18)
    lab.kill(0)
    lab.step(0.1)
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject) == ("rank_killed", "run/r/rank/0")
    lab.park(1, 19)
    lab.settle()
    assert (lab.starts()[-1].resume.kind, lab.starts()[-1].resume.step) == ("disk", 18)
    assert "a collective was left out by the end of step 19" in lab.plan().reason
    assert any("left out" in text for _, text in lab.decision.incidents[0].timeline)


def test_a_pipelines_stages_may_count_differently_for_good() -> None:
    """Only ranks that advanced alike are compared: stage 1 enters half as many collectives."""
    lab = Lab(grade="script")
    lab.begin()
    for done in range(8, 30):
        steps = range(done - 7, done + 1)
        lab.all(step=done, still_s=0.0, state="running", phase="unknown")
        lab.change(0, step_seq=tuple((s, 4 * s) for s in steps), seq=((0, 4 * done),))
        lab.change(1, step_seq=tuple((s, 2 * s) for s in steps), seq=((0, 2 * done),))
        lab.step(0.15)
        assert hang(lab) == []


def test_a_script_that_left_one_out_is_proven_after_it_was_seen_in_lockstep() -> None:
    lab = trained("script")
    steps = range(14, 22)
    lab.all(step=21, still_s=0.0, step_seq=tuple((s, 2 * s) for s in steps))
    lab.step(0.15)
    behind = tuple((s, 2 * s - (s > 21)) for s in range(16, 24))
    lab.change(0, step=23, step_seq=tuple((s, 2 * s) for s in range(16, 24)))
    lab.change(1, step=23, step_seq=behind)
    lab.step(0.3)
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject) == ("collective_skipped", "run/r/rank/1")


def test_one_differing_step_between_moving_ranks_is_not_yet_proof() -> None:
    lab = trained()
    lab.change(0, step_seq=((18, 180), (19, 190)))
    lab.change(1, step_seq=((18, 180), (19, 189)))
    lab.step(0.1)
    assert hang(lab) == []


def test_a_detector_that_observes_says_what_it_would_have_done() -> None:
    lab = Lab(settings=Settings(act=("ended",)))
    lab.begin()
    lab.train(20)
    stall(lab, 1)
    assert "stop" not in stand(lab, 30.0)
    assert lab.decision.incidents[0].state == "open"
    assert lab.decision.incidents[0].would_have == "restart_ranks: the rank would have ended"


def test_a_frozen_agent_believes_no_still_page() -> None:
    lab = trained()
    stall(lab, 1)
    lab.all(still_s=40.0)
    assert lab.step(40.0) == [] and hang(lab) == []
    lab.all(still_s=0.0, step=21)
    assert lab.step(1.0) == [] and lab.decision.incidents == ()


def test_a_suspected_rank_that_dies_is_one_incident_more_and_no_false_alarm() -> None:
    lab = trained()
    stall(lab, 1)
    stand(lab, 3.0)
    lab.kill(1)
    lab.step(0.1)
    assert sorted((i.fault, i.state) for i in lab.decision.incidents) == [
        ("rank_hung", "closed"), ("rank_killed", "acted"),
    ]
    assert ("hang", "false", 1) not in lab.decision.detector_counts


def test_all_ranks_left_a_broken_collective_and_nobody_ended() -> None:
    lab = trained()
    lab.park(0, 20)
    lab.park(1, 20)
    lab.settle()
    assert lab.starts()[-1].keep == (0, 1) and lab.starts()[-1].resume.step == 20


def test_alone_in_the_world_steps_since_the_last_state_count() -> None:
    lab = trained(nproc=1, startup_s=1.0, to=40)
    lab.commit(20)
    lab.all(still_s=0.0, phase="data")
    # 3 * (1 s + 20 steps of 0.15 s) = 12 s
    assert "stop" not in stand(lab, 11.8)
    assert "stop" in stand(lab, 0.4, 0.1)
    assert replace(lab.plan()).generation >= 1


@pytest.mark.parametrize("limit_s", [0.0, 8.0])
def test_while_nothing_is_heard_of_a_node_its_ranks_may_be_those_that_are_waited_for(
    limit_s: float,
) -> None:
    """A beat is stale long before its node is lost: who is left then is not the only rank."""
    cluster = Cluster("abc", 2, startup_s=1.0, hang_limit_s=limit_s)
    cluster.run(6)
    leader = cluster.labs[cluster.leader()]
    (rank,) = leader.view.ranks
    for lab in cluster.labs.values():
        lab.all(step=5, phase="forward_backward", step_time_s=0.5, still_s=0.0)
    cluster.run(2)
    (silent,) = {node for _, node in cluster.plan().ranks} - {leader.name}
    cluster.dead.add(silent)
    left_s = 0
    for second in range(1, 15):  # one and a half leases
        if not left_s:
            leader.change(rank.rank, phase="collective", still_s=float(second))
        cluster.step()
        if not left_s and leader.view.ranks[0].state == "parked":
            left_s = second
    assert left_s == (8 if limit_s else 0), "a limit of the user's holds whatever is so"
    if not limit_s:
        (found,) = hang(leader)
        assert found.subject == "run/r" and found.severity == "warn"
        assert f"nothing is heard of {silent}, where the others are" in found.reason
        cluster.run(8)
        assert cluster.plan().reason.startswith(f"{silent}: not heard of")
        assert leader.name in cluster.plan().members and silent not in cluster.plan().members
