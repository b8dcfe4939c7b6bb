"""The launcher's loop against an agent's socket that is there before it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.worker import bootstrap, exits
from holdfast.worker.launcher import commands, forking, rank_processes, run_state, spec
from holdfast.worker.launcher.terminal import Terminal

LIMIT_S = 30.0


@pytest.fixture()
def agents_socket(tmp_path):
    """Where run `x` looks for its agent: somebody listens already."""
    folder = tmp_path / "r" / "x"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(folder / "agent.sock"))
        server.listen(8)
        server.settimeout(LIMIT_S)
        yield server


def test_an_agent_that_was_there_first_is_greeted(agents_socket, tmp_path):
    """As the node's agent always is."""
    environ = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "r"),
               "HOLDFAST_STATE_DIR": str(tmp_path / "s")}
    launcher = subprocess.Popen(
        [sys.executable, str(Path(bootstrap.__file__)), "run", "--run", "x", "--no-python",
         "sleep", "600"], env=environ, stdin=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        told = []
        while len(told) < 2:  # a connection that is only tried out is closed without a word
            link, _ = agents_socket.accept()
            with link:
                link.settimeout(LIMIT_S)
                packet = link.recv(65536)
            told += [json.loads(packet)] if packet else []
        # Its imports take seconds, and a hello is answered with orders.
        assert [one["t"] for one in told] == ["coming", "hello"] and told[1]["run"] == "x"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LIMIT_S) == exits.INTERRUPTED
    finally:
        launcher.kill()
        launcher.wait(LIMIT_S)


class Refusing:
    """What the agent's word about a refused packet may change of a launcher."""

    def __init__(self) -> None:
        self.exit_code, self.end_reason = None, ""
        self.spec = SimpleNamespace(nnodes=1)
        self.said = []
        self.commands = commands.Commands(self, None, None, None, None, None, self)

    def say(self, text, level="info") -> None:
        self.said.append((level, text))

    end = run_state.RunState.end


def test_a_refusal_ends_a_run_before_the_welcome_and_is_said_once_after_it():
    early, late = Refusing(), Refusing()
    early.commands.on_packet({"t": "error", "error": "no room"})
    assert early.exit_code == exits.CONFIGURATION and "no room" in early.end_reason
    told = late.commands
    told.on_packet({"t": "welcome"})
    for number in range(30):
        told.on_packet({"t": "error", "error": "first"})
        told.on_packet({"t": "error", "error": "number %d" % number})
    assert late.exit_code is None and len(late.said) == commands.REFUSALS_MAX
    assert [text for _, text in late.said if text.endswith(": first")] == [late.said[0][1]]


def test_a_ranks_first_lines_are_shown_once_however_early_it_writes(
    tmp_path, monkeypatch, capfd
):
    """What is on disk before a rank is forked is an earlier run's; what it writes is shown."""
    home = tmp_path / "rank-0"
    home.mkdir()
    (home / "stdout.log").write_text("an earlier run's\n")
    terminal = Terminal(tee=False)
    options = spec.parse("run", ["--no-python", "true"], {})
    ranks = rank_processes.RankProcesses(
        run_state.RunState(options, str(tmp_path)), {}, terminal.say)
    ranks.on_folder = terminal.skip_existing

    def fork(program, seat):
        with open(seat.stdout, "a") as file:
            file.write("first of generation %d\n" % seat.generation)
        return forking.Child(0, -1)

    monkeypatch.setattr(forking, "spawn_command", fork)
    for generation in (1, 2):  # the second appends to a file whose lines were shown before
        ranks.launch(0, generation)
        terminal.follow([str(home)])
        terminal.follow([str(home)])
    assert capfd.readouterr().out == "first of generation 1\nfirst of generation 2\n"
    for process in ranks.processes:
        process.close()


def test_whoever_was_asked_to_end_starts_no_standby(tmp_path, monkeypatch):
    options = spec.parse("train", ["--standby", "1"], {})
    state = run_state.RunState(options, str(tmp_path))
    ranks = rank_processes.RankProcesses(state, {}, lambda *_: None)
    ranks.generation, ranks.standby_at_s = 1, 0.0
    started = []
    monkeypatch.setattr(ranks, "launch", lambda *seat: started.append(seat))
    monkeypatch.setattr(forking, "start_store", lambda *_: None)
    ranks.make_ready(1.0, moving=True, quiet=False)
    assert started == [(-1, 0)]
    state.shut_down("interrupted")
    ranks.make_ready(2.0, moving=True, quiet=True)
    assert started == [(-1, 0)]
