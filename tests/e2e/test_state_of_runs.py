"""What a run with an agent of its own leaves: for its user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest


def run(
    tmp_path: Path, name: str, *flags: str, code: str = "echo hello; sleep 1.5", status: int = 0,
    restarts: str = "3",
) -> str:
    """One run with an agent of its own, to its end; what it said."""
    environ = {**os.environ, "HOLDFAST_STATE_DIR": str(tmp_path / "state"),
               "HOLDFAST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "run", "--run", name, *flags,
               "--max-restarts", restarts, "--no-python", "sh", "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=90.0, check=False,
                          umask=0o022)
    assert done.returncode == status, done.stderr.decode()
    return (done.stdout + done.stderr).decode()


def modes(root: Path) -> dict[str, int]:
    """Of everything below `root`, by its path."""
    found = [root, *root.rglob("*")]
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in found}


@pytest.mark.parametrize("is_old", [False, True])
def test_state_is_its_users_alone(is_old: bool, tmp_path: Path) -> None:
    home = tmp_path / "state/runs/m5"
    if is_old:  # as an earlier release left it
        home.mkdir(parents=True)
        (home / "agent.log").write_text("before\n")
        for name in ("journal.db", "store.db"):
            (home / name).touch(0o644)
    run(tmp_path, "m5")
    found = modes(home)
    assert {"agent.log", "journal.db", "store.db", "lock", "logs/rank-0/stdout.log"} <= set(found)
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
    if not is_old:
        assert not stat.S_IMODE((tmp_path / "state").stat().st_mode) & 0o077


def test_a_folder_that_was_asked_for_is_as_open_as_torchruns(tmp_path: Path) -> None:
    run(tmp_path, "m5", "--log-dir", str(tmp_path / "logs"))
    found = modes(tmp_path / "logs")
    assert found["rank-0"] == 0o755 and found["rank-0/stdout.log"] == 0o644


def test_a_run_leaves_no_runtime_folder(tmp_path: Path) -> None:
    run(tmp_path, "m5")
    assert not (tmp_path / "run/m5").exists()


def test_only_the_lines_that_were_asked_for_are_shown(tmp_path: Path) -> None:
    code = "echo out $RANK; echo err $RANK >&2"
    flags = ("--nproc-per-node", "2", "--local-ranks-filter", "1", "--redirects", "2")
    said = run(tmp_path, "m5", *flags, code=code)
    assert "out 1\n" in said and "out 0\n" not in said and "err" not in said
    logs = tmp_path / "state/runs/m5/logs"
    assert (logs / "rank-0/stdout.log").read_text() == "out 0\n"
    assert (logs / "rank-1/stderr.log").read_text() == "err 1\n"
