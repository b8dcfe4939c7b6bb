"""The measurement of telemetry still runs: what it reads and writes, not how long that takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_a_slow_set_of_eight_gpus_is_read_and_written_down(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing (Debian package build-essential): no stand-in for NVML")
    command = [sys.executable, "-m", "bench.telemetry", "--quick", "--cases", "slow_set",
               "--out", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".types")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    (file,) = tmp_path.glob("telemetry-*.jsonl")
    row = json.loads(file.read_text())
    assert row["ok"] and not row["troubles"], row["why"] + done.stderr
    assert row["collectors"]["nvidia"] and row["samples"] > 1200
    rounds = [len(row[name]) for name in ("agent_s", "step_s", "wall_s")]
    assert rounds == [5, 5, 5] and min(row["children_s"]["nvidia"]) > 0
    assert row["goals"] == {"slow_set_cpu_ms": 60.0}
