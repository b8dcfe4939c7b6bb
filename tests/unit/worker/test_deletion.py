"""Checkpoints are let go by a child, which a dead mount may hold and the launcher not."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest

from holdfast.worker.launcher import forking
from holdfast.worker.launcher.child_tasks import Errands
from holdfast.worker.launcher.commands import Orders


class Root:
    """As much of a launcher as a deletion touches."""

    def __init__(self, checkpoint_dir, *paths):
        self.checkpoint_dir = str(checkpoint_dir)
        self.commits = {str(path): {} for path in paths}
        self.crew = SimpleNamespace(generation=3)
        self.errands = Errands()
        self.outcomes = []
        self.link = SimpleNamespace(channel=None)
        self.orders = Orders(self)

    def add_errand(self, errand):
        self.errand = errand

    def delete(self, *paths):
        """The outcome of an order to delete, once its child has answered."""
        body = {"generation": 3, "paths": [str(path) for path in paths]}
        self.orders.carry_out("delete", "d%d" % len(self.outcomes), body)
        while self.errands.running and not self.errand.read():
            pass
        for errand in list(self.errands.running):
            self.errands.finish(errand)
        return self.outcomes[-1]


def checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "COMMIT").write_text("{}")
    return folder


def test_checkpoints_are_deleted_and_nothing_else(tmp_path):
    mine, foreign = checkpoint(tmp_path / "run/step-1"), checkpoint(tmp_path / "other/step-1")
    (tmp_path / "run/link").symlink_to(foreign)
    launcher = Root(tmp_path / "run", mine, foreign, tmp_path / "run/link")
    for path in (foreign, tmp_path / "run/link", tmp_path / "run/never-committed"):
        outcome = launcher.delete(mine, path)
        assert not outcome["ok"] and "is no checkpoint of this run" in outcome["error"]
    assert mine.exists() and foreign.exists()
    assert launcher.delete(mine)["ok"]
    assert not mine.exists() and str(mine) not in launcher.commits


def test_a_dead_mount_never_holds_the_launcher(tmp_path, monkeypatch):
    """A look-up on a dead mount never returns: it must happen in a child, which is ended."""
    mine = checkpoint(tmp_path / "run/step-1")
    launcher = Root(tmp_path / "run", mine)
    launcher_pid, asked = os.getpid(), []

    def never_returns(path, *_, **__):
        if os.getpid() == launcher_pid:
            asked.append(path)
            raise OSError("the launcher asked the dead mount")
        time.sleep(600)

    for name in ("stat", "lstat", "unlink"):
        monkeypatch.setattr(os, name, never_returns)
    launcher.orders.carry_out("delete", "d", {"generation": 3, "paths": [str(mine)]})
    launcher.errands.tend(launcher.errands.running[0].deadline_s)
    assert asked == [] and not launcher.errands.running
    assert launcher.outcomes[-1]["error"] == "deleting checkpoints took too long and was ended"


def test_a_child_that_does_not_die_is_left_and_reaped_when_it_goes(monkeypatch):
    errands, told = Errands(), []
    errand = errands.command(
        [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.0,
        lambda ok, text: told.append(text), "sleeper",
    )
    assert errand is not None
    reap = forking.reap
    monkeypatch.setattr(forking, "reap", lambda pid: None)  # as in state D: killed and still there
    begin_s = time.monotonic()
    errands.tend(errand.deadline_s)
    assert time.monotonic() - begin_s < 0.5 and errands.left == [errand.child.pid]
    assert told == ["sleeper took too long and was ended"]
    monkeypatch.setattr(forking, "reap", reap)
    os.waitid(os.P_PID, errand.child.pid, os.WEXITED | os.WNOWAIT)
    errands.tend(0.0)
    assert errands.left == []
    with pytest.raises(ChildProcessError):
        os.waitpid(errand.child.pid, os.WNOHANG)
