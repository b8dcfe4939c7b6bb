"""What the ranks print before they die is the root of their own generation's incident."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from running import Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")
BYTES_S = 65536  # of logs.sample_bytes_s
ECC = "cuda_ecc on rank 1 (infra): RuntimeError: CUDA error: uncorrectable ECC error encountered"


def journalled(run: Run) -> list[dict[str, Any]]:
    """Incidents as the run's own agent left them, oldest first."""
    path = run.home / "st" / "runs" / run.name / "journal.db"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT body FROM incidents ORDER BY opened_wall_s").fetchall()
    return [json.loads(body) for (body,) in rows]


def test_the_incident_names_the_line_and_only_of_its_own_generation(runs: Runs) -> None:
    run = runs.script("talks.py", flags=("--nproc-per-node", "2", "--max-restarts", "1"))
    assert run.wait() == 1, run.output
    assert f"root: {ECC}" in run.output, run.output
    by_generation = {one["generation"]: one for one in journalled(run)
                     if one["fault"] == "rank_exited"}
    assert by_generation[1]["evidence"][0] == ["root", ECC], by_generation[1]
    assert "rank 1" in by_generation[1]["culprit"]
    # The same file still holds the first generation's line, from another rank.
    root = by_generation[2]["evidence"][0]
    assert root == ["root", "python_exception on rank 0 (user): ValueError: a mistake of its own"]


def test_data_that_are_not_to_be_had_end_it_with_one_sentence(runs: Runs) -> None:
    run = runs.start("train", "--nproc-per-node", "1", "--standby", "0",
                     "data=holdfast.trainer.feed.shards:Shards",
                     f"data_options.root={runs.home / 'nothing'}", name="t")
    assert run.wait() == 78, run.output
    said = f"data: {runs.home / 'nothing'}/index.json no such file: put it back"
    assert run.output.count(f"holdfast train: {said}") == 1, run.output
    assert "generation 2" not in run.output and "Traceback" not in run.output, run.output


def test_a_live_run_is_sampled_within_its_bound_and_what_was_skipped_is_counted(
    runs: Runs,
) -> None:
    run = runs.script("chatty.py", flags=("--nproc-per-node", "1"))

    def sampled() -> dict[str, Any]:
        said = (run.status() if run.ranks() else {}).get("logs") or {}
        return said if said.get("skipped_bytes") else {}

    began_s = time.monotonic()
    logs = wait_for(sampled, what="a first sample")
    took_s = time.monotonic() - began_s
    assert 0 < logs["read_bytes"] <= BYTES_S * took_s
    assert logs["skipped_bytes"] > logs["read_bytes"] and not logs["problem"]
    (seen,) = {(one["signature"], one["rank"], one["culprit"]) for one in logs["seen"]}
    assert seen == ("nccl_ib_wc_error_old", 0, "network")
    assert run.process.poll() is None and not run.own_incidents(), "a line alone ends nothing"
    run.process.terminate()
    run.wait()


def test_a_rank_that_floods_its_log_fills_neither_disk_nor_memory(runs: Runs) -> None:
    limit = 64 << 20
    run = runs.script("floods.py", flags=("--nproc-per-node", "1", "--log-limit", "64"))
    run.at_step(20, rank=0)
    log = runs.home / "st/runs/t/logs/rank-0/stdout.log"
    wait_for(lambda: log.stat().st_size > 2 * limit, what="a flood")
    before = rss_bytes(run.process.pid)
    wait_for(lambda: log.stat().st_size > 8 * limit, what="more of it")
    step = run.all_ranks()[0]["step"]
    # It is cut a few times a second: what came since then is there as well, for that long.
    assert log.stat().st_blocks * 512 < 6 * limit, run.output[-2000:]
    wait_for(lambda: log.stat().st_blocks * 512 < 2 * limit, what="the middle to be dropped")
    assert rss_bytes(run.process.pid) - before < 16 << 20
    run.at_step(step + 10, rank=0)
    assert 1 <= run.output.count("is over --log-limit") <= 5  # said again when it has doubled
    run.process.send_signal(signal.SIGINT)
    run.wait()


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
