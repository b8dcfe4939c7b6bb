"""The demo's three faults under each strategy, and settings that no restart can cure."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")

LONG_S = 180.0  # four ranks that trace a model, on a busy machine
UNIT = Path(__file__).resolve().parents[1] / "unit/trainer"
SMALL = (
    "model=tiny:Chain", "data=paced:Data", "model_options.blocks=2", "steps=40",
    "micro_batches=4", "batch=2", "checkpoint.every=4",
)
FAULTS = ((5, "kill", "rank_killed"), (13, "stop", "rank_stopped"), (22, "stall", "rank_hung"))
# With copies a lost shard comes from its replica, and never from the disk, though a checkpoint is
# there; without them from the launcher's memory.
PARTS = {  # of rank 2
    "sdp": "node 2 of 2, rank 1 of 2",
    "fsdp": "shard 3 of 4", "mics": "shard 1 of 2, partition group 2",
    "pipeline": "stage 1 of 2, pipeline 2",
    "pipeline in groups": "stage 1 of 2, pipeline 2, shard 2 of 2",
}
STRATEGIES = {
    "sdp": ("strategy=sdp", "topology.0=a", "topology.1=a", "topology.2=b", "topology.3=b"),
    "fsdp": ("strategy=fsdp", "snapshot.every=2", "checkpoint.every=40"),
    "mics": ("strategy=mics", "mics.group=2"),
    "pipeline": ("strategy=pipeline", "pipeline.stages=2"),
    "pipeline in groups": ("strategy=pipeline", "pipeline.stages=2", "pipeline.group=2",
                           "snapshot.every=2", "checkpoint.every=40"),
}
ONE_COPY = ("fsdp", "pipeline in groups")


def train(runs: Runs, name: str, *more: str, nproc: int = 4) -> Run:
    path = os.pathsep.join([runs.environ["PYTHONPATH"], str(UNIT), str(SCRIPTS)])
    return runs.start(
        "train", "--nproc-per-node", str(nproc), f"work_dir={runs.home / name}", *SMALL, *more,
        name=name, PYTHONPATH=path)


def closed(run: Run, fault: str) -> dict[str, Any] | None:
    return next((one for one in run.incidents()
                 if one["fault"] == fault and one.get("state") == "closed"), None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_kill_a_stop_and_a_stall_leave_no_trace(runs: Runs, strategy: str) -> None:
    clean = train(runs, "clean", *STRATEGIES[strategy])
    assert clean.wait(LONG_S) == 0, clean.output
    run = train(runs, "faulty", *STRATEGIES[strategy])
    for step, fault, named in FAULTS:
        pid = run.at_step(step, rank=2)
        assert run.all_ranks()[2]["place"] == PARTS[strategy]
        if fault == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            run.inject(fault, 2)
        found = wait_for(partial(closed, run, named), 60, f"{named}\n{run.output}")
        assert f"rank 2 (pid {pid}, {PARTS[strategy]})" in found["culprit"], found
    assert run.wait(LONG_S) == 0, run.output
    assert run.result()["digest"] == clean.result()["digest"]
    ends = [one["timeline"][-1][1] for one in run.incidents() if one["state"] == "closed"]
    redone = [int(steps) for steps in re.findall(r"(\d+) steps? redone", " ".join(ends))]
    print(json.dumps({"strategy": strategy, "ends": ends}))  # a row of bench/results, with -s
    assert len(redone) == len(FAULTS), run.output
    if strategy in ONE_COPY:
        source = "the snapshot of step"
    else:
        source = "the survivors' memory"
        assert redone == [0, 0, 0], ends
    assert run.output.count(f"from {source}") == len(FAULTS), run.output
    if "strategy=pipeline" in STRATEGIES[strategy]:
        assert "pipeline of 2 stages" in clean.output and "expected bubble" in clean.output


def test_what_a_setting_cures_ends_with_78_and_is_not_tried_again(runs: Runs) -> None:
    wrong = {
        "group": (("strategy=mics", "mics.group=2"), "group = 2 does not divide the world of 1"),
        "name": (("strategy=zero3",), "strategy = 'zero3': set one of ddp"),
        "own": (("strategy=own:FailsInAStep",), "own.py, line"),
    }
    started = {name: train(runs, name, *words, nproc=1) for name, (words, _) in wrong.items()}
    for name, run in started.items():
        assert run.wait(LONG_S) == 78, run.output
        assert wrong[name][1] in run.output, run.output
        assert "generation 2" not in run.output and "Traceback" not in run.output, run.output
