"""Disks without room: training goes on, and what is said about it is true, at once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")


@pytest.fixture()
def small(runs: Runs) -> Iterator[Path]:
    """A file system of its own, small enough to fill at once."""
    place = runs.home / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "none",
                              str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here: no root")
    try:
        yield place
    finally:
        for run in runs.started:
            if run.process.poll() is None:
                run.kill_all()
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Leaves no block free."""
    filler = place / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def test_state_disk_full_in_mid_run(runs: Runs, small: Path) -> None:
    """With it the folder of the ranks' logs: what they print is lost, and ends none of them."""
    run = runs.script("talking.py", "100000", flags=("--nproc-per-node", "2"),
                      HOLDFAST_STATE_DIR=str(small))
    first = run.at_step(3)
    filler = fill(small)
    os.kill(first, signal.SIGKILL)
    run.wait_output("generation 2")
    wait_for(lambda: run.ranks().get(1, {}).get("pid", first) != first, what=run.output)
    run.at_step(3)
    run.wait_output("state is not kept: ")
    wait_for(lambda: run.status()["need"].startswith(f"make room: {small}"), what="the need")
    status = run.api("/api/v1/status")
    assert status["journal_stalled"] and "full" in status["disk_problem"]
    assert status["runs"][0]["generation"] == 2, run.output
    filler.unlink()
    run.wait_output("state is kept again")
    wait_for(lambda: run.status()["need"] == "nothing", 60, "the need is over")
    wait_for(lambda: not run.api("/api/v1/status")["journal_stalled"], what="an end of the stall")
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_state_disk_full_and_the_agent_dies(runs: Runs, small: Path) -> None:
    """What an agent planned in memory alone is lost with it: the ranks train on, what cannot be
    done is said, and what the launcher runs is where the next plan begins."""
    run = runs.script("plain.py", "100000", flags=("--nproc-per-node", "2", "--log-dir",
                                                   str(runs.home / "logs")),
                      HOLDFAST_STATE_DIR=str(small))
    first = run.at_step(3)
    filler = fill(small)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: run.ranks().get(1, {}).get("pid", first) != first, what=run.output)
    second = run.at_step(3)
    agent = next(pid for pid, command in runs.left().items()
                 if "holdfast.agent --private" in command)
    os.kill(agent, signal.SIGKILL)
    run.wait_output("no agent for")
    assert "database or disk is full: make room" in run.output, run.output
    assert "the ranks train on unwatched, and none that ends is restarted" in run.output
    assert os.path.exists(f"/proc/{second}"), run.output
    filler.unlink()
    run.wait_output("the agent answers again")
    third = run.at_step(6)
    assert third == second and run.status()["generation"] == 2, run.output
    os.kill(third, signal.SIGKILL)
    wait_for(lambda: run.ranks().get(1, {}).get("pid", third) != third, what=run.output)
    assert run.status()["generation"] == 3, run.output


def test_state_disk_full_before_the_start(runs: Runs, small: Path) -> None:
    (small / "runs").mkdir()
    fill(small)
    run = runs.script("plain.py", "3", flags=("--nproc-per-node", "1"),
                      HOLDFAST_STATE_DIR=str(small))
    assert run.wait() == 78, run.output
    assert str(small) in run.output and "No space left on device" in run.output, run.output
    assert "HOLDFAST_STATE_DIR" in run.output and len(run.output.splitlines()) == 1, run.output


def test_checkpoint_disk_full(runs: Runs, small: Path) -> None:
    """A writer that failed is not waited for, and none durable is none durable."""
    fill(small)
    run = runs.start(  # the gate would refuse it by name: test_start_gate.py
        "train", "--nproc-per-node", "2", "--ignore-check", "paths", "--reason", "a test",
        "steps=12", "checkpoint.every=4", "micro_batches=2",
        "batch=2", "model_options.width=32", "model_options.layers=1", "model_options.heads=2",
        "data_options.vocabulary=512", f"work_dir={runs.home / 'data'}",
        f"checkpoint.dir={small / 'checkpoints'}",
    )
    assert run.wait() == 0, run.output
    assert "No space left on device" in run.output, run.output
    assert "none of them became durable" in run.output, run.output
    assert not list(small.rglob("COMMIT"))
