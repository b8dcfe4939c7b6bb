"""When failures are the same one again, and how fast they may follow each other."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Runbook

from .driver import Lab


def lab_of(grade: str, max_restarts: int = 99, budget: int = 50) -> Lab:
    lab = Lab(grade=grade, max_restarts=max_restarts)
    for fault in ("rank_exited", "rank_killed"):
        lab.runbooks[fault] = Runbook(fault, "fatal", "rank", ("restart_ranks", "stop_run"), budget)
    lab.begin()
    return lab


def failing(grade: str, step: int, times: int, lives_s: float = 20.0, page: bool = True) -> Lab:
    """The same error on rank 1, again and again, at this step by its own counter."""
    lab = lab_of(grade)
    for _ in range(times):
        if lab.finishes():
            break
        lab.step(lives_s)
        lab.all(step=step, still_s=0.0)
        lab.step(0.1)
        lab.change(1, page=page, step=step if page else 0)
        lab.raises(1, "ValueError: same", code=7)
        lab.settle()
    return lab


def why(lab: Lab) -> str:
    return [e.reason for e in lab.log if e.kind == "finish"][-1]


def test_an_equal_count_of_a_script_is_no_loop() -> None:
    """Its steps begin anew in each generation: only the caller's --max-restarts holds."""
    lab = failing("script", 2, 8)
    assert lab.finishes() == [] and dict(lab.plan().spent)["restarts"] == 8


def test_a_script_that_fails_before_its_first_step_is_a_loop() -> None:
    lab = failing("script", 0, 8)
    assert lab.finishes() == [7] and "3 times before its first step" in why(lab)


def test_steps_in_between_clear_what_failed_before_the_first() -> None:
    lab = lab_of("script")
    for step in (0, 0, 5, 0, 0):
        lab.step(20.0)
        lab.all(step=step, still_s=0.0)
        lab.step(0.1)
        lab.raises(1, "ValueError: same", code=7)
        lab.settle()
    assert lab.finishes() == []


def test_a_poison_batch_of_the_trainer_is_a_loop_at_its_true_step() -> None:
    lab = lab_of("trainer")
    lab.commit(30)
    for _ in range(3):
        lab.step(20.0)
        lab.train(37)
        lab.raises(0, "ValueError: same", code=7)
        lab.raises(1, "ValueError: same", code=7)
        lab.settle()
    assert lab.finishes() == [7] and "3 times at step 37" in why(lab)


def test_a_step_that_nobody_read_is_no_number() -> None:
    """An agent that finds a rank dead does not know where it was."""
    lab = failing("trainer", 19, 1, page=False)
    assert not [key for key, _ in lab.plan().spent if key.startswith("signature/")]
    assert lab.finishes() == []


@pytest.mark.parametrize("lives_s", [0.2, 60.0])
def test_a_command_that_fails_at_once_is_a_loop_and_one_that_ran_is_not(lives_s: float) -> None:
    lab = failing("opaque", 0, 5, lives_s)
    assert lab.finishes() == ([7] if lives_s < 1 else [])
    if lives_s < 1:
        assert "3 times within moments of its start" in why(lab)


def test_quick_failures_wait_longer_and_longer_and_it_is_said() -> None:
    lab = lab_of("script")
    waits = []
    for number in range(18):
        lab.step(0.1)
        lab.all(step=2, still_s=0.0)
        lab.step(0.1)
        lab.raises(number % 2, f"ValueError: {number}")
        before, begun_s = lab.view.generation, lab.boot_s
        lab.settle()
        if lab.view.generation == before:
            assert "before the next start" in dict(lab.decision.reasons)["r"]
            assert "before the next start" in str(lab.decision.incidents[-1].timeline)
        while lab.view.generation == before and lab.boot_s - begun_s < 60:
            lab.step(max(0.01, lab.decision.next_step_s))
        waits.append(round(lab.boot_s - begun_s, 1))
        assert lab.view.generation == before + 1
    assert waits[:5] == [0.0] * 5
    assert waits[5:9] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.15)  # steps are ticks apart
    assert max(waits) < 32.0 and waits[-1] >= 30.0
    lab.step(20.0)  # a generation that lives is followed at once
    lab.raises(0, "ValueError: x")
    begun_s = lab.boot_s
    lab.settle()
    assert lab.view.generation == 20 and lab.boot_s == begun_s


def test_a_spent_budget_tells_its_number_and_the_runs() -> None:
    lab = lab_of("script", 1000, 10)
    for number in range(16):
        lab.step(20.0)
        lab.all(step=3, still_s=0.0)
        lab.step(0.1)
        lab.kill(0 if number < 5 else 1)
        lab.settle()
    assert lab.finishes() == [76]
    assert "rank_killed of run/r/rank/1 used up its 10 restarts within 24 h" in why(lab)
    assert "(15 of the run's 1000)" in why(lab)


def killed(grade: str, times: int, max_restarts: int, steps: int, seconds: float) -> Lab:
    """Rank 1 is killed again and again, each time behind so many steps and seconds of one life."""
    lab = lab_of(grade, max_restarts, 10)
    for _ in range(times):
        if lab.finishes():
            break
        for _ in range(4):
            lab.step(seconds / 4)
            lab.all(step=steps, still_s=0.0)
        lab.step(0.1)
        lab.kill(1)
        lab.settle()
    return lab


@pytest.mark.parametrize(("grade", "steps", "seconds"), [
    ("script", 500, 20.0), ("script", 3, 900.0), ("opaque", 0, 900.0)])
def test_lives_that_did_something_leave_the_callers_number_alone(
    grade: str, steps: int, seconds: float,
) -> None:
    """Each costs the run a restart, and no runbook's budget ends it before."""
    lab = killed(grade, 30, 1000, steps, seconds)
    assert lab.finishes() == [] and dict(lab.plan().spent)["restarts"] == 30
    few = killed(grade, 30, 12, steps, seconds)
    assert few.finishes() == [76] and "all 12 restarts are used up" in why(few)


@pytest.mark.parametrize(("grade", "steps", "seconds"), [
    ("script", 9, 20.0), ("script", 0, 900.0), ("opaque", 0, 50.0)])
def test_lives_that_did_hardly_anything_use_the_runbooks_budget_up(
    grade: str, steps: int, seconds: float,
) -> None:
    lab = killed(grade, 30, 1000, steps, seconds)
    said = "used up its 10 restarts" if steps or grade == "opaque" else "3 times before its first"
    assert lab.finishes() == [76] and said in why(lab)


def test_a_new_process_that_fails_in_its_first_step_fails_at_the_step_it_went_on_from() -> None:
    """Its page has counted none yet: told as another failure, before the first step of all, the
    loop would end as spent restarts, and each two of its turns would count anew."""
    lab = lab_of("trainer")
    lab.train(104)
    for turn in range(4):
        if lab.finishes():
            break
        assert lab.rank(1).step == (104 if turn == 0 else 0)
        lab.raises(1, "ValueError: same", code=7)
        lab.park(0, 104)
        lab.settle()
    assert lab.finishes() == [7] and "3 times at step 104" in why(lab)


def test_the_rank_that_hangs_is_named_and_not_the_one_that_is_new() -> None:
    """In its first step behind a re-join the new one has ended none, and is no step behind."""
    lab = lab_of("trainer")
    lab.train(20)
    lab.kill(1)
    lab.park(0, 20)
    lab.settle()
    assert (lab.rank(0).step, lab.rank(1).step) == (20, 0)
    for _ in range(40):
        still_s = lab.rank(0).still_s + 1.0
        lab.change(0, still_s=still_s + 5.0, phase="forward_backward", active=False)
        lab.change(1, still_s=still_s, phase="collective", active=False)
        lab.step(1.0)
        if named := [i for i in lab.decision.incidents if i.fault == "rank_hung"]:
            break
    assert named and named[0].culprit.startswith("rank 0"), named
