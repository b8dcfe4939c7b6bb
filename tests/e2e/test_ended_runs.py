"""What a private run's journal holds is told after it has ended, each attempt apart."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_state_of_runs import run

from holdfast.agent.cli import main
from holdfast.agent.history import past_runs

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def test_an_ended_run_is_told_from_its_files(at: Path, capsys: Captured) -> None:
    for _ in range(2):
        run(at, "m5", code="kill -9 $$", status=76, restarts="0")
    capsys.readouterr()
    assert main(["status"]) == 1
    assert "`holdfast incidents --run m5`" in capsys.readouterr().err
    journal = at / "state/runs/m5/journal.db"
    before = journal.read_bytes()
    assert main(["incidents", "--run", "m5", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    listed = [one for one in listed if one["run"]]  # the node's own are any test's
    assert {one["attempt"] for one in listed} == {1, 2}
    assert {one["run"] for one in listed} == {"m5"}
    assert main(["incidents", "--run", "m5"]) == 0
    said = capsys.readouterr().out
    assert said.index("attempt 2\n") < said.index("attempt 1\n")
    assert main(["incidents", "--run", "m5", listed[0]["id"]]) == 0
    assert listed[0]["id"] in capsys.readouterr().out
    assert main(["ledger", "--run", "m5"]) == 0
    assert "over 2 attempts under this name" in capsys.readouterr().out
    assert journal.read_bytes() == before
    for name in ("other", "../m5", ".", "x" * 300):
        assert main(["incidents", "--run", name]) == 1
        assert "nothing runs here" in capsys.readouterr().err


def test_a_run_whose_launcher_was_killed_is_lost_and_not_running(
    at: Path, capsys: Captured
) -> None:
    command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "run", "--run", "m5",
               "--no-python", "sh", "-c", "echo up; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"up\n"
        launcher.kill()
    folder, limit_s = at / "state/runs/m5", time.monotonic() + 30.0
    while not (ended := [one for one in past_runs.read(folder).jobs if one.ended()]):
        assert time.monotonic() < limit_s, "its agent ended it in its journal"
        time.sleep(0.1)
    assert (ended[0].outcome, ended[0].reason) == ("lost", "its launcher is gone")
    assert main(["jobs", "--json"]) == 0
    assert [one["outcome"] for one in json.loads(capsys.readouterr().out)] == ["lost"]


def test_the_last_run_is_the_one_that_ran_last_whoever_reads_another(
    at: Path, capsys: Captured
) -> None:
    run(at, "first")
    run(at, "second")
    assert main(["ledger", "--run", "first"]) == 0
    (at / "state/runs/first/read").touch()  # the folder is the younger one now
    capsys.readouterr()
    assert main(["status"]) == 1
    assert "`holdfast ledger --run second`" in capsys.readouterr().err


def test_a_node_that_shares_its_home_tells_its_own_side_of_a_run(
    at: Path, capsys: Captured
) -> None:
    run(at, "m5", code="kill -9 $$", status=76, restarts="0")
    alone = at / "state/runs/m5"
    own = alone.rename(alone.with_name(f"m5@{socket.gethostname()}"))
    shutil.copytree(own, alone.with_name("m5@another"))
    capsys.readouterr()
    assert main(["status"]) == 1
    assert "`holdfast incidents --run m5`" in capsys.readouterr().err
    assert main(["incidents", "--run", "m5", "--json"]) == 0
    assert {one["run"] for one in json.loads(capsys.readouterr().out) if one["run"]} == {"m5"}
    assert main(["jobs", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    own.rename(alone.with_name("m5@gone"))
    assert main(["incidents", "--run", "m5"]) == 1


def test_what_is_no_journal_is_said(at: Path, capsys: Captured) -> None:
    home = at / "state/runs/m5"
    home.mkdir(parents=True)
    (home / "journal.db").write_text("hello" * 1000)
    assert main(["incidents", "--run", "m5"]) == 1
    assert "its journal cannot be read" in capsys.readouterr().err
