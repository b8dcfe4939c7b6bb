"""A launcher's processes for tests, and a rule: a socket or file that is left open fails a test.

In a job that runs for weeks a descriptor that stays behind a refused start is one more each time.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from holdfast.worker.launcher import forking, rank_processes, run_state, spec
from holdfast.worker.launcher.process import StartCommand
from holdfast.worker.wire import Channel

HERE = Path(__file__).parent
ERRORS = ("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for one in ERRORS:
                item.add_marker(pytest.mark.filterwarnings(one))


@pytest.fixture(autouse=True, scope="module")
def _own_garbage_alone() -> Iterator[None]:
    """What tests before these left is not held against them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    yield
    gc.collect()


class Launcher:
    """The real processes of a launcher, and the ranks' ends of their channels."""

    def __init__(self, folder, options):
        self.said, self.peers = [], {}
        self.state = run_state.RunState(options, str(folder))
        self.ranks = rank_processes.RankProcesses(
            self.state, dict(os.environ), lambda text, *_: self.said.append(text))

    def fork(self, program, seat):
        """What stands in for a fork of torch: another program in a session of its own."""
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        process.returncode = 0  # the launcher reaps it
        peer = socket.socket(fileno=os.dup(seat.control_fd))
        self.peers[process.pid] = Channel(peer)
        return forking.Child(process.pid, -1)

    def heard(self, process):
        """The packets that a rank was sent, oldest first, without their descriptors."""
        peer, found = self.peers[process.child.pid], []
        while peer.readable():
            packet, fds = peer.receive(16)
            found.append({**packet, "fds": len(fds)})
            for fd in fds:
                os.close(fd)
        return found

    def all_ready(self):
        for process in self.ranks.living():
            self.ranks.on_packet(process, {"t": "ready"})

    def lose(self, process, number=signal.SIGKILL):
        """A rank dies; what the launcher notices of it."""
        os.kill(process.child.pid, number)
        return wait_for(self.ranks.reap)


@pytest.fixture()
def launchers(tmp_path, monkeypatch):
    """Makes launchers; whatever they started is gone at the end."""
    made = []
    monkeypatch.setattr(forking, "has_torch", lambda: False)

    def make(word, *argv):
        one = Launcher(tmp_path, spec.parse(word, list(argv), {}))
        monkeypatch.setattr(forking, "why_not_fork", lambda: "")
        monkeypatch.setattr(forking, "fork_rank", one.fork)
        made.append(one)
        return one

    yield make
    for one in made:
        one.ranks.end_all()
        for channel in [*one.peers.values(), *(p.channel for p in one.ranks.processes)]:
            channel.sock.close()
    assert not [p for one in made for p in one.ranks.living()]


@pytest.fixture()
def trainer(launchers):
    """Two ranks of a trainer in generation 1, and a standby that is ready."""
    one = launchers("train", "--nproc-per-node", "2", "--standby", "1")
    one.ranks.prepare()
    one.all_ready()
    one.ranks.begin(StartCommand(1, (0, 1), (), 2, {"kind": "fresh"}, [], 0))
    for process in one.ranks.living():
        one.heard(process)
    return one
