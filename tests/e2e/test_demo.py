"""The demo as a person runs it: whole, and interrupted at awkward moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ, "PYTHONPATH": str(ROOT / ".types"), "TMPDIR": str(directory),
        "DEMO_TEST": str(directory),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "holdfast.agent.cli", "demo", *arguments]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that this test's demo started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"DEMO_TEST={directory}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_everything_that_it_promises_holds(tmp_path: Path) -> None:
    demo = start(tmp_path, "--steps", "80")
    said, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, said
    assert said.count("held  ") == 7, said
    assert "FAILED" not in said
    assert processes_of(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["extracting", "snapshot every", "SIGSTOP to rank 1"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    demo = start(tmp_path, "--steps", "200")
    assert demo.stdout is not None
    for line in demo.stdout:
        if moment in line:
            break
    demo.send_signal(signal.SIGINT)
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, said
    wait_for(lambda: processes_of(tmp_path) == [], what="every process gone")
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared
