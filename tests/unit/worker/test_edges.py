"""The launcher's edges: folders of others, packets too large, errands that hang."""

from __future__ import annotations

import os
import selectors
import sys

import pytest

from holdfast.worker import agentlink, levels, wire
from holdfast.worker.errands import Errands


def test_the_folder_of_the_socket_must_be_ours_alone(tmp_path):
    path = str(tmp_path / "base")
    agentlink.own_directory(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    agentlink.own_directory(path)
    os.chmod(path, 0o777)
    with pytest.raises(PermissionError, match="yours alone"):
        agentlink.own_directory(path)
    link = str(tmp_path / "link")
    os.symlink(tmp_path, link)
    with pytest.raises(PermissionError):
        agentlink.own_directory(link)


def test_a_socket_path_that_is_too_long_is_said_with_what_to_set():
    with pytest.raises(OSError, match="HOLDFAST_RUNTIME_DIR"):
        agentlink.places("run", {"HOLDFAST_RUNTIME_DIR": "/tmp/" + "x" * 120, "HOME": "/tmp"})


@pytest.mark.parametrize("ranks", [1, 32, 256])
def test_a_level_fits_its_packet_whatever_the_ranks_said(ranks):
    ended = {"code": 1, "signal": 0, "outcome": "exception", "error": "\u2026" * 500,
             "by_us": False, "boot_s": 1.0, "wall_s": 1.0}  # fmt: skip
    level = {
        "t": "levels", "n": 1,
        "ranks": [{"rank": n, "local_rank": n, "pid": n, "generation": 1, "state": "ended",
                   "ended": ended, "parked": None,
                   "flight": [[9, "gloo:all_reduce", "[[1024, 1024]]"]] * 12}
                  for n in range(ranks)],
        "commits": [{"generation": 1, "step": n, "path": "/data/" + "c" * 150, "world": 2,
                     "bad": ""} for n in range(100)],
    }  # fmt: skip
    fitted = levels.fitted(level)
    assert wire.size_of(fitted) <= wire.LIMIT_BYTES
    assert [r["rank"] for r in fitted["ranks"]] == list(range(ranks))
    assert fitted["ranks"][0]["ended"]["code"] == 1 and fitted["commits"][-1]["step"] == 99


def test_an_overdue_errand_is_ended_and_its_number_forgotten_first():
    errands, told, closed = Errands(), [], []
    polled = selectors.DefaultSelector()

    def forget(errand):
        polled.unregister(errand)
        closed.append(errand.fileno())

    errands.on_close = forget
    errand = errands.command(
        [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.0,
        lambda ok, text: told.append((ok, text)), "sleeper",
    )  # fmt: skip
    assert errand is not None
    polled.register(errand, selectors.EVENT_READ)
    errands.tend(errand.deadline_s)
    assert told == [(False, "sleeper took too long and was ended")]
    assert closed and not polled.get_map() and not errands.running
    with pytest.raises(ChildProcessError):
        os.waitpid(errand.child.pid, os.WNOHANG)


def test_an_errand_that_cannot_start_says_so():
    errands, told = Errands(), []
    errands.command(["/no/such/program"], {}, 1.0, lambda ok, text: told.append((ok, text)), "it")
    assert told and told[0][0] is False and "No such file" in told[0][1]


