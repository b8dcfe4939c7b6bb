"""The name of what a run is doing, along its life and by value."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.model import Incident, Plan, Resume
from holdfast.agent.core.run.policy import Grant
from holdfast.agent.core.run.stage import Stage, StageView, check_invariants, stage
from holdfast.agent.core.run.state import (
    DocumentSeen,
    Ending,
    Held,
    OpenIncident,
    Progress,
    Recovery,
    RunState,
)

from .driver import Lab


def seen(lab: Lab) -> str:
    return lab.node.stages()["r"]


def test_a_run_is_named_by_what_it_does() -> None:
    lab = Lab(nproc=2)
    lab.hold = {"start"}
    lab.step()
    assert seen(lab) == "idle"
    lab.settle()
    assert seen(lab) == "starting"
    lab = Lab(nproc=2)
    lab.begin()
    lab.all(step=5)
    lab.step(1.0)
    assert seen(lab) == "training"
    lab.kill(1)
    lab.step(0.01)
    assert seen(lab) == "recovering"
    lab.view = replace(lab.view, connected=False)
    lab.step(1.0)
    assert seen(lab) == "unknown"
    lab.view = replace(lab.view, connected=True, shutdown="interrupted")
    lab.step(1.0)
    assert seen(lab) == "ending"


def test_a_suspended_run_is_named_so_and_by_another_agent_too() -> None:
    lab = Lab(nproc=2)
    lab.begin()
    lab.train(3)
    lab.view = replace(lab.view, suspended=True)
    lab.step(1.0)
    assert seen(lab) == "suspended"
    lab.restart_agent()
    lab.step(1.0)
    assert seen(lab) == "suspended"
    lab.view = replace(lab.view, connected=False)
    lab.step(1.0)
    assert seen(lab) == "unknown"
    lab.view = replace(lab.view, connected=True, suspended=False)
    lab.step(1.0)
    assert seen(lab) == "training"
    lab.view = replace(lab.view, suspended=True, shutdown="interrupted")
    lab.step(1.0)
    assert seen(lab) == "ending", "an end goes on below a stopped launcher"


@pytest.mark.parametrize(("how", "code"), [("shutdown", 130), ("drain", 75), ("decided", 76)])
def test_an_end_is_gone_on_with_below_a_stopped_launcher(how: str, code: int) -> None:
    """It would wait for somebody who has the launcher go on, and the scheduler kills them all."""
    lab = Lab(nproc=2)
    lab.begin()
    lab.train(3)
    lab.view = replace(lab.view, suspended=True, shutdown="interrupted" * (how == "shutdown"))
    case = lab.node.cases["r"]
    if how == "drain":
        case.operator.drain("maintenance")
    elif how == "decided":
        case.ending.decide(code, "its budget is spent")
    lab.step(1.0)
    lab.settle()
    assert lab.finishes() == [code]


def test_the_run_of_another_user_is_over_once_its_launcher_is_told() -> None:
    lab = Lab(nproc=2, uid=1000)
    lab.begin()
    lab.restart_agent()
    lab.node.kept.runs.clear()
    lab.node.cases.clear()
    lab.view = replace(lab.view, uid=1001, generation=0, state="idle", ranks=())
    lab.step(1.0)
    assert seen(lab) == "ending" and lab.finishes() == [78]
    lab.step(1.0)
    assert seen(lab) == "over"


def test_an_end_goes_before_everything_and_a_wanted_one_first() -> None:
    lab = Lab(nproc=2)
    lab.begin()
    state, view = RunState("r", ending=Ending(code=0)), StageView(lab.view)
    assert stage(state, view) is Stage.ENDING
    state.ending = Ending(code=0, left=True)
    assert stage(state, view) is Stage.OVER
    state.held = Held(drain="maintenance")
    assert stage(state, view) is Stage.ENDING
    assert stage(state, StageView(replace(lab.view, connected=False))) is Stage.UNKNOWN


@pytest.mark.parametrize(("owned", "run", "wrong"), [
    ("k", "r", False), ("a", "r", True), ("z", "r", True), ("k", "a", True), ("k", "z", True)])
def test_an_incident_of_another_run_is_no_part_of_this_ones_state(
    owned: str, run: str, wrong: bool
) -> None:
    one = Incident(id=owned, fault="f", subject="run/r", severity="warn", run=run, generation=1,
                   opened_wall_s=1e9, opened_boot_s=1.0, reason="x", culprit="")
    state = RunState("r")
    state.incidents.book.open["k"] = OpenIncident(one)
    assert check_invariants(state) == (("k is not of this run",) if wrong else ())


@pytest.mark.parametrize(("less", "said"), [(-1, True), (0, False), (1, False)])
def test_no_count_of_a_run_is_below_nothing(less: int, said: bool) -> None:
    earned = RunState("r", progress=Progress(earned_steps=less))
    assert check_invariants(earned) == (("a cause earned less than nothing",) if said else ())
    grant = Grant("restart", "x", spent=(("restarts", less),))
    spent = RunState("r", recovery=Recovery(Cause("rank_killed", 1, "x"), grant=grant))
    plan = Plan("r", 1, ("a",), ((0, "a"),), Resume("fresh"), "x", spent=(("restarts", less),))
    planned = RunState("r", document=DocumentSeen(plan))
    for state in (spent, planned):
        assert check_invariants(state) == (("a budget is negative",) if said else ())


def test_no_recovery_begins_in_a_run_that_ends() -> None:
    none, begun = RunState("r"), RunState("r", recovery=Recovery(Cause("rank_killed", 1, "x")))
    over = RunState("r", ending=Ending(0))
    late = RunState("r", ending=Ending(0), recovery=begun.recovery)
    assert check_invariants(late, over) == ("a recovery began in a run that ends",)
    for before, state in ((none, begun), (none, late), (over, over), (late, late), (late, over)):
        assert check_invariants(state, before) == ()
