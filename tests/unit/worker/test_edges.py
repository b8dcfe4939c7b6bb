"""The launcher's edges: folders of others, packets too large, tasks that hang."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import sys
from pathlib import Path

import pytest

from holdfast.agent.config.load import ENVIRONMENT
from holdfast.worker import wire
from holdfast.worker.launcher import agent_link, levels, spec
from holdfast.worker.launcher.child_tasks import ChildTasks

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[3]


def test_the_folder_of_the_socket_must_be_ours_alone(tmp_path):
    path = str(tmp_path / "base")
    agent_link.own_directory(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    agent_link.own_directory(path)
    os.chmod(path, 0o777)
    with pytest.raises(PermissionError, match="yours alone"):
        agent_link.own_directory(path)
    link = str(tmp_path / "link")
    os.symlink(tmp_path, link)
    with pytest.raises(PermissionError):
        agent_link.own_directory(link)


def test_a_socket_path_that_is_too_long_is_said_with_what_to_set():
    with pytest.raises(OSError, match="HOLDFAST_RUNTIME_DIR"):
        agent_link.places("run", {"HOLDFAST_RUNTIME_DIR": "/tmp/" + "x" * 120, "HOME": "/tmp"})


@pytest.mark.parametrize("ranks", [1, 32, 256])
def test_a_level_fits_its_packet_whatever_the_ranks_said(ranks):
    ended = {"code": 1, "signal": 0, "outcome": "exception", "error": "\u2026" * 500,
             "by_us": False, "boot_s": 1.0, "wall_s": 1.0}
    level = {
        "t": "levels", "n": 1,
        "ranks": [{"rank": n, "local_rank": n, "pid": n, "generation": 1, "state": "ended",
                   "ended": ended, "parked": None,
                   "flight": [[9, "gloo:all_reduce", "[[1024, 1024]]"]] * 12}
                  for n in range(ranks)],
        "commits": [{"generation": 1, "step": n, "path": "/data/" + "c" * 150, "world": 2,
                     "bad": ""} for n in range(100)],
    }
    fitted = levels.fitted(level)
    assert wire.size_of(fitted) <= wire.LIMIT_BYTES
    assert [r["rank"] for r in fitted["ranks"]] == list(range(ranks))
    assert fitted["ranks"][0]["ended"]["code"] == 1 and fitted["commits"][-1]["step"] == 99


def test_an_overdue_task_is_ended_and_its_number_forgotten_first():
    tasks, told, closed = ChildTasks(), [], []
    polled = selectors.DefaultSelector()

    def forget(task):
        polled.unregister(task)
        closed.append(task.fileno())

    tasks.on_close = forget
    task = tasks.command(
        [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.0,
        lambda ok, text: told.append((ok, text)), "sleeper",
    )
    assert task is not None
    polled.register(task, selectors.EVENT_READ)
    tasks.tend(task.deadline_s)
    assert told == [(False, "sleeper took too long and was ended")]
    assert closed and not polled.get_map() and not tasks.running
    with pytest.raises(ChildProcessError):
        os.waitpid(task.child.pid, os.WNOHANG)


def test_a_task_that_cannot_start_says_so():
    tasks, told = ChildTasks(), []
    tasks.command(["/no/such/program"], {}, 1.0, lambda ok, text: told.append((ok, text)), "it")
    assert told and told[0][0] is False and "No such file" in told[0][1]


# ------------------------------------------------------------- who may be the agent


class Served:
    """A connected socket whose other end is served by some user."""

    def __init__(self, uid):
        self.uid = uid

    def getsockopt(self, level, option, size):
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 4711, self.uid, self.uid)[:size]


def test_only_root_oneself_and_the_agents_user_may_be_the_agent(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for uid, environ in ((0, {}), (1000, {}), (1234, {"HOLDFAST_AGENT_USER": "1234"}),
                         (NOBODY, {"HOLDFAST_AGENT_USER": "nobody"})):
        agent_link.check_peer(Served(uid), "agent.sock", environ)
    for uid, environ in ((1001, {}), (1001, {"HOLDFAST_AGENT_USER": "no-such-user"}),
                         (1001, {"HOLDFAST_AGENT_USER": "1234"})):
        with pytest.raises(agent_link.Stranger, match="uid 1001, which is neither root"):
            agent_link.check_peer(Served(uid), "agent.sock", environ)


@pytest.fixture()
def strangers_socket(tmp_path):
    """An agent's socket that another user listens on."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    path = str(tmp_path / "agent.sock")
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.bind(path)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            sock.listen(8)
            os.write(told, b"x")
            while True:
                sock.accept()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    yield path
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_strangers_socket_is_neither_greeted_nor_taken_for_the_nodes(
    strangers_socket, monkeypatch, tmp_path, capfd
):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOLDFAST_STATE_DIR": str(tmp_path)}
    with pytest.raises(agent_link.Stranger, match="served by uid 65534"):
        agent_link.connect(strangers_socket, environ)
    monkeypatch.setattr(agent_link, "NODE_SOCKET", strangers_socket)
    where = agent_link.places("run", environ)
    assert where.private and where.socket != strangers_socket
    assert "starts an agent of its own" in capfd.readouterr().err
    link = agent_link.AgentLink("run", where._replace(socket=strangers_socket), environ)
    assert link.tend() is False and link.channel is None and link.process is None
    assert "served by uid 65534" in link.problem
    assert not agent_link.places("run", {**environ, "HOLDFAST_AGENT_USER": "nobody"}).private


def test_nodes_that_share_a_home_keep_the_state_of_a_run_apart(tmp_path):
    environ = {"HOLDFAST_RUNTIME_DIR": str(tmp_path), "HOLDFAST_STATE_DIR": "/home/state"}
    assert agent_link.places("r", environ).state_dir == "/home/state/runs/r"
    apart = agent_link.places("r", environ, nnodes=2)
    assert apart.state_dir == "/home/state/runs/r@%s" % socket.gethostname()
    assert apart.socket == agent_link.places("r", environ).socket


@pytest.fixture
def nodes_agent(tmp_path, monkeypatch):
    """The node's agent, of our own user, at its usual place."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen(8)
        monkeypatch.setattr(agent_link, "NODE_SOCKET", str(path))
        yield str(path)


def test_a_runtime_folder_of_the_users_is_a_wish_for_an_agent_of_ones_own(
    nodes_agent, tmp_path, capfd
):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOLDFAST_STATE_DIR": str(tmp_path)}
    assert agent_link.places("r", environ).socket == nodes_agent and not capfd.readouterr().err
    own = str(tmp_path / "own")
    where = agent_link.places("r", {**environ, "HOLDFAST_RUNTIME_DIR": own})
    assert (where.private, where.runtime_dir) == (True, own + "/r")
    said = capfd.readouterr().err
    assert "HOLDFAST_RUNTIME_DIR" in said and nodes_agent in said and said.count("\n") == 1
    os.unlink(nodes_agent)  # without one there is nothing to say
    agent_link.places("r", {**environ, "HOLDFAST_RUNTIME_DIR": own})
    assert not capfd.readouterr().err


@pytest.mark.parametrize("command", ["run", "train"])
def test_what_the_environment_decides_is_where_people_look(command, capfd):
    with pytest.raises(SystemExit):
        spec.build(command).parse_args(["--help"])
    text = capfd.readouterr().out
    for name, _ in ENVIRONMENT:
        assert name in text and f"`{name}`" in (ROOT / "docs/config.md").read_text()
