"""Suspicion in seconds with the right rank and line; acting by proof, by cost, or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Run, Runs, wait_for

from holdfast.agent.cli import report

pytest.importorskip("torch", reason="the trainer's extra is not installed")


def line_of(script: str, text: str) -> str:
    """`script.py:LINE` of the first line that holds `text`."""
    lines = (SCRIPTS / script).read_text().splitlines()
    return f"{script}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def suspicion(run: Run, limit_s: float = 30.0) -> dict[str, Any]:
    found = wait_for(run.own_incidents, limit_s, f"a suspicion\n{run.output}")
    return dict(found[0])


def evidence(run: Run, what: str) -> str:
    rows = [row for incident in run.incidents() for row in incident["evidence"]]
    return next((value for key, value in rows if key.endswith(what)), "")


def test_an_endless_loop_is_suspected_by_name_and_line_and_not_killed(runs: Runs) -> None:
    run = runs.script("plain.py", "400", "loop")
    run.at_step(6)
    seen = suspicion(run)
    assert seen["fault"] == "rank_hung" and "rank 1" in seen["culprit"], seen
    assert seen["severity"] == "warn" and seen["state"] == "open"
    where = wait_for(lambda: evidence(run, "where"), 25, "the source line")
    loop = line_of("plain.py", "while True:")
    number = int(loop.split(":")[1])
    assert any(f"plain.py:{n}" in where for n in (number, number + 1)), where
    first = "\n".join(" ".join(span.text for span in row) for row in report.status([
        run.api("/api/v1/status")])).partition("checkpoint")[0]
    assert "in doubt" in first and "rank 1" in first and "would act at" in first, first
    assert where.split()[0] in first.replace("\n", " "), first
    assert run.status()["generation"] == 1


def test_a_limit_that_the_user_set_is_kept(runs: Runs) -> None:
    run = runs.script("plain.py", "20", "loop",
                      flags=("--nproc-per-node", "2", "--hang-limit", "4"))
    assert run.wait() == 0, run.output
    assert "finished rank 0 restarts 1" in run.output
    assert "rank 1" in run.output and "holds the run up" in run.output


def test_exit_handlers_take_their_time_whatever_limit_steps_have(runs: Runs) -> None:
    run = runs.script("plain.py", "8", "upload", "8",
                      flags=("--nproc-per-node", "2", "--hang-limit", "4"))
    assert run.wait() == 0, run.output
    assert "finished rank 1 restarts 0" in run.output and "restarts 1" not in run.output
    assert "holds the run up" not in run.output


def test_an_evaluation_on_rank_0_is_suspected_and_taken_back(runs: Runs) -> None:
    end = runs.home / "end"
    run = runs.script("plain.py", str(end), "eval", "9")
    run.at_step(6)
    suspicion(run)
    run.at_step(12)
    wait_for(lambda: [i for i in run.incidents() if i["state"] == "taken_back"], 60)
    end.touch()
    assert run.wait() == 0, run.output
    assert "restarts 1" not in run.output


def test_a_compiler_below_a_rank_is_shown_and_not_suspected(runs: Runs, tmp_path: Path) -> None:
    compiler, source = tmp_path / "cc1plus", tmp_path / "source"
    shutil.copy("/bin/cat", compiler)
    os.mkfifo(source)  # it reads, and so compiles, until the test has seen enough
    run = runs.script("plain.py", "12", "compile", str(source), str(compiler))
    run.at_step(6)
    doing = re.compile(r"compiling for \d+ s: rank 1: cc1plus")
    wait_for(lambda: doing.search(str(run.status())), 60, f"{doing.pattern!r} in status")
    source.write_text("")
    assert run.wait() == 0, run.output
    assert {one["fault"] for one in run.own_incidents()} == {"graph_recompiled"}  # a ticket
    assert "holds the run up" not in run.output, run.output


def test_a_size_that_differs_is_a_mismatch_and_not_a_dead_node(runs: Runs) -> None:
    run = runs.script("plain.py", "16", "size")
    assert run.wait() == 0, run.output
    assert "finished rank 0 restarts 1" in run.output
    assert "mismatch" in run.output or "disagree about a collective" in run.output, run.output


def test_slow_first_steps_are_nobodys_fault(runs: Runs) -> None:
    """However short a limit the user set for steps: before the first one there is none."""
    run = runs.script("plain.py", "12", "slow-first", "8",
                      flags=("--nproc-per-node", "2", "--hang-limit", "4"))
    assert run.wait() == 0, run.output
    assert "finished rank 1 restarts 0" in run.output
    assert "holds the run up" not in run.output and "restarts 1" not in run.output, run.output
    assert run.own_incidents() == []
