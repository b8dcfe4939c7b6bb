"""The ledger against the clock: a run that loses ranks two ways, of the node and of the run."""

from __future__ import annotations

from typing import Any

from running import Runs, wait_for

SHARE = 0.001  # of the time between two readings


def read(run: Any) -> tuple[float, float, float]:
    """(wall clock at its last step, seconds of the node, seconds of the run)."""
    ledger = run.api("/api/v1/ledger")
    assert sum(ledger["categories"].values()) - ledger["wall_s"] < 1e-3
    of_run = sum(ledger["runs"].get("t", {}).values())
    return ledger["since_wall_s"] + ledger["wall_s"], ledger["wall_s"], of_run


def test_every_second_of_node_and_run_is_in_one_category_while_ranks_are_lost(runs: Runs) -> None:
    run = runs.script("plain.py", "100000", flags=("--nproc-per-node", "2", "--hang-limit", "2"))
    run.at_step(3)
    begin = read(run)
    run.inject("kill", 1)
    wait_for(lambda: run.status()["generation"] == 2, 60, "a new generation")
    run.at_step(5)
    run.inject("stop", 0)
    wait_for(lambda: run.status()["generation"] == 3, 60, "another one")
    run.at_step(5)
    end = read(run)
    wall_s, node_s, run_s = (late - early for early, late in zip(begin, end, strict=True))
    assert wall_s > 1.0
    assert abs(node_s - wall_s) <= SHARE * wall_s, (wall_s, node_s)
    assert abs(run_s - wall_s) <= SHARE * wall_s, (wall_s, run_s)
    lost = run.api("/api/v1/ledger")["categories"]
    assert lost["training"] > 0.0 and lost["detection"] + lost["recovery"] > 0.0, lost
