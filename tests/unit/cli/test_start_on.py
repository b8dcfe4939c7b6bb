"""`holdfast run --on`: what goes to the other nodes, and what stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.cli import start_on
from holdfast.agent.cli.launch import WITHOUT_VALUE
from holdfast.agent.cli.text import Failure
from holdfast.worker.rank import rank

ROOT = Path(__file__).resolve().parents[3]


def wanted(*argv: str, command: str = "run", **environ: str) -> start_on.Wanted:
    return start_on.wanted(command, argv, environ, WITHOUT_VALUE)


def test_each_node_gets_the_same_command_less_the_flag() -> None:
    found = wanted("--on", "b,c", "--nproc-per-node", "8", "--on=d", "-m", "pack.train", "--on",
                   "mine", "--lr", "3")
    assert found.nodes == ["b", "c", "d"] and found.least == 4
    before, rest = found.arguments[:4], found.arguments[4:]
    assert before[:3] == ["--nnodes", "4", "--run"] and before[3].startswith("pack.train"[:4])
    assert rest == ["--nproc-per-node", "8", "-m", "pack.train", "--on", "mine", "--lr", "3"]


def test_the_runs_name_is_one_on_all_nodes() -> None:
    assert wanted("--on", "b", "--run", "a b", "x.py").run == "a-b"
    assert wanted("--on", "b", "--rdzv_id=night", "x.py").run == "night"
    assert wanted("--on", "b", "x.py", SLURM_JOB_ID="77").run == "77"
    assert "77" in wanted("--on", "b", "x.py", SLURM_JOB_ID="77").arguments
    assert wanted("--on", "b", "steps=3", command="train").run.startswith("train-")


def test_the_worlds_size_is_the_callers_where_one_is_given() -> None:
    found = wanted("--on", "all", "--nnodes", "3:9", "x.py")
    assert found.least == 3 and found.arguments.count("--nnodes") == 1
    assert wanted("--on", "all", "x.py", PET_NNODES="2").least == 2
    with pytest.raises(Failure, match="--nnodes MIN:MAX"):
        wanted("--on", "all", "x.py")


@pytest.mark.parametrize("argv", [
    ("--on", "", "x.py"), ("--on", "b", "--local-addr", "10.0.0.1", "x.py"),
    ("--on", "b", "--node-rank=1", "x.py"), ("--env", "A=b", "x.py"),
    ("--on", "b", "--env", "NOT_SET", "x.py"),
])
def test_what_cannot_be_meant_is_said(argv: tuple[str, ...]) -> None:
    with pytest.raises(Failure) as raised:
        wanted(*argv)
    assert raised.value.code == 78


def test_secrets_stay_here_unless_they_are_named() -> None:
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/src", "HOME": "/home/a",
               "HF_TOKEN": "x", "WANDB_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x",
               "NEURON_ACCESS_TOKEN": "x", "HOLDFAST_CONFIG": "/etc/x", "HOLDFAST_RUNTIME_DIR": "r",
               "SLURM_JOB_ID": "7", "NCCL_KEYRING": "r", "PET_NODE_RANK": "1",
               "CUDA_VISIBLE_DEVICES": "GPU-1", "PET_LOCAL_ADDR": "10.0.0.1"}
    found = wanted("--on", "b", "x.py", **environ).environment
    assert sorted(found) == ["NCCL_DEBUG", "NCCL_KEYRING", "PATH", "PYTHONPATH"]
    found = wanted("--on", "b", "--env", "HF_TOKEN", "--env", "A=b=c", "x.py",
                   **environ).environment
    assert (found["HF_TOKEN"], found["A"]) == ("x", "b=c") and "WANDB_API_KEY" not in found


def test_help_starts_nothing_and_no_agent_is_a_sentence(tmp_path: Path) -> None:
    environ = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "run", "--on", "b"]
    told = subprocess.run([*command, "--help"], env=environ, capture_output=True, text=True,
                          timeout=60, check=False)
    assert told.returncode == 0 and "--on NODE,..." in told.stdout
    script = tmp_path / "x.py"
    script.write_text("")
    done = subprocess.run([*command, str(script)], env=environ, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert "none answers at" in done.stderr and "srun or ssh" in done.stderr
    assert done.stderr.startswith("holdfast: ends with code 78: ")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, str(script)], env=environ, stderr=full, timeout=60,
                              check=False)
    assert done.returncode == 78
    for words in (["accept"], ["end", "m5"]):
        done = subprocess.run([*command[:4], *words], env=environ, capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


class Answers:
    """An agent whose answers are given."""

    def __init__(self, *rows: dict[str, tuple[str, int, str]]) -> None:
        self.rows, self.asked = list(rows), list[tuple[str, object]]()

    def post(self, route: str, body: dict[str, object]) -> dict[str, object]:
        self.asked.append((route.rpartition("/")[2], json.loads(json.dumps(body))["nodes"]))
        found = self.rows.pop(0)
        return {"nodes": {node: {"state": state, "code": code, "text": text}
                          for node, (state, code, text) in found.items()}}


def others(agent: Answers, *argv: str) -> start_on.Others:
    return start_on.Others(agent, wanted(*argv), "run")  # type: ignore[arg-type]


def test_too_few_that_begin_start_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    agent = Answers({"b": ("queued", 0, ""), "c": ("refused", 0, "nobody accepts")},
                    {"b": ("queued", 0, "")}, {"b": ("running", 0, "pid 7")})
    with pytest.raises(Failure, match="2 nodes of 3") as raised:
        others(agent, "--on", "b,c", "x.py").start()
    assert raised.value.code == 75 and agent.asked[1:] == [("look", ["b"])] * 2
    said = capfd.readouterr().err
    assert "b: started (pid 7)" in said and "c: not started: nobody accepts" in said


def on_node_a(agent: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command may be given there."""
    monkeypatch.setattr(agent, "get", lambda route: {"node": "a"}, raising=False)
    monkeypatch.setattr(start_on, "Agent", lambda path, timeout_s: agent)
    monkeypatch.setattr(start_on, "node_socket", lambda environ: tmp_path)
    monkeypatch.setattr(start_on.signal, "pthread_sigmask", lambda how, mask: set())


def refused_here(agent: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to nothing, since too few of b and c begin."""
    on_node_a(agent, tmp_path, monkeypatch)
    with pytest.raises(Failure, match="1 node of 3"):
        start_on.start_on("run", ("--on", "b,c", "--run", "m5", "x.py"), [], {}, WITHOUT_VALUE)


@pytest.mark.parametrize("closed", [False, True])
def test_output_that_nobody_takes_ends_no_launcher_anywhere(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `2>/dev/full`, and with `2>&1 | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe if closed else full)
        agent = Answers({"b": ("running", 0, "pid 7")}, {"b": ("ended", 1, "")})
        on_node_a(agent, tmp_path, monkeypatch)
        code = start_on.start_on(
            "run", ("--on", "b", "x.py"), ["false"], os.environ, WITHOUT_VALUE)
    assert code == 1 and [verb for verb, _ in agent.asked] == ["start", "look"]


def test_the_same_command_typed_twice_ends_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes refuse the second, which leaves; what goes on there is the first."""
    here = "run m5 goes on here already"
    agent = Answers({"b": ("refused", 0, here), "c": ("refused", 0, here)}, {})
    refused_here(agent, tmp_path, monkeypatch)
    ended = [nodes for verb, nodes in agent.asked if verb == "end"]
    assert not any(ended), agent.asked


def test_what_was_taken_is_ended_where_too_few_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_on, "BEGINS_S", 0.0)
    agent = Answers({"b": ("queued", 0, ""), "c": ("refused", 0, "nobody accepts")},
                    {"b": ("queued", 0, "")})
    refused_here(agent, tmp_path, monkeypatch)
    assert agent.asked[-1] == ("end", ["b"])


def test_a_launcher_that_ended_at_once_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    agent = Answers({"b": ("queued", 0, "")}, {"b": ("ended", 78, "")})
    with pytest.raises(Failure, match="1 node of 2"):
        others(agent, "--on", "b", "x.py").start()
    assert "b: its launcher ended with 78 at once" in capfd.readouterr().err


def test_what_gives_no_word_counts_as_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_on, "BEGINS_S", 0.0)
    agent = Answers({"b": ("", 0, "its agent does not answer")}, {})
    asked = others(agent, "--on", "b", "--nnodes", "1:2", "x.py")
    asked.start()
    assert asked.going == []


def test_this_node_is_left_out_of_the_list_and_counted_once() -> None:
    found = start_on.wanted("run", ("--on", "a,b", "x.py"), {}, WITHOUT_VALUE, own="a")
    assert found.nodes == ["b"] and found.least == 2
    with pytest.raises(Failure, match="name other nodes"):
        start_on.wanted("run", ("--on", "a", "x.py"), {}, WITHOUT_VALUE, own="a")


def test_an_end_is_tried_again_where_the_agent_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_on.time, "sleep", lambda seconds: None)
    agent = Answers({"b": ("running", 0, "pid 7")}, {"b": ("running", 0, "")})
    asked, post, refused = others(agent, "--on", "b", "x.py"), agent.post, [0]
    asked.start()

    def busy(route: str, body: dict[str, object]) -> dict[str, object]:
        refused[0] += 1
        if refused[0] < 3:
            raise Failure("too many requests")
        return post(route, body)

    monkeypatch.setattr(agent, "post", busy)
    asked.end(asked.going)
    assert refused[0] == 3 and agent.asked[-1] == ("end", ["b"])


def test_an_elastic_run_begins_with_those_that_are_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_on, "LOOK_S", 0.0)
    agent = Answers(
        {"b": ("running", 0, "pid 7"), "c": ("refused", 0, "its agent does not answer")},
        {"b": ("refused", 0, "nobody accepts runs of alice there")},  # its agent begins anew
        {"b": ("running", 0, "")}, {"b": ("ended", 75, "")})
    asked = others(agent, "--on", "b,c", "--nnodes", "2:3", "x.py")
    asked.start()
    asked.look(True)
    assert asked.going == ["b"]
    asked.look(True)
    asked.look(True)
    assert asked.going == [] and asked.codes == {"b": 75}
    assert "b: its launcher ended with 75" in capfd.readouterr().err


def test_an_accept_that_has_gone_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_on, "LOOK_S", 0.0)
    monkeypatch.setattr(start_on, "GONE_S", 0.0)
    gone = {"b": ("refused", 0, "nobody accepts runs of alice there")}
    agent = Answers({"b": ("running", 0, "pid 7")}, gone, gone)
    asked = others(agent, "--on", "b", "x.py")
    asked.start()
    asked.look(True)
    asked.look(True)
    assert asked.going == []


def test_a_node_that_died_is_waited_for_while_this_one_trains_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_on, "LOOK_S", 0.0)
    monkeypatch.setattr(start_on, "GONE_S", 0.0)
    dead = {"b": ("", 0, "its agent does not answer: it is lost")}
    agent = Answers({"b": ("running", 0, "pid 7")}, dead, dead, dead, dead)
    asked = others(agent, "--on", "b", "x.py")
    asked.start()
    for own_lives in (True, True):
        asked.look(own_lives)
    assert asked.going == ["b"]
    asked.look(False)
    asked.look(False)
    assert asked.going == []


def test_it_hands_on_each_signal_that_its_launcher_ends_by() -> None:
    assert set(start_on.SIGNALS) == set(rank.END_SIGNALS)
