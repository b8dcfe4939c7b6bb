"""The first line of `holdfast status` while ranks stand still, from the core to the words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from holdfast.agent.cli import report
from holdfast.agent.cli.text import plain
from holdfast.agent.config.load import load
from holdfast.agent.core.model import EffectOutcome, TakeEvidence
from holdfast.agent.daemon.state import AgentState, Snapshot
from holdfast.agent.history.incident_log import IncidentLog
from holdfast.agent.history.job_log import JobLog
from holdfast.agent.web.status import status

from ..core.driver import Lab
from ..core.test_hang import hang, stall, stand, trained
from ..core.test_known_causes import stop

TICK_S = 0.5
SUSPECT_S = 2.5  # 2 s and three median steps of 0.15 s, up to the tick
LINE = "train.py:12 in step"  # where the driver's evidence finds every rank


class Screen:
    """What the agent's documents and the command line make of a lab's last step."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.state = AgentState(
            load(None, {"agent.state_dir": (str(directory), "test"), "agent.node": ("a", "test")}),
            is_private=False)
        self.state.incident_log = IncidentLog(())
        self.state.counters = {}
        self.state.jobs = JobLog()
        self.state.launchers = SimpleNamespace(session=lambda run: None)  # type: ignore[assignment]

    def first_line(self) -> str:
        """The answer to "is it training?", as printed, in one line."""
        return self.answers()[0]

    def answers(self) -> list[str]:
        """To the four questions that status answers first: training, checkpoint, doing, you."""
        lab = self.lab
        self.state.incident_log.follow(lab.decision)
        self.state.snapshot = Snapshot(
            1, lab.node._seen[0], lab.seen, lab.decision, stages=lab.node.stages(),
            suspended=lab.node.suspended())
        text = plain(report.status([status(self.state)]))
        said = re.match("training(.*)\ncheckpoint(.*)\ndoing(.*)\nyou(.*)\nrun ", text, re.DOTALL)
        assert said is not None, text
        return [" ".join(answer.split()) for answer in said.groups()]


def waited_s(line: str) -> tuple[float, float]:
    """(how long the line says that it lasts, when something would be done)."""
    said = re.search(r"waited ([0-9.]+) s, would act at ([0-9.]+) s", line)
    assert said is not None, line
    return float(said[1]), float(said[2])


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_it_names_rank_line_and_time_long_before_a_limit(grade: str, tmp_path: Path) -> None:
    lab = trained(grade)
    screen = Screen(lab, tmp_path)
    assert screen.first_line() == "yes"
    stall(lab)
    still_s, limit_s = 0.0, 60.0
    while still_s < limit_s - TICK_S:
        stand(lab, TICK_S)
        still_s += TICK_S
        line = screen.first_line()
        if still_s < SUSPECT_S:
            continue  # a step may take that long
        assert line.startswith("in doubt: rank 1 "), (still_s, line)
        shown_s, limit_s = waited_s(line)
        assert abs(shown_s - still_s) < 0.06 and shown_s < limit_s
        # The step that suspects asks for the stack; the next one has it.
        assert still_s == SUSPECT_S or f"at {LINE}" in line, line
    assert still_s > SUSPECT_S and lab.plan().generation == 1, line
    lab.train(21)
    assert screen.first_line() == "yes"


def test_where_nothing_tells_the_ranks_apart_it_names_each_with_its_place(tmp_path: Path) -> None:
    lab = trained("script", nproc=12)
    screen = Screen(lab, tmp_path)
    lab.all(still_s=0.0, phase="unknown")
    lab.hold = {"evidence"}
    stand(lab, SUSPECT_S)
    for effect in lab.log:
        if isinstance(effect.body, TakeEvidence):
            place = "data.py:7 in read" if effect.body.rank in (3, 10) else LINE
            seen = {"where": place, "state": "S", "wchan": "futex_wait"}
            lab.outcomes.append(EffectOutcome(effect.id, True, "", json.dumps(seen)))
    stand(lab, TICK_S)
    line = screen.first_line()
    everyone = ", ".join(map(str, range(12)))
    assert line.startswith(f"in doubt: culprit unknown: ranks {everyone} stand still"), line
    others = ", ".join(str(rank) for rank in range(12) if rank not in (3, 10))
    assert line.endswith(f"; ranks {others} at {LINE}; ranks 3, 10 at data.py:7 in read"), line
    assert waited_s(line)[0] == pytest.approx(SUSPECT_S + TICK_S, abs=0.06)


def test_it_says_no_once_something_is_done(tmp_path: Path) -> None:
    lab = trained("trainer")
    screen = Screen(lab, tmp_path)
    stall(lab)
    stand(lab, 3.0)
    _, limit_s = waited_s(screen.first_line())
    stand(lab, limit_s - 3.0 + TICK_S)
    assert [verdict.act for verdict in hang(lab)] == [True]
    assert screen.first_line() == "no"


@pytest.mark.parametrize(("grade", "doing"), [
    ("trainer", "training step 22"),
    ("script", "training, step 22 since its last start"),  # its own may go on
])
def test_a_scripts_step_is_told_as_that_of_its_last_start(
    grade: str, doing: str, tmp_path: Path
) -> None:
    lab = trained(grade)
    lab.train(21)
    screen = Screen(lab, tmp_path)
    screen.first_line()
    assert status(screen.state)["runs"][0]["doing"].partition(" (")[0] == doing


@pytest.mark.parametrize(("grade", "launcher"), [
    ("trainer", False), ("trainer", True), ("script", True)])
def test_a_run_that_is_stopped_from_outside_says_so_first(
    grade: str, launcher: bool, tmp_path: Path
) -> None:
    lab = trained(grade)
    screen = Screen(lab, tmp_path)
    lab.view = replace(lab.view, suspended=launcher)
    for second in range(1, 17):
        stop(lab, float(second))
        lab.step(1.0)
    training, _, doing, you = screen.answers()
    why = ("its launcher is stopped or frozen from outside" if launcher
           else "all its ranks were stopped from outside")
    assert (training, doing) == ("no", f"suspended for 15 s (scheduler, Ctrl-Z, freezer): {why}")
    assert you == "fg in its terminal, or resume the job; nothing where that is meant"
    lab.view = replace(lab.view, suspended=False)
    lab.all(proc_state="S", stopped_s=0.0, beat_age_s=0.05)
    lab.train(25)
    training, _, doing, you = screen.answers()
    assert (training, you) == ("yes", "nothing") and doing.startswith("training")


def test_a_frozen_run_is_told_as_one_by_its_tickers(tmp_path: Path) -> None:
    """The kernel shows a frozen process in whatever it slept."""
    lab = trained("script")
    screen = Screen(lab, tmp_path)
    lab.view = replace(lab.view, suspended=True)
    lab.all(beat_age_s=2.0, still_s=2.0)
    lab.step(2.0)
    assert screen.answers()[0] == "no"


def test_ranks_that_train_on_below_a_stopped_launcher_are_not_told_as_stopped(
    tmp_path: Path
) -> None:
    lab = trained("trainer")
    screen = Screen(lab, tmp_path)
    lab.view = replace(lab.view, suspended=True)
    lab.train(25)
    training, _, doing, you = screen.answers()
    assert training == "yes" and doing.startswith("training step 26")
    assert doing.endswith(
        "; its launcher is stopped or frozen from outside, and no fault is answered")
    assert you.startswith("fg in its terminal")
