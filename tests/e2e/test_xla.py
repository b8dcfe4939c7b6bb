"""Ranks on XLA's processor device: spawned, compiled for in a phase of its own, killed, recovered.

They run in a Python with torch_xla (tests/own_python.py); the launcher's agent in this one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from running import SCRIPTS, Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from own_python import XLA

LONG_S = 180.0  # three processes import torch and torch_xla, and compile, on a busy machine
UNIT = Path(__file__).resolve().parents[1] / "unit/trainer"
SMALL = ("device=xla", "model=tiny:Still", "data=paced:Data", "steps=40", "batch=4",
         "micro_batches=2", "checkpoint.every=20")


def train(runs: Runs, name: str, *more: str, nproc: int = 2, standby: int = 0) -> Run:
    path = os.pathsep.join([runs.environ["PYTHONPATH"], str(UNIT), str(SCRIPTS)])
    return runs.start(
        "train", "--nproc-per-node", str(nproc), "--standby", str(standby), "--python",
        XLA.path(), f"work_dir={runs.home / name}", *SMALL, *more, name=name, PYTHONPATH=path,
        PJRT_DEVICE="CPU")


def closed(run: Run, count: int) -> bool:
    """Whether so many losses of a rank were recovered from."""
    return count == sum(one["fault"] == "rank_killed" and one.get("state") == "closed"
                        for one in run.incidents())


def seconds(run: Run) -> dict[str, float]:
    return dict(run.api("/api/v1/ledger")["runs"][run.name])


def test_a_killed_rank_leaves_no_trace_in_the_weights(runs: Runs) -> None:
    clean = train(runs, "clean", "xla.neuron_cc_flags=--model-type=transformer")
    assert clean.wait(LONG_S) == 0, clean.output
    (about,) = (runs.home / "clean/checkpoints/manifests").iterdir()
    manifest = json.loads(about.read_bytes())
    assert manifest["environment"]["NEURON_CC_FLAGS"] == "--model-type=transformer", manifest
    assert manifest["machine"]["device"] == "xla" and manifest["sdk"]["torch-xla"] == "2.9.0"
    run = train(runs, "faulty", standby=1)
    pid = run.at_step(5, limit_s=LONG_S)
    for one in run.all_ranks().values():  # an interpreter of its own, and no child of a fork server
        words = Path(f"/proc/{one['pid']}/cmdline").read_bytes().split(b"\0")
        assert words[1].endswith(b"bootstrap.py") and words[2] == b"rank", words
    survivor = run.all_ranks()[0]["pid"]
    before = seconds(run)
    assert before["compile"] > 0.5, before
    os.kill(pid, signal.SIGKILL)
    wait_for(partial(closed, run, 1), 60, f"rank_killed\n{run.output}")
    # The next standby imports torch_xla and compiles for longer than these steps last.
    os.kill(run.at_step(10), signal.SIGKILL)
    wait_for(partial(closed, run, 2), LONG_S, f"rank_killed\n{run.output}")
    assert run.all_ranks()[0]["pid"] == survivor
    after = seconds(run)
    assert run.wait(LONG_S) == 0, run.output
    assert run.result()["digest"] == clean.result()["digest"]
    # On a busy machine the compile of who joins may be slow enough to be suspected for a moment.
    killed = [one for one in run.own_incidents() if one["state"] != "taken_back"]
    killed.sort(key=lambda one: one["timeline"][0][0])
    assert [one["fault"] for one in killed] == ["rank_killed"] * 2, run.output
    ends = [one["timeline"][-1][1] for one in killed]
    print(json.dumps({"standby, then none": ends, "ledger": after}))  # a row of bench/results
    assert run.output.count("from the survivors' memory") == 2, run.output
    assert all("0 steps redone" in end for end in ends), ends


def test_a_compile_in_mid_training_is_a_ticket_and_never_a_hang(runs: Runs) -> None:
    run = train(runs, "t", "model=turning:Model")
    doing = re.compile(r"compiling for \d+ s: rank \d: its graphs")
    run.at_step(5, limit_s=LONG_S)
    wait_for(lambda: doing.search(str(run.try_api("/api/v1/status"))), 60,
             f"{doing.pattern!r} in status\n{run.output}")
    run.at_step(14)
    before = seconds(run)
    assert run.wait(LONG_S) == 0, run.output
    # One, or one of each rank where the first is done long before the other.
    tickets = run.own_incidents()
    print(json.dumps({"tickets": [(one["reason"], one["lost_s"]) for one in tickets],
                      "ledger": before}))
    assert {one["fault"] for one in tickets} == {"graph_recompiled"}, tickets
    assert len({one["subject"] for one in tickets}) == len(tickets), tickets
    for ticket in tickets:
        assert ticket["state"] == "closed" and ticket["lost_s"] > 1.0, ticket
        assert re.search(r"rank \d .*at step 12", ticket["reason"]), ticket
    assert "generation 2" not in run.output, run.output


def test_a_batch_of_another_shape_ends_with_78_and_is_not_tried_again(runs: Runs) -> None:
    run = train(runs, "t", "data=on_xla:Uneven", nproc=1)
    assert run.wait(LONG_S) == 78, run.output
    assert "'x' of a batch is torch.float32 (3, 8)" in run.output, run.output
    assert "generation 2" not in run.output and "Traceback" not in run.output, run.output
