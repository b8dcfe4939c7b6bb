"""Checkpoints are let go by a child, which a dead mount may hold and the launcher not."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
from waiting import wait_for

from holdfast.worker.launcher import child_tasks, forking
from holdfast.worker.launcher.child_tasks import ChildTasks
from holdfast.worker.launcher.commands import Commands, remove_checkpoint

STEP, OTHER = "step-000000001.gen-1", "step-000000002.gen-1"


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
    mine, foreign = checkpoint(tmp_path / "run" / STEP), checkpoint(tmp_path / "other" / STEP)
    second = checkpoint(tmp_path / "run" / OTHER)
    out, across = (tmp_path / "run" / f"step-00000000{n}.gen-1" for n in (8, 9))
    out.symlink_to(foreign)
    across.symlink_to(second)
    named = checkpoint(tmp_path / "run/quarantine")
    launcher = Root(tmp_path / "run", mine)
    for path in (foreign, out, across, named, tmp_path / "run" / ".." / "other" / STEP):
        outcome = launcher.delete(mine, path)
        assert not outcome["ok"] and "is no checkpoint of this run" in outcome["error"]
    assert mine.exists() and (foreign / "COMMIT").exists() and (second / "COMMIT").exists()
    assert launcher.delete(mine)["ok"]
    assert not mine.exists() and str(mine) not in launcher.commits
    assert Root("", mine).delete(second)["error"].endswith("is no checkpoint of this run")


def test_what_another_launchers_rank_0_committed_is_deleted_as_well(tmp_path):
    """The launcher of the node that leads hears of a commit only where rank 0 is."""
    theirs = checkpoint(tmp_path / "run" / STEP)
    assert Root(tmp_path / "run").delete(theirs)["ok"] and not theirs.exists()


def test_only_the_newest_generation_deletes_and_a_spare_has_none(tmp_path):
    mine = checkpoint(tmp_path / "run" / STEP)
    launcher = Root(tmp_path / "run", mine)
    launcher.commands.ranks.generation = 4
    assert launcher.delete(mine)["error"] == "generation 3 is not the newest" and mine.exists()
    launcher.commands.ranks.generation = 0
    assert launcher.delete(mine)["ok"] and not mine.exists()


def test_who_else_removes_a_checkpoint_is_no_error(tmp_path, monkeypatch):
    """The trainer tidies up what has no marker any more while the launcher's child is at it."""
    here, half, gone = (tmp_path / "run" / f"step-00000000{n}.gen-1" for n in (1, 2, 3))
    checkpoint(here)
    half.mkdir()
    assert Root(tmp_path / "run").delete(gone, half, here)["ok"]
    assert not half.exists() and not here.exists()
    (checkpoint(here) / "shard").touch()
    real, tries = shutil.rmtree, []

    def raced(path, ignore_errors=False):
        tries.append(ignore_errors)
        if ignore_errors:
            return  # stopped where another one had removed a file before it
        real(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "rmtree", raced)
    remove_checkpoint(str(here))
    assert tries == [True, False] and not here.exists()


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch):
    here = checkpoint(tmp_path / "run" / STEP)

    def refuses(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    outcome = Root(tmp_path / "run", here).delete(here)
    assert not outcome["ok"] and "Permission denied" in outcome["error"]


def test_a_dead_mount_never_holds_the_launcher(tmp_path, monkeypatch):
    """A look-up on a dead mount never returns: it must happen in a child, which is ended."""
    mine = checkpoint(tmp_path / "run" / STEP)
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
    mine, foreign = checkpoint(tmp_path / "run" / STEP), checkpoint(tmp_path / "other" / STEP)
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
