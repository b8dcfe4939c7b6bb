"""The launcher removes a stale lock of its own user in a compile cache, and no other file."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from holdfast.worker.launcher import compiling
from holdfast.worker.launcher.commands import Commands, remove_stale


class ChildTasks:
    """Runs the task here and now."""

    def call(self, body, timeout_s, done, what):
        try:
            done(True, str(body()))
        except Exception as error:  # as the child's border does
            done(False, str(error))


@pytest.fixture
def cache(tmp_path):
    folder = tmp_path / "neuron-compile-cache" / "x"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def commands():
    living = []
    ranks, link = SimpleNamespace(living=lambda: living), SimpleNamespace(channel=None)
    return Commands(None, ranks, ChildTasks(), link, None, compiling.Watch({}), None)


def remove(commands, path):
    commands.carry_out("remove_lock", str(path), {"path": str(path)})
    outcome = commands.outcomes[-1]
    return outcome["ok"], outcome["error"] + outcome["detail"]


def lock(folder, name="model.pb.lock", age_s=600.0):
    path = folder / name
    path.write_text("")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_a_stale_lock_is_removed_and_its_age_said(commands, cache):
    path = lock(cache)
    ok, text = remove(commands, path)
    assert ok and "removed, 600 s old" in text and not path.exists()


@pytest.mark.parametrize(("name", "said"), [
    ("model.pb", "no lock"), ("young.lock", "somebody may hold it"),
    ("link.lock", "no plain file"), ("gone.lock", "No such file"),
])
def test_what_is_no_stale_lock_stays(commands, cache, name, said):
    path = cache / name
    if name == "link.lock":
        path.symlink_to(lock(cache, "target"))
    elif name != "gone.lock":
        lock(cache, name, 10.0 if name == "young.lock" else 600.0)
    ok, text = remove(commands, path)
    assert not ok and said in text
    assert name == "gone.lock" or os.path.lexists(path)


def test_another_users_lock_stays_whoever_is_asked(commands, cache, monkeypatch):
    path, own = lock(cache), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    ok, text = remove(commands, path)
    assert not ok and "no plain file of this user" in text and path.exists()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_became_a_link_leads_to_nobodys_work(commands, cache, tmp_path, depth):
    """The folder was looked at minutes before; who made it has put a link there since."""
    path = lock(cache, "uv.lock")
    work = tmp_path / "work" / (cache.name if depth else "")
    work.mkdir(parents=True)
    kept = lock(work, "uv.lock")
    swapped = [cache, cache.parent][depth]
    shutil.rmtree(swapped)
    swapped.symlink_to([work, work.parent][depth])
    ok, text = remove(commands, path)
    assert not ok and f"its folder is {work}" in text and kept.exists()


def test_a_lock_elsewhere_is_not_ours_to_judge(commands, tmp_path):
    path = lock(tmp_path)
    ok, text = remove(commands, path)
    assert not ok and "no lock in a compile cache" in text and path.exists()


def test_nothing_is_removed_while_a_rank_compiles(commands, cache, tmp_path):
    compiler = tmp_path / "neuronx-cc"
    shutil.copy("/bin/sleep", compiler)
    running = subprocess.Popen([compiler, "60"])
    try:
        commands.ranks.living().append(SimpleNamespace(
            rank=0, child=SimpleNamespace(pid=os.getpid())))
        path = lock(cache)
        ok, text = remove(commands, path)
        assert not ok and "rank 0: neuronx-cc" in text and path.exists()
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("how", [fcntl.flock, fcntl.lockf])
def test_a_lock_that_a_living_process_holds_is_left(commands, cache, how):
    path = lock(cache)
    begun, ready = os.pipe()
    child = os.fork()
    if not child:
        with open(path, "r+") as file:
            how(file, fcntl.LOCK_EX)
            os.utime(path, (1.0, 1.0))
            os.write(ready, b"x")
            time.sleep(60)
    try:
        os.read(begun, 1)
        ok, text = remove(commands, path)
        assert not ok and "a living process holds it" in text and path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "removed" in remove_stale(str(path)) and not path.exists()
