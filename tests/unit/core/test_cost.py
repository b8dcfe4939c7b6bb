"""What a fault is told to have cost: its own gap, and of a script only what can be known."""

from __future__ import annotations

import pytest

from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.incidents import values
from holdfast.agent.core.model import Incident, Now, Settings

from .driver import Lab


def closed(lab: Lab) -> list[Incident]:
    return [one for one in lab.decision.incidents if one.state == "closed"]


def fault(lab: Lab, gap_s: float) -> Incident:
    """A rank is killed right behind a finished step; its successor's first one is `gap_s` later."""
    lab.kill(1)
    lab.settle()
    lab.all(step=1, phase="data", still_s=0.0)
    lab.step(gap_s)
    (incident,) = closed(lab)
    return incident


def test_each_fault_of_a_script_costs_its_own_gap() -> None:
    lab = Lab(grade="script", max_restarts=99)
    lab.begin()
    lab.train(20)
    for gap_s in (0.21, 0.29, 0.30):
        incident = fault(lab, gap_s)
        assert abs(incident.lost_s - gap_s) < 1e-6, incident
        lab.train(9)  # fewer steps than ever before: its counter begins anew


def test_each_fault_of_the_trainer_costs_its_own_gap_though_steps_are_redone() -> None:
    lab = Lab(max_restarts=99)
    lab.commit(10, generation=1)
    lab.begin()
    lab.train(20, seconds=1.0)
    for gap_s in (2.0, 3.0):
        lab.kill(0)
        lab.kill(1)
        lab.settle()
        lab.all(phase="startup", still_s=0.0)
        lab.step(gap_s)
        lab.train(15, seconds=1.0)
    lab.train(21, seconds=1.0)
    # The first is over where the second begins.
    assert [round(one.lost_s, 2) for one in closed(lab)] == [7.0, 14.0]


def test_a_hang_before_any_finished_step_does_not_cost_since_boot() -> None:
    lab = Lab(grade="script", settings=Settings(act=("ended",)))
    lab.begin()
    lab.change(1, proc_state="T", stopped_s=2.0, beat_age_s=2.0, still_s=2.0)
    lab.step(2.0)
    lab.step(0.1)
    (item,) = lab.node.kept.runs["r"].incidents.book.entries()
    assert item.suspicion and lab.boot_s - 1.0 < item.last_step_boot_s <= lab.boot_s


def test_what_a_fault_costs_is_told_by_phase() -> None:
    lab = Lab()
    lab.begin()
    lab.train(20)
    lab.boot_s += 0.5  # nobody finished a step
    lab.all(still_s=0.5)
    lab.kill(1)
    lab.step()
    lab.boot_s += 0.25
    lab.park(0, 20)
    lab.settle()
    lab.all(step=21, phase="data", still_s=0.0)
    lab.step(2.0)
    (one,) = closed(lab)
    assert (one.detection_s, one.decision_s, one.restart_s) == pytest.approx((0.5, 0.25, 2.0))
    assert one.lost_s == pytest.approx(2.75)


def test_what_the_next_fault_cuts_short_was_a_restart() -> None:
    lab = Lab()
    lab.begin()
    lab.train(20)
    lab.kill(1)
    lab.park(0, 20)
    lab.settle()
    lab.all(phase="startup", still_s=0.0)
    lab.step(2.0)
    lab.kill(1)
    lab.park(0, 20)
    lab.settle()
    assert all(one.decision_s == 0.0 for one in lab.decision.incidents), "none is over"
    lab.all(step=21, phase="data", still_s=0.0)
    lab.step(3.0)
    second, first = sorted(closed(lab), key=lambda one: -one.generation)
    told = [(one.detection_s, one.decision_s, one.restart_s) for one in (first, second)]
    assert told == [pytest.approx((0.0, 0.0, 2.0)), pytest.approx((0.0, 0.0, 3.0))]


@pytest.mark.parametrize(("lost_s", "decision_s", "told"), [
    (9.0, 3.0, (1.0, 3.0, 5.0)), (3.0, 3.0, (1.0, 2.0, 0.0)), (0.5, 3.0, (0.5, 0.0, 0.0)),
    (9.0, 0.0, (1.0, 0.0, 8.0))])
def test_the_phases_come_to_what_was_lost(
    lost_s: float, decision_s: float, told: tuple[float, ...]
) -> None:
    opened = values.opened(Cause(fault="x", generation=1, reason="x"), "r", 1, Now(10, 10, "b"),
                           True, "a")
    one = values.recovered(opened, Now(20, 20, "b"), 7, lost_s, (1.0, decision_s), 8.0)
    assert (one.detection_s, one.decision_s, one.restart_s) == told


@pytest.mark.parametrize("grade", ["script", "trainer"])
def test_what_a_script_redoes_is_not_told_as_known(grade: str) -> None:
    lab = Lab(grade=grade)
    lab.begin()
    lab.train(20, seconds=1.0)
    lab.kill(1)
    lab.step()
    if grade == "trainer":
        lab.kill(0)
    lab.settle()
    lab.all(step=1 if grade == "script" else 21, phase="data", still_s=0.0)
    lab.step(1.2)
    (incident,) = closed(lab)
    text = incident.timeline[-1][1]
    if grade == "script":
        assert text == ("training again, 1.20 s after the verdict; cost 1.20 s; what the script "
                        "redoes is its own checkpoint's affair, at most 20.0 s of training")
        assert incident.redo_s == pytest.approx(20.0)
    else:
        assert "redone" in text and incident.redo_s == 0.0
    before = dict(lab.decision.ledger)
    lab.train(10, seconds=1.0)
    after = dict(lab.decision.ledger)
    grown = {key: round(after[key] - before[key]) for key in after if after[key] - before[key] > .5}
    assert grown == ({"maybe_recomputing": 9} if grade == "script" else {})
