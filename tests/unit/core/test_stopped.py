"""A run that was stopped for good: said long enough that whoever looks every 15 s sees it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pages import promtool

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Ended, Now, Observed, RunView, StoreView, Verdict
from holdfast.agent.core.node import ABSENT_S, RUNS_MAX
from holdfast.agent.core.run.incidents import FINISHED_S
from holdfast.agent.web import status
from holdfast.dashboards.rules import faults, files

from .driver import Lab, replace

SCRAPE_S = 15
BOOKS = load_runbooks()


def stopped(fault: str) -> Lab:
    """A node whose run has ended that way, at this moment."""
    lab = Lab(grade="script", max_restarts=99 if fault == "crash_loop" else 1)
    lab.begin()
    for number in range(3 if fault == "crash_loop" else 2):
        error = "ValueError: same" if fault == "crash_loop" else f"ValueError: {number}"
        lab.raises(1, error, code=7)
        lab.settle()
    assert lab.finishes() == [7]
    return lab


def said(lab: Lab, seconds: float, runs: tuple[RunView, ...] = (), boot_id: str = "b"):
    """What stands of the run on the page after so many seconds; its launcher has left."""
    lab.boot_s += seconds
    now = Now(lab.boot_s, 1e9 + lab.boot_s, boot_id)
    decision = lab.node.step(now, Observed(runs=runs, store=StoreView(up=True)))
    found = [one for one in decision.verdicts if one.fault in status.STOPS]
    return found[0] if found else None


@pytest.mark.parametrize("fault", ["crash_loop", "budget_spent"])
def test_the_alert_fires_after_the_run_has_gone_and_resolves(fault: str, tmp_path: Path) -> None:
    """The core's own verdicts, as a scrape every 15 s finds them, through Prometheus itself."""
    tool, lab = promtool(), stopped(fault)
    found = [said(lab, SCRAPE_S) for _ in range(60)]
    assert len({one.subject for one in found if one}) == 1
    labels = {"fault": fault, "subject": "run/r/rank/1", "instance": "a"}
    series = ",".join(f'{name}="{value}"' for name, value in labels.items())
    severities = {one.severity for one in found if one}
    (tmp_path / "alerts.yml").write_text(
        files.rules([faults.Entry(BOOKS[fault], "what")], "runbooks"))
    test = {
        "interval": f"{SCRAPE_S}s",
        "input_series": [{
            "series": f'holdfast_fault_active{{{series},severity="{severity}"}}',
            # As the page has it: 1 or no such series, which is stale in the next scrape.
            "values": " ".join("1" if one else "stale" for one in found),
        } for severity in severities],
        "promql_expr_test": [
            {"eval_time": at, "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
             "exp_samples": [{"labels": "{}", "value": 1}] * fires}
            for name in ("HoldfastRunStopped", BOOKS[fault].alert)  # the page, and the ticket
            for at, fires in (("3m", 1), ("9m", 1), ("11m", 0))
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [test]}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_outlives_the_agent_and_not_the_boot() -> None:
    lab = stopped("crash_loop")
    assert said(lab, 60.0) is not None
    lab.restart_agent()
    assert said(lab, 60.0) is not None
    lab.restart_agent()
    assert said(lab, 60.0, boot_id="c") is None


def test_it_names_the_incident_and_says_no_word_of_the_jobs() -> None:
    """The run has no owner any more: what a job said is told to its owner alone."""
    verdict = said(stopped("crash_loop"), 1.0)
    assert verdict is not None and verdict.severity == "fatal" and verdict.act
    (incident,) = (value for _, value in verdict.evidence)
    assert incident == "r-g3-crash_loop-r1-1" and incident in verdict.reason
    assert "ValueError" not in json.dumps([verdict.reason, verdict.evidence])


def test_a_bad_checkpoint_that_ends_the_run_is_no_milder() -> None:
    lab = Lab()
    lab.begin()
    for _ in range(3):
        lab.change(1, step=4)
        lab.end(1, Ended(1, 0, "bad_checkpoint", "its bytes do not match", boot_s=lab.boot_s))
        lab.step()
        lab.park(0, 4)
        lab.settle()
    assert lab.finishes()
    verdict = said(lab, 1.0)
    assert verdict is not None and verdict.severity == "fatal"


def test_the_next_run_of_that_name_is_not_ill_of_it() -> None:
    lab = stopped("crash_loop")
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=900.0)
    lab.settle()
    verdict = said(lab, 1.0, (lab.view,))
    assert verdict is not None  # a scheduler that starts it at once does not hide it
    assert lab.view.generation == 4 and status.of_now(lab.view, (verdict,)) == ()
    other = Verdict("rank_hung", verdict.subject, "fatal", 1.0, "", run="r")
    before = replace(lab.view, generation=3)
    assert status.of_now(lab.view, (other,)) == (other,)
    assert status.of_now(before, (verdict,)) == (verdict,)
    assert status.of_now(replace(lab.view, run="s"), (verdict,)) == (verdict,)


def test_others_that_come_and_go_do_not_push_it_out() -> None:
    lab = stopped("crash_loop")
    for number in range(2 * RUNS_MAX):  # of names before and behind it
        view = RunView(run=f"{'as'[number % 2]}{number}", node="a", grade="script", nproc=1)
        assert said(lab, 1.0, (view,)) is not None
    assert said(lab, FINISHED_S) is None


def test_what_stood_open_of_a_run_that_was_asked_to_end_is_closed_once_it_has_gone() -> None:
    """Its launcher leaves by itself: no order of the agent's ends it, and nobody sees it go on."""
    lab = Lab(grade="script")
    lab.begin()
    lab.train(5)
    lab.kill(1)
    lab.settle()
    (fault,) = [one.id for one in lab.decision.incidents if one.state == "acted"]

    def shown(seconds: float, *runs: RunView) -> tuple[str, ...]:
        lab.boot_s += seconds
        now = Now(lab.boot_s, 1e9 + lab.boot_s, "b")
        decision = lab.node.step(now, Observed(runs=runs, store=lab.observed().store))
        return tuple(one.state for one in decision.incidents if one.id == fault)

    assert shown(1.0) == ("acted",)
    assert shown(ABSENT_S - 1.0) == ("acted",), "it may come back"
    assert shown(1.0, replace(lab.view, connected=False)) == ("acted",)
    assert shown(1.0) == shown(ABSENT_S) == ("acted",), "counted anew"
    assert shown(1.0) == ("closed",)
    assert shown(1.0) == ()
