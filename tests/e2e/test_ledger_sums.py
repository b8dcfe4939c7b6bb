"""The ledger against clocks that are not the agent's: the test's, and those of ranks."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import ledgers
import pytest
from ledgers import SHARE
from running import SCRIPTS, Run, Runs, wait_for

SPAN_S = 20.0
READ_S = 0.005  # from one clock to the other, at each end
NEAR = 0.02  # of the time: a reading is fresh, and not of this very instant


def read(run: Run) -> ledgers.Reading:
    return ledgers.read(partial(run.api, "/api/v1/ledger"), "t")


def lasts(begun_s: float) -> bool:
    return time.monotonic() - begun_s >= SPAN_S


def test_every_second_of_node_and_run_is_in_one_category_while_ranks_are_lost(runs: Runs) -> None:
    run = runs.script("plain.py", "100000", flags=("--nproc-per-node", "2", "--hang-limit", "10"))
    run.at_step(3)
    begin = read(run)
    run.inject("kill", 1)
    wait_for(lambda: run.status()["generation"] >= 2, 60, "a new generation")
    run.at_step(5)
    run.inject("stop", 0)
    wait_for(lambda: run.status()["generation"] >= 3, 60, "another one")
    run.at_step(5)
    wait_for(lambda: lasts(begin.at_s))
    spent = ledgers.between(begin, read(run))
    assert spent.node_s == pytest.approx(spent.clock_s, rel=SHARE, abs=READ_S), spent
    assert spent.run_s == pytest.approx(spent.clock_s, rel=SHARE, abs=READ_S), spent
    assert spent.node["training"] > 0.0, spent
    assert spent.node["detection"] + spent.node["recovery"] > 0.0, spent


def spans(log: Path) -> list[tuple[str, float, float]]:
    """(what, begin, end) by the clock of the rank that wrote it."""
    words = [line.split() for line in log.read_text().splitlines()]
    return [(what, float(begin_s), float(end_s)) for what, begin_s, end_s in words]


def clocked(logs: list[Path], begin: ledgers.Reading, end: ledgers.Reading) -> dict[str, float]:
    """Mean seconds of a rank between two readings of the ledger."""
    found: dict[str, float] = {}
    for log in logs:
        # What went on at the second reading is written when it is over.
        wait_for(lambda log=log: spans(log)[-1][1] > end.at_s, 30, "a step behind the reading")
        for what, begin_s, end_s in spans(log):
            inside_s = max(0.0, min(end_s, end.at_s) - max(begin_s, begin.at_s))
            found[what] = found.get(what, 0.0) + inside_s / len(logs)
    return found


def test_what_a_trainer_waits_for_is_booked_as_long_as_its_ranks_say(
    runs: Runs, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    run = runs.start(
        "train", "--nproc-per-node", "2", f"work_dir={tmp_path}/work", "steps=100000", "batch=2",
        "micro_batches=2", "model_options.width=32", "model_options.layers=1",
        "model_options.heads=2", "data_options.vocabulary=512", "checkpoint.every=15",
        f"checkpoint.dir={tmp_path}/ckpt", "eval_every=20", "data=clocked:Data",
        CLOCKED=str(tmp_path / "clocked"), OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([runs.environ["PYTHONPATH"], str(SCRIPTS)]))
    run.at_step(5)
    booked = read(run)
    # Its launcher imports torch, and its agent is there before that is done.
    assert booked.node["idle"] < 0.5 < booked.node["startup"], booked
    logs = [tmp_path / f"clocked-{rank['pid']}" for rank in run.all_ranks().values()]
    begin = read(run)
    wait_for(lambda: lasts(begin.at_s))
    end = read(run)
    spent, ranks = ledgers.between(begin, end), clocked(logs, begin, end)
    assert spent.run_s == pytest.approx(spent.clock_s, rel=SHARE, abs=READ_S), spent
    for name in ("evaluation", "checkpoint_stall"):
        assert ranks[name] > 1.0, ranks
        assert spent.run[name] == pytest.approx(ranks[name], abs=NEAR * spent.clock_s), (
            spent, ranks)
    steps_s = spent.clock_s - ranks["evaluation"] - ranks["checkpoint_stall"]
    stepping_s = spent.run["training"] + spent.run.get("collective_wait", 0.0)
    assert stepping_s == pytest.approx(steps_s, abs=NEAR * spent.clock_s), (spent, ranks)

    # From the kill on nothing counts as training, until a step is done that was not done before.
    before, seen = read(run), run.all_ranks()
    killed_s = time.monotonic()
    os.kill(seen[1]["pid"], signal.SIGKILL)
    wait_for(lambda: run.status()["generation"] == 2, 60, run.output)
    new = run.at_step(seen[1]["step"] + 4)
    after = read(run)
    lost = ledgers.between(before, after)
    assert lost.run_s == pytest.approx(lost.clock_s, rel=SHARE, abs=READ_S), lost
    first_s, second_s, *_ = [begin_s for what, begin_s, _ in spans(tmp_path / f"clocked-{new}")
                             if what == "step" and begin_s > killed_s]
    away_s = lost.node["detection"] + lost.node["recovery"]
    # It hears of the death and sees the step a moment later, at its next look, once a second.
    assert first_s - killed_s - 0.3 < away_s < second_s - killed_s + 2.5, (lost, first_s, killed_s)
