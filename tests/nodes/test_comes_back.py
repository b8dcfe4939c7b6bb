"""A node that lost power is back in a run that was started with `--on`, and nobody types for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli.client import Agent
from holdfast.agent.cli.text import Failure

from .harness import Nodes
from .test_jobs import USERS
from .test_start_on import ENDS_S, Started, gone, in_touch, known, worlds
from .worlds import ANSWER_S, CLI, SMALL

STEPS = 30
BACK = 3  # the node that goes and comes; it carries no member of the store


def test_a_node_is_back_by_itself_and_through_the_gate_alone() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4) as nodes:
        cluster = Returning(nodes, members=(0, 1, 2))
        cluster.lease_s = 3.0
        cluster.start_store()
        cluster.start_agents()
        story(cluster)


class Returning(Started):
    """Nodes whose agent and `holdfast accept` begin with them, as systemd has it."""

    def boot(self, number: int) -> None:
        self.nodes.blackhole(number, on=False)
        self.start_agent(number)
        self.accept(number, "alpha")

    def type_train(self, number: int, on: str, nnodes: str, run: str) -> subprocess.Popen[bytes]:
        folder = self.shared / run
        folder.mkdir()
        os.chown(folder, USERS["alpha"], USERS["alpha"])
        command, environ = self.as_user(
            number, "alpha", *CLI, "train", "--on", on, "--run", run, "--nnodes", nnodes,
            "--nproc-per-node", "1", f"work_dir={folder}/work", f"checkpoint.dir={folder}/kept",
            "steps=100000", *SMALL, "micro_batches=12", "batch=1")
        return self.nodes[number].start(command, environ, output=f"{run}.out")

    def orders(self, number: int) -> list[dict[str, Any]]:
        """What is kept on the node's disk."""
        folder = self.nodes[number].home / "alpha/state" / f"accepted@{self.nodes[number].name}"
        return [json.loads(one.read_text()) for one in folder.glob("*.json")]

    def hears(self, number: int, name: str) -> bool:
        """Whether another node's launcher of the run is heard of here."""
        return [one["word"] for one in self.seen(number, "one").get("nodes", ())
                if one["node"] == name] == ["heard"]

    def steps(self, number: int) -> int:
        """Of the core there, in each of which it may find that the run can grow; 0 where its agent
        is too busy to say."""
        try:
            return int(Agent(self.socket(number)).get("/api/v1/status")["agent"]["steps"])
        except (OSError, Failure):
            return 0

    def accept_said(self, number: int) -> str:
        return self.nodes[number].said("accept-alpha.out")


def story(cluster: Returning) -> None:
    for number in (1, 2, BACK):
        cluster.accept(number, "alpha")
    cluster.wait(lambda: all(cluster.accepts(number, "alpha") for number in (1, 2, BACK)))
    cluster.wait(lambda: in_touch(cluster), ANSWER_S)
    command = cluster.type_train(0, "n1,n2,n3", "3:4", "one")
    cluster.wait(lambda: worlds(cluster, "one", 4))
    cluster.wait(lambda: [one["attempt"] for one in cluster.orders(BACK)] == [1])

    cluster.power_off(BACK)
    cluster.wait(lambda: worlds(cluster, "one", 3))
    done = cluster.operator(0, "exclude", "n3", "--reason", "its fan")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.boot(BACK)

    # Its launcher is there again, and has no rank while its node may have none.
    cluster.wait(lambda: cluster.seen(BACK, "one"))
    cluster.wait(lambda: "started again" in cluster.accept_said(BACK))
    assert len(cluster.orders(BACK)[0]["restarts"]) == 1
    cluster.wait(lambda: cluster.hears(0, "n3"))
    steps = cluster.wait(lambda: cluster.steps(0), ANSWER_S)
    cluster.wait(lambda: cluster.steps(0) > steps + STEPS, ANSWER_S)
    small = cluster.wait(lambda: worlds(cluster, "one", 3), ANSWER_S)
    assert "n3" not in small
    done = cluster.operator(0, "release", "n3", "--reason", "mended")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait(lambda: worlds(cluster, "one", 4))
    assert min(generation for generation, _ in cluster.pids("one").values()) > max(
        generation for generation, _ in small.values())
    cluster.wait(lambda: known(cluster, BACK, "one") == {"n1": "running", "n2": "running"})
    assert command.poll() is None, "it was typed once"

    # The run ends while the node is away: nothing begins there, then or later.
    last = cluster.pids("one")
    cluster.power_off(BACK)
    ended = cluster.asks(1, "alpha", "end", "one")
    assert "n1: told to end" in ended.stdout, ended
    cluster.wait(lambda: gone(last), ENDS_S)
    cluster.wait(lambda: '"finished":' in cluster.documents()["/holdfast/main/run/one"], ANSWER_S)
    cluster.boot(BACK)
    cluster.wait(lambda: "not started again: it has ended" in cluster.accept_said(BACK))
    assert not cluster.orders(BACK) and not cluster.seen(BACK, "one")
    assert "started again," not in cluster.accept_said(BACK)
    assert not [pid for pid in cluster.nodes[BACK].pids() if b"--run\0one" in words_of(pid)]


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
