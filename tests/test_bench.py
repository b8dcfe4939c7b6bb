"""The measurements still run, and their table is of the right rows: what they read and write, not
how long that takes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import common, false_acts, overhead, report, uneven
from bench.observe import LogWatch

ROOT = Path(__file__).resolve().parent.parent


def test_a_slow_set_of_eight_gpus_is_read_and_written_down(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing (Debian package build-essential): no stand-in for NVML")
    command = [sys.executable, "-m", "bench.telemetry", "--quick", "--cases", "slow_set",
               "--out", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".types")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True,
                          timeout=120, check=False)
    (file,) = tmp_path.glob("telemetry-*.jsonl")
    row = json.loads(file.read_text())
    assert row["ok"] and not row["troubles"], row["why"] + done.stderr
    assert row["samples"] > 1800
    held = ("nvidia", "rdma", "network", "hardware_errors", "nvme")  # of a node of that size
    assert [row["collectors"][name] for name in held] == [1289, 269, 161, 71, 48]
    assert {"tasks", "mounts"} <= set(row["collectors"])
    assert {"amd", "neuron"} <= set(row["absent"])
    rounds = [len(row[name]) for name in ("agent_s", "step_s", "took_s")]
    assert rounds == [5, 5, 5] and min(row["children_s"]["nvidia"]) > 0
    assert row["goals"] == {"slow_set_cpu_ms": 60.0}


def test_the_table_takes_of_each_case_the_newest_that_is_not_quick(tmp_path: Path) -> None:
    machine = {"revision": "1234567", "cores": 2, "cpu": "one", "python": "3", "torch": "2",
               "load_1m": 0.1}
    rows = [("1", "", "trainer_sigkill", 0.4), ("1", "", "torchrun_sigkill_prefix", 4.0),
            ("1", "", "script_sigkill", 2.0), ("2", "--runs 9", "trainer_sigkill", 0.5),
            ("3", "--quick", "trainer_sigkill", 9.0), ("3", "--quick", "trainer_stall", 3.0)]
    (tmp_path / "recovery-2026-01-01.jsonl").write_text("".join(
        json.dumps({"invocation": invocation, "arguments": arguments, "case": case, "ok": True,
                    "recovery_s": took_s, "machine": machine}) + "\n"
        for invocation, arguments, case, took_s in rows))
    (tmp_path / "recovery_against_old-2026-01-02.jsonl").write_text(json.dumps(
        {"invocation": "4", "arguments": "", "case": "trainer_sigkill"}) + "\n")
    found = report.load(tmp_path, "recovery", "")
    assert [(row["invocation"], row["case"]) for row in found] == [
        ("1", "torchrun_sigkill_prefix"), ("1", "script_sigkill"), ("2", "trainer_sigkill"),
        ("3", "trainer_stall"),
    ]
    lines = {line.split(" | ")[0]: line for line in report.recovery(found).splitlines()}
    assert lines["| script, SIGKILL"].endswith(" 2.0 x | MISSED (recovery p50 2.00 of 1) |")
    assert " | - | met (" in lines["| trainer, SIGKILL"], "a ratio of two invocations"
    first, *_ = report.sources("recovery", found)
    assert "invocation 1 (torchrun_sigkill_prefix, script_sigkill), revision 1234567" in first
    assert [row["recovery_s"] for row in report.load(tmp_path, "recovery", "1")] == [0.4, 4.0, 2.0]


@pytest.mark.parametrize("name", ["classify", "log_child"])
def test_a_row_says_of_which_code_and_machine_it_is(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--out", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".types")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True,
                          timeout=120, check=False)
    (row,) = report.load(tmp_path, name, "")
    assert not row["why"], done.stderr
    assert row["bench"] == row["case"] == name and row["arguments"].startswith("--quick")
    assert {"revision", "cpu", "load_1m"} <= set(row["machine"])
    assert report.main(["--folder", str(tmp_path)]) == 0
    if name == "classify":
        assert len(row["judged"]) == row["cases"]
    else:
        assert len(row["sample_cpu_s"]) == 3


@pytest.mark.parametrize(("ends", "good"), [("taken_back", True), ("open", False)])
def test_a_suspicion_is_waited_for_and_must_be_taken_back(
    ends: str, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [SimpleNamespace(generation=1, rank=rank, pid=rank, end_ns=1) for rank in range(2)]
    asked: list[dict[str, Any]] = []

    def incidents(*_: object) -> list[dict[str, Any]]:
        asked.append({"id": "1", "state": "open" if len(asked) < 3 else ends,
                      "timeline": [(1.0, "suspected: it stands still")]})
        later = {**asked[0], "id": "2"}  # of the time after the measured one
        return [asked[-1], later] if len(asked) > 1 else [asked[-1]]

    pages = SimpleNamespace(steps=steps, poll=lambda: steps)
    monkeypatch.setattr(false_acts, "spread", lambda pages: {"step_max_s": 61.0})
    monkeypatch.setattr(false_acts, "PageWatch", lambda pid: pages)
    monkeypatch.setattr(common, "incidents", incidents)
    monkeypatch.setattr(false_acts, "ASK_S", 0.0)
    monkeypatch.setattr(false_acts, "SETTLE_S", 30.0 if good else 0.5)
    process = SimpleNamespace(pid=1, poll=lambda: None)
    row = false_acts.watch(common.Place(tmp_path, {}), process, 0.0001)
    assert row["suspicions"] == 1 and row["acts"] == 0
    assert row["still_open"] == int(not good) and false_acts.is_good(row) == good


def test_a_compile_that_is_told_is_no_act_and_an_incident_that_was_acted_on_is() -> None:
    def found(fault: str, state: str) -> dict[str, Any]:
        timeline = [(1.0, "suspected: x")]
        return false_acts.judge([{"fault": fault, "state": state, "timeline": timeline}])

    ticket = found("graph_recompiled", "closed")
    assert (ticket["tickets"], ticket["suspicions"], ticket["acted_by_agent"]) == (1, 0, 0)
    for state in ("acted", "closed"):
        assert found("rank_hung", state)["acted_by_agent"] == 1
    assert found("rank_hung", "taken_back")["taken_back"] == 1


def test_a_run_without_a_long_pause_shows_nothing_about_acts_by_cost() -> None:
    quiet = {"acts": 0, "acted_by_agent": 0, "api": "", "taken_back": 4, "suspicions": 4}
    for longest_s, good in ((20.0, False), (60.0, False), (75.0, True)):
        row = {**quiet, "step_max_s": longest_s}
        assert false_acts.is_good(row) == good
        assert false_acts.verdict(row).startswith("none" if good else "NOTHING SHOWN")
    assert false_acts.verdict({**quiet, "acts": 1, "step_max_s": 20.0}).startswith("ACTED")
    # Within ten minutes a healthy run makes several that are longer than any floor.
    took_s, long = 0.0, []
    for step in range(1, 2000):
        pause_s = max(uneven.pause_of(step, rank)[1] for rank in (0, 1))
        took_s += pause_s + 2 * uneven.BASE_S
        long += [pause_s] if pause_s > false_acts.FLOOR_S and took_s < 600 else []
    assert len(long) >= 3


def test_a_missed_goal_is_told_as_missed_and_a_lost_run_misses() -> None:
    def rows(*times: float, lost: int = 0) -> list[dict[str, Any]]:
        return [{"ok": True, "recovery_s": each} for each in times] + [{"ok": False}] * lost

    assert report.goals("trainer_sigkill", rows(*[0.3] * 19, 0.79)).count("met") == 2
    slow = report.goals("trainer_sigkill", rows(*[0.3] * 18, 0.9, 0.9))
    assert slow.startswith("met (recovery p50 0.30 of 0.5)") and "MISSED (recovery p95 0.90" in slow
    assert "MISSED" in report.goals("script_sigkill", rows(0.5, 0.5, lost=3))
    assert report.goals("torchrun_sigkill", rows(9.0)) == "-"


def test_words_in_a_log_are_as_old_as_their_write_however_late_they_are_read(
    tmp_path: Path
) -> None:
    path = tmp_path / "agent.log"
    path.write_text("n1 is lost\n")
    watch = LogWatch(path, "n1 is lost")
    watch.poll()
    assert not watch.at_ns, "it was said before"
    with open(path, "a") as file:
        file.write("n1 is back\nn1 is ")
    watch.poll()
    assert not watch.at_ns
    with open(path, "a") as file:
        file.write("lost\n")
    os.utime(path, ns=(0, time.time_ns() - 2_000_000_000))
    watch.poll()
    said_ns = watch.at_ns
    assert 2e9 <= time.monotonic_ns() - said_ns < 2e9 + 1e9
    watch.poll()
    assert watch.at_ns == said_ns


def test_the_tables_over_nodes_tell_whose_end_it_was_and_who_never_began() -> None:
    old = {"case": "shrink", "recovery_s": 0.4, "redone_steps": 0, "leader": False}
    new = {**old, "ok": True, "recovery_s": 0.6, "leader": True, "etcd_leader": True,
           "known_s": {"n0": 0.2, "n1": 0.3}, "lease_s": 10.0, "etcd_ms": [100, 1000]}
    weights = {"case": "weights_shrink", "ok": True, "steps": 90, "generations": 3,
               "identical": False, "weights_apart": 2.4e-7}
    text = report.cluster([old, new, weights])
    assert ("| a node loses power, no spare: 4 become 3 | - | 2 | 0.50 (0.40 to 0.60) | 0.25 (0.20 "
            "to 0.30), longest 0.30 | 0 |") in text
    assert "| of them the node of the leader | 10 s; 100 and 1000 ms | 1 | 0.60" in text
    assert "| of them the one with etcd's leader | 10 s; 100 and 1000 ms | 1 | 0.60" in text
    assert text.endswith("shrink, 90 steps in 3 generations, against a run without a fault: "
                         "weights at most 2.4e-07 apart.")
    weights["identical"] = True
    assert report.cluster([weights]).endswith("the same weights to the last bit.")

    runs = [{"case": "script_node_loss", "runner": "tuned", "ok": ok, "recovery_s": seconds}
            for ok, seconds in ((True, 8.0), (True, None), (False, None))]
    assert "| node_loss | tuned | 3 | 2 | 1 | 8.00 (8.00 to 8.00) |" in report.cluster_script(runs)
    storm = {"kills": 2, "steps": 12, "attempted": 14, "committed_share": 12 / 14,
             "lost_s_each": 0.5, "back_s": [0.4, 0.6], "redone_steps": 0, "equal": True}
    assert report.torture([storm]).endswith(
        "| 2 | 12 of 14 (85.7 %) | 0.50 | 0.50 (0.40 to 0.60), longest 0.60 | 0 | True |")


@pytest.mark.parametrize("cost_ns", [0, 20_000_000])
def test_a_snapshots_cost_is_read_out_of_its_own_steps(cost_ns: int) -> None:
    """Steps whose pace drifts by half, and a snapshot in every other cadence, that costs a fifth of
    a step."""
    cadence, noise = 50, random.Random(3)

    def ns(step: int) -> int:
        taken = step % cadence == 0 and not step // cadence % 2
        usual = 100_000_000 * (1 + 0.5 * math.sin(step / 700))
        return int(usual + noise.gauss(0, 3_000_000)) + cost_ns * taken

    steps = [[step, step % 2, int(not step // cadence % 2), ns(step), cadence]
             for step in range(4000)]
    found = overhead.of_snapshots(
        {"steps": steps, "all": {"pairs": 1900, "mean_percent": 0.1, "low_percent": -0.2,
                                 "high_percent": 0.3}})
    snapshots, together = found["snapshots"], found["together"]
    true_percent = 100 * cost_ns / (cadence * 100_000_000)
    assert snapshots["low_percent"] <= true_percent <= snapshots["high_percent"]
    assert snapshots["high_percent"] - snapshots["low_percent"] < 0.2 and snapshots["pairs"] > 30
    assert together["mean_percent"] == pytest.approx(snapshots["mean_percent"] + 0.1, abs=0.002)
    assert together["mean_percent"] - together["low_percent"] == pytest.approx(
        math.hypot(0.3, snapshots["mean_percent"] - snapshots["low_percent"]), abs=0.002)


def test_of_no_whole_cadence_nothing_is_said() -> None:
    steps = [[step, step % 2, 0, 100, 70] for step in range(90)]
    found = overhead.of_snapshots({"steps": steps, "all": {"pairs": 30}})
    assert found == {"snapshots": {"pairs": 0, "cadence_steps": 70}, "together": {}}
