"""The launcher's loop against an agent's socket that is there before it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
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


@pytest.mark.parametrize("words", ["/dev/null", "/dev/full"])
def test_an_agent_that_was_there_first_is_greeted(agents_socket, tmp_path, words):
    """As the node's agent always is, also where nobody takes what is said before the run."""
    environ = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "r"),
               "HOLDFAST_STATE_DIR": str(tmp_path / "s")}
    with open(words, "wb") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, str(Path(bootstrap.__file__)), "run", "--run", "x",
             "--shutdown-timeout", "5", "--no-python", "sleep", "600"],
            env=environ, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
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


def test_a_mistake_that_nobody_is_told_of_has_its_code_all_the_same():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, str(Path(bootstrap.__file__)), "run", "--no-such-flag"], stderr=full,
            timeout=LIMIT_S, check=False)
    assert done.returncode == exits.CONFIGURATION


def test_a_state_folder_that_cannot_be_is_told_with_its_code(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "r"),
               "HOLDFAST_STATE_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, str(Path(bootstrap.__file__)), "run", "--no-python", "true"],
        env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == exits.CONFIGURATION
    assert done.stderr.startswith("holdfast: ends with code 78: ") and "file" in done.stderr


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


@pytest.mark.parametrize(("kind", "nnodes", "ends"), [
    ("welcome", 1, False), ("address", 1, False), ("welcome", 2, True), ("address", 2, False)])
def test_the_welcome_alone_tells_whether_its_agent_serves_many_nodes(kind, nnodes, ends):
    told = Refusing()
    told.spec = SimpleNamespace(nnodes=nnodes, nnodes_text=str(nnodes))
    told.commands.on_packet({"t": kind, "address": "http://127.0.0.1:1"})
    assert told.exit_code == (exits.CONFIGURATION if ends else None)
    assert ("serves one node" in told.end_reason) is ends
    assert ("info", "live page http://127.0.0.1:1") in told.said and told.commands.welcomed


class Ranks:
    """The ranks of a launcher, as its commands see them."""

    def __init__(self, *pids):
        self.generation, self.waiting, self.begun, self.asked = 3, None, [], []
        self.processes = [SimpleNamespace(
            child=SimpleNamespace(pid=pid), assigned=pid < 100, rank=-1, channel=SimpleNamespace(
                send=lambda packet, pid=pid: self.asked.append((pid, packet["t"]))))
            for pid in pids]

    def living(self):
        return self.processes

    def begin(self, command):
        self.begun.append(command)
        self.generation = command.generation


def orders_to(ranks, **state):
    """Commands over these ranks, and what children they were to run."""
    ran = []
    tasks = SimpleNamespace(command=lambda command, *rest: ran.append(command))
    known = SimpleNamespace(**{"shutdown": "", "exit_code": None, **state})
    link = SimpleNamespace(channel=None, environ={})
    return commands.Commands(known, ranks, tasks, link, None, None, None), ran


def test_where_a_suspect_stands_all_ranks_are_asked_for_their_last_collectives():
    ranks = Ranks(7, 8, 900)  # the last is a standby
    told, ran = orders_to(ranks)
    told.carry_out("evidence", "1", {"pid": 8})
    assert ranks.asked == [(7, "flight"), (8, "flight")]
    assert ran[0][-3:] == ["--pid", "8", "--json"] and told.outcomes == []
    told.carry_out("evidence", "2", {"pid": 9})
    assert told.outcomes[-1]["error"] == "pid 9 is no rank of this run" and len(ran) == 1


START = {"generation": 4, "ranks": [0], "world": 1, "resume": {}}


@pytest.mark.parametrize(("permit", "begins"), [
    ({}, True), ({"permit_s": 10.0}, True), ({"permit_s": 10.0, "until": 5.0}, True),
    ({"permit_s": 10.0, "until": -0.1}, False)])
def test_ranks_begin_with_a_permit_that_still_runs_or_with_none(permit, begins):
    ranks = Ranks()
    told, _ = orders_to(ranks)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    body = {**START, **permit}
    if "until" in body:
        body["permit_until_boot_s"] = now_s + body.pop("until")
    told.carry_out("start", "1", body)
    (outcome,) = told.outcomes
    if not begins:
        assert not ranks.begun and outcome["error"] == (
            "the permit of generation 4 ran out before it was read")
        return
    assert outcome["ok"] and ranks.begun[0].generation == 4
    left_s = {(): 0.0, ("permit_s",): 10.0, ("permit_s", "until"): 5.0}[tuple(permit)]
    until_s = ranks.begun[0].permit_ns / 1e9
    assert until_s == (pytest.approx(now_s + left_s, abs=2.0) if left_s else 0.0)


def test_a_start_is_answered_once_its_generation_runs_here_or_the_launcher_ends():
    ranks = Ranks()
    ranks.waiting = SimpleNamespace(group=1, generation=4)
    told, _ = orders_to(ranks)
    told.carry_out("start", "1", START)  # which is the generation that waits
    assert told.outcomes == []
    ranks.waiting = None
    told.started()
    assert [(one["id"], one["ok"]) for one in told.outcomes] == [("1", True)]
    ranks.waiting = SimpleNamespace(group=1, generation=5)
    told.carry_out("start", "2", {**START, "generation": 5})
    told.state.exit_code = 71
    told.started()
    assert told.outcomes[-1]["error"] == "the machine refused processes or files"


def test_who_ends_all_ranks_means_those_as_well_that_have_not_begun():
    """A late word of where the first node's store is would begin a generation that nobody wants."""
    ranks = Ranks()
    ranks.waiting = SimpleNamespace(group=1, generation=4)
    told, _ = orders_to(ranks)
    told.carry_out("start", "1", START)
    told.carry_out("stop", "2", {"generation": 3, "ranks": [0]})  # of one rank: the rest goes on
    assert ranks.waiting is not None and [one["id"] for one in told.outcomes] == ["2"]
    told.carry_out("stop", "3", {"generation": 3})
    assert ranks.waiting is None
    said = {one["id"]: (one["ok"], one["error"]) for one in told.outcomes}
    assert said["1"] == (False, "it was ended before it began") and said["3"] == (True, "")
    told.carry_out("start", "4", START)  # the same once more: it begins anew
    assert ranks.begun[0].generation == 4


def test_labels_of_a_start_are_bounded_in_number_and_length():
    many = [["n%d" % number, "x" * 100] for number in range(20)]
    found = commands.labels_in({"labels": many})
    assert found == [["n%d" % number, "x" * 64] for number in range(16)]
    assert commands.labels_in({"labels": [["y" * 100, "z"]]}) == [["y" * 64, "z"]]
    assert commands.labels_in({"labels": []}) == [] and commands.labels_in({}) is None


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
