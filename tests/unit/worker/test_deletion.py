"""Checkpoints are let go by a child, which a dead mount may hold and the launcher not."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest
from waiting import wait_for

from holdfast.worker.launcher import child_tasks, forking
from holdfast.worker.launcher.child_tasks import ChildTasks
from holdfast.worker.launcher.commands import Commands


class Root:
    """As much of a launcher as a deletion touches."""

    def __init__(self, checkpoint_dir, *paths):
        self.checkpoint_dir = str(checkpoint_dir)
        self.commits = {str(path): {} for path in paths}
        self.tasks = ChildTasks()
        self.tasks.on_open = self.remember
        ranks, link = SimpleNamespace(generation=3), SimpleNamespace(channel=None)
        self.commands = Commands(self, ranks, self.tasks, link, None, None, None)

    def remember(self, task):
        self.task = task

    def delete(self, *paths):
        """The outcome of an order to delete, once its child has answered."""
        body = {"generation": 3, "paths": [str(path) for path in paths]}
        self.commands.carry_out("delete", "d%d" % len(self.commands.outcomes), body)
        while self.tasks.running and not self.task.read():
            pass
        for task in list(self.tasks.running):
            self.tasks.finish(task)
        return self.commands.outcomes[-1]


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
    launcher.commands.carry_out("delete", "d", {"generation": 3, "paths": [str(mine)]})
    launcher.tasks.tend(launcher.tasks.running[0].deadline_s)
    assert asked == [] and not launcher.tasks.running
    error = launcher.commands.outcomes[-1]["error"]
    assert error == "deleting checkpoints took too long and was ended"


def test_a_child_that_has_answered_and_is_slow_to_go_has_answered(tmp_path, monkeypatch):
    mine, foreign = checkpoint(tmp_path / "run/step-1"), checkpoint(tmp_path / "other/step-1")
    launcher, reap = Root(tmp_path / "run", mine, foreign), forking.reap
    monkeypatch.setattr(child_tasks, "REAP_TRIES", 2)
    monkeypatch.setattr(forking, "reap", lambda pid: None)
    refused = launcher.delete(mine, foreign)
    assert "is no checkpoint of this run" in refused["error"]
    assert launcher.delete(mine)["ok"] and not mine.exists()
    assert len(launcher.tasks.left) == 2
    monkeypatch.setattr(forking, "reap", reap)
    wait_for(lambda: launcher.tasks.tend(0.0) or not launcher.tasks.left)


def test_a_child_that_does_not_die_is_left_and_reaped_when_it_goes(monkeypatch):
    tasks, told = ChildTasks(), []
    task = tasks.command(
        [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.0,
        lambda ok, text: told.append(text), "sleeper",
    )
    assert task is not None
    reap = forking.reap
    monkeypatch.setattr(forking, "reap", lambda pid: None)  # as in state D: killed and still there
    tasks.tend(task.deadline_s)  # returns, although the child is never gone
    assert tasks.left == [task.child.pid]
    assert told == ["sleeper took too long and was ended"]
    monkeypatch.setattr(forking, "reap", reap)
    os.waitid(os.P_PID, task.child.pid, os.WEXITED | os.WNOWAIT)
    tasks.tend(0.0)
    assert tasks.left == []
    with pytest.raises(ChildProcessError):
        os.waitpid(task.child.pid, os.WNOHANG)
