"""The name of what a run is doing, along its life and by value."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.agent.core.run.stage import Stage, StageView, stage
from holdfast.agent.core.run.state import Ending, Held, RunState

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
