"""Real launchers, agents and ranks, each in directories of its own, and nothing left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import Runs, wait_for


@contextlib.contextmanager
def own_directories() -> Iterator[Runs]:
    """Directories with short names (a unix socket's path has 108 characters), and a final look."""
    home = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    before = set(os.listdir("/dev/shm"))
    made = Runs(home)
    yield made
    for run in made.started:
        if run.process.poll() is None:
            run.kill_all()
    with contextlib.suppress(AssertionError):  # an end takes a moment on a busy machine
        wait_for(lambda: not made.left(), 5.0)
    left = made.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    output = "\n".join(run.output for run in made.started)
    shutil.rmtree(home, ignore_errors=True)
    assert not left, f"processes left behind: {left}\n{output}"
    assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture()
def runs() -> Iterator[Runs]:
    with own_directories() as made:
        yield made


@pytest.fixture(scope="module")
def shared_runs() -> Iterator[Runs]:
    """Of a whole file: for what is made once, and read by several tests."""
    with own_directories() as made:
        yield made
