"""A run that is stopped as a whole from outside goes on with the same processes: it is no fault."""

from __future__ import annotations

import os
import signal
import time

import pytest
from running import Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")


def ledger(run: Run, category: str) -> float:
    answer = run.try_api("/api/v1/ledger") or {"categories": {}}
    return float(answer["categories"].get(category, 0.0))


@pytest.mark.parametrize("launcher", [True, False], ids=["with its launcher", "ranks alone"])
def test_a_suspended_run_goes_on_with_the_same_processes(runs: Runs, launcher: bool) -> None:
    run = runs.script("plain.py", "100000")
    run.at_step(6)
    before = {rank: one["pid"] for rank, one in run.all_ranks().items()}
    stopped = [run.process.pid] * launcher + list(before.values())
    idle_s = ledger(run, "idle")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "suspended" in str(run.try_api("/api/v1/status")), 30, "suspended in status")
    began_s = time.monotonic()
    wait_for(lambda: time.monotonic() - began_s > 5.0)  # what is tested is that time passes
    step = wait_for(run.ranks)[1]["step"]
    status = run.status()
    assert not status["training"] and status["doing"].startswith("suspended for "), status
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    run.at_step(step + 5)
    assert {rank: one["pid"] for rank, one in run.all_ranks().items()} == before
    assert run.status()["generation"] == 1 and not run.own_incidents(), run.output
    wait_for(lambda: ledger(run, "idle") - idle_s > 3.0, 60, "the time booked as idle")
