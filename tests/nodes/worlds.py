"""Runs over nodes for tests: an etcd, a launcher on each node with an agent of its own, questions.

Owns what a test of runs starts beside the nodes.  The nodes' network is real; their disks are one,
as a shared file system's would be.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from holdfast.agent.cli.client import Agent
from holdfast.agent.cli.text import Failure

from .harness import Node, Nodes

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 3.0
LIMIT_S = 240.0  # of a start; CI's two processors import torch for every launcher one by one
SMALL = (
    "batch=2", "micro_batches=3", "model_options.width=32", "model_options.layers=1",
    "model_options.heads=2", "data_options.vocabulary=512", "checkpoint.every=10",
)


class World:
    """One run over some of the nodes.  The last node carries the store and nothing else."""

    def __init__(self, nodes: Nodes, name: str = "job") -> None:
        self.nodes, self.name = nodes, name
        self.shared = nodes.home / "shared"
        self.shared.mkdir(exist_ok=True)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.etcd: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------- to start it

    def start_store(self) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is missing (Debian package etcd-server)")
        node = self.nodes.all[-1]
        here, peer = f"http://{node.address}:2379", f"http://{node.address}:2380"
        self.etcd = node.start([
            "etcd", "--data-dir", str(node.home / "etcd"), "--listen-client-urls", here,
            "--advertise-client-urls", here, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--heartbeat-interval", "50", "--election-timeout", "500"], output="etcd.out")

    def launch(self, number: int, command: str, *words: str) -> None:
        """`holdfast run` or `train` on one node, as srun would start it."""
        node = self.nodes[number]
        config = node.home / "agent.toml"
        config.write_text(
            f'[agent]\nnode = "{node.name}"\nlisten = ""\n[checks]\ngate = []\n'
            f'[store]\nurl = "etcd://{self.nodes.all[-1].address}:2379"\n'
            f'[detect]\nlease_s = {LEASE_S}\n')
        self.processes[number] = node.start(
            [sys.executable, "-P", "-m", "holdfast.agent.cli", command, "--run", self.name, *words],
            {"HOLDFAST_CONFIG": str(config), "PYTHONPATH": str(ROOT / ".types"),
             "OMP_NUM_THREADS": "1"}, output=f"{self.name}.out")

    def train(self, numbers: Sequence[int], nnodes: int, steps: int, *more: str) -> None:
        for number in numbers:
            self.launch(number, "train", "--nnodes", str(nnodes), f"work_dir={self.shared}/work",
                        f"checkpoint.dir={self.shared}/{self.name}", f"steps={steps}", *SMALL,
                        *more)

    # ------------------------------------------------------------- to ask it

    def status(self, number: int) -> dict[str, Any]:
        socket = self.nodes[number].home / "run" / self.name / "api.sock"
        try:
            runs = Agent(socket).get("/api/v1/status")["runs"]
        except (OSError, Failure):
            return {}
        return dict(runs[0]) if runs else {}

    def ranks(self, number: int) -> dict[int, dict[str, Any]]:
        """The ranks on one node."""
        return {rank["rank"]: rank for rank in self.status(number).get("ranks", ())
                if rank["state"] != "ended"}

    def places(self, generation: int) -> dict[int, int]:
        """Rank -> node, of those that run this generation."""
        return {rank: number for number in self.processes
                for rank, seen in self.ranks(number).items() if seen["generation"] == generation}

    def step(self, number: int) -> int:
        return max((rank["step"] for rank in self.ranks(number).values()), default=-1)

    def generation(self, number: int) -> int:
        return int(self.status(number).get("generation", 0))

    def leader(self) -> int:
        """Whose lease it is, by the store; -1 for nobody's."""
        store = self.nodes.all[-1]
        said = store.run(["etcdctl", "--endpoints", f"{store.address}:2379", "get",
                          f"/holdfast/main/lease/{self.name}"], {"ETCDCTL_API": "3"}).stdout
        return next((node.number for node in self.nodes if f'"node":"{node.name}"' in said), -1)

    def said(self) -> str:
        """What every launcher and agent said, for a test that fails."""
        texts = []
        for node in self.nodes:
            files = [node.home / f"{self.name}.out", *(node.home / "state").rglob("agent.log")]
            texts += [f"--- {node.name} {file.name}\n{file.read_text(errors='replace')[-3000:]}"
                      for file in files if file.exists()]
        return "\n".join(texts)

    def wait(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        return wait_for(condition, limit_s, self.said)

    def agent_pid(self, number: int) -> int:
        """Of the agent that this node's launcher has started."""
        for pid in self.nodes[number].pids():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if "holdfast.agent" in words and "--private" in words:
                return pid
        return 0

    def power_off(self, number: int) -> None:
        """Its network goes first: a machine without power says no goodbye."""
        self.nodes.blackhole(number)
        self.nodes[number].kill()


def output(node: Node, name: str = "job") -> str:
    return (node.home / f"{name}.out").read_text(errors="replace")
