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
CLI = (sys.executable, "-P", "-m", "holdfast.agent.cli")
LOOK_S = 0.1  # from one round of questions to the next: two processors carry agents and ranks
ANSWER_S = 30.0  # of a store or an agent that lives, on a machine that is busy
LIMIT_S = 240.0  # of a start; CI's two processors import torch for every launcher one by one
SMALL = (
    "batch=2", "micro_batches=3", "model_options.width=32", "model_options.layers=1",
    "model_options.heads=2", "data_options.vocabulary=512", "checkpoint.every=10",
)


class World:
    """One run over some of the nodes, and the store: by default of one member, on the last node."""

    def __init__(self, nodes: Nodes, name: str = "job", members: Sequence[int] = (),
                 lease_s: float = LEASE_S, cluster: str = "main") -> None:
        """`members`: the nodes that carry a member of the store."""
        self.nodes, self.name, self.lease_s = nodes, name, lease_s
        self.cluster = cluster
        self.members = tuple(members) or (len(nodes.all) - 1,)
        self.shared = nodes.home / "shared"
        self.shared.mkdir(exist_ok=True)
        self.max_restarts, self.gate = 20, "[]"
        self.heartbeat_ms, self.election_ms = 50, 500  # of etcd
        self.readings = ""  # more of each agent's [agent]
        self.settings = ""  # more of each agent's [detect] and behind it; {home} is its node's
        self.labels: dict[int, dict[str, str]] = {}  # node -> cluster.labels of its agent
        self.environment: dict[str, str] = {}  # more of every command's
        self.ahead_s: dict[int, float] = {}  # node -> how far its time of day is ahead
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.etcd: dict[int, subprocess.Popen[bytes]] = {}  # node -> its member

    # ------------------------------------------------------------- to start it

    def start_store(self) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("etcd is missing (Debian package etcd-server)")
        for number in self.members:
            self.start_member(number)

    def start_member(self, number: int) -> None:
        """One of the store; what it knew before is on its disk."""
        node = self.nodes[number]
        here, peer = f"http://{node.address}:2379", f"http://{node.address}:2380"
        all_peers = ",".join(f"{self.nodes[one].name}=http://{self.nodes[one].address}:2380"
                             for one in self.members)
        self.etcd[number] = node.start([
            "etcd", "--name", node.name, "--data-dir", str(node.home / "etcd"),
            "--listen-client-urls", here, "--advertise-client-urls", here,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", all_peers, "--heartbeat-interval", str(self.heartbeat_ms),
            "--election-timeout", str(self.election_ms), "--pre-vote"], output="etcd.out")

    @property
    def endpoints(self) -> str:
        return ",".join(f"{self.nodes[one].address}:2379" for one in self.members)

    def environ(self, number: int) -> dict[str, str]:
        """Of every command of ours on this node."""
        node = self.nodes[number]
        config = node.home / "agent.toml"
        given = self.labels.get(number, {})  # which a release before this one would not know
        labels = "\n".join(["[cluster.labels]", *(f'{key} = "{text}"' for key, text in
                                                   given.items()), ""]) if given else ""
        config.write_text(
            f'[agent]\nnode = "{node.name}"\nlisten = ""\n{self.readings}'
            f'[checks]\ngate = {self.gate}\n'
            f'{labels}'
            f'[store]\nurl = "etcd://{self.endpoints}"\ncluster = "{self.cluster}"\n'
            f'[detect]\nlease_s = {self.lease_s}\n'
            + self.settings.format(home=node.home))
        return {"HOLDFAST_CONFIG": str(config), "PYTHONPATH": self._pythons_path(number),
                "OMP_NUM_THREADS": "1", **self.environment}

    def _pythons_path(self, number: int) -> str:
        """A namespace has no time of day of its own: where a node's is off, what Python reads there
        is shifted, of Holdfast and of its ranks."""
        if number not in self.ahead_s:
            return str(ROOT / ".types")
        ahead = self.nodes[number].home / "ahead"
        if not ahead.exists():
            ahead.mkdir()
            (ahead / "holdfast").symlink_to((ROOT / ".types/holdfast").resolve())
            (ahead / "sitecustomize.py").write_text(
                f"import time\nread = time.time\ntime.time = lambda: read() + "
                f"{self.ahead_s[number]}\n")
        return str(ahead)

    def launch(self, number: int, command: str, *words: str) -> None:
        """`holdfast run` or `train` on one node, as srun would start it."""
        self.processes[number] = self.nodes[number].start(
            [*CLI, command, "--run", self.name, *words], self.environ(number),
            output=f"{self.name}.out")

    def ask(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of an operator's on one node."""
        return self.nodes[number].run([*CLI, *words], self.environ(number))

    def train(
        self, numbers: Sequence[int], nnodes: int | str, steps: int, *more: str
    ) -> None:
        for number in numbers:
            self.launch(number, "train", "--nnodes", str(nnodes), "--max-restarts",
                        str(self.max_restarts),
                        f"work_dir={self.shared}/work",
                        f"checkpoint.dir={self.shared}/{self.name}", f"steps={steps}", *SMALL,
                        *more)

    # ------------------------------------------------------------- to ask it

    def get(self, number: int, route: str) -> Any:
        """What one node's agent answers; None while it does not."""
        socket = self.nodes[number].home / "run" / self.name / "api.sock"
        try:
            return Agent(socket).get(route)
        except (OSError, Failure):
            return None

    def answer(self, number: int, route: str) -> Any:
        """The same, as soon as it does: it may be too busy for one question."""
        (found,) = self.wait(lambda: [one for one in [self.get(number, route)] if one is not None],
                             ANSWER_S)
        return found

    def status(self, number: int) -> dict[str, Any]:
        runs = (self.get(number, "/api/v1/status") or {}).get("runs")
        return dict(runs[0]) if runs else {}

    def incidents(self, number: int) -> list[dict[str, Any]]:
        """That this node opened, closed ones among them."""
        return list(self.get(number, "/api/v1/incidents") or ())

    def own_incidents(self, number: int) -> list[dict[str, Any]]:
        """Those of the run among them: the kernel's log, memory and disks are every test's."""
        return [one for one in self.incidents(number) if one["run"] == self.name]

    def ranks(self, number: int) -> dict[int, dict[str, Any]]:
        """The ranks on one node."""
        return {rank["rank"]: rank for rank in self.status(number).get("ranks", ())
                if rank["state"] != "ended"}

    def all_ranks(self, number: int) -> dict[int, dict[str, Any]]:
        """The same, once its agent tells of some."""
        found: dict[int, dict[str, Any]] = self.wait(lambda: self.ranks(number))
        return found

    def all_places(self, generation: int, world: int) -> dict[int, int]:
        """`places` once every rank is heard of: an agent may be too busy to answer one question."""
        found: dict[int, int] = self.wait(
            lambda: len(found := self.places(generation)) == world and found)
        return found

    def places(self, generation: int) -> dict[int, int]:
        """Rank -> node, of those that run this generation."""
        return {rank: number for number in self.processes
                for rank, seen in self.ranks(number).items() if seen["generation"] == generation}

    def step(self, number: int) -> int:
        return max((rank["step"] for rank in self.ranks(number).values()), default=-1)

    def generation(self, number: int) -> int:
        return int(self.status(number).get("generation", 0))

    def leader(self) -> int:
        """Whose lease it is, by the store; -1 for nobody's, and never because it was late."""
        asked = next(number for number in self.members if self.etcd[number].poll() is None)
        said = self.etcdctl(asked, f"{self.nodes[asked].address}:2379", "get",
                            f"/holdfast/{self.cluster}/lease/{self.name}")
        return next((node.number for node in self.nodes if f'"node":"{node.name}"' in said), -1)

    def etcdctl(self, number: int, endpoints: str, *words: str) -> str:
        """What the store answers a node, as soon as it does."""
        command = ["etcdctl", "--endpoints", endpoints, *words]
        done = self.wait(lambda: (one := self.nodes[number].run(command, {"ETCDCTL_API": "3"}))
                         and not one.returncode and one, ANSWER_S)
        return str(done.stdout)

    def led_by(self) -> int:
        """`leader`, once there is one."""
        (found,) = self.wait(lambda: [one for one in [self.leader()] if one >= 0])
        return int(found)

    def documents(self) -> dict[str, str]:
        """The plans and what is written of nodes, as the store has them."""
        found = {}
        for kind in ("run", "node"):
            rows = self.etcdctl(self.members[0], self.endpoints, "get", "--prefix",
                                f"/holdfast/{self.cluster}/{kind}/").splitlines()
            found |= dict(zip(rows[::2], rows[1::2], strict=True))
        return found

    def spares(self, number: int) -> set[int]:
        """Of the run's document, as this node knows it."""
        return {int(one["node"][1:]) for one in self.status(number).get("nodes", ())
                if one["part"] == "spare"}

    def said(self) -> str:
        """What every launcher and agent said, for a test that fails."""
        texts = []
        for node in self.nodes:
            files = [node.home / f"{self.name}.out", *(node.home / "state").rglob("agent.log")]
            texts += [f"--- {node.name} {file.name}\n{file.read_text(errors='replace')[-3000:]}"
                      for file in files if file.exists()]
        return "\n".join(texts)

    def wait(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        return wait_for(condition, limit_s, self.said, LOOK_S)

    def agent_pid(self, number: int) -> int:
        """Of the agent that this node's launcher has started, once there is one: a signal to
        nobody, which is 0, would come to this test itself."""
        def found() -> int:
            for pid in self.nodes[number].pids():
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                except OSError:
                    continue
                if "holdfast.agent" in words and "--private" in words:
                    return pid
            return 0

        return int(self.wait(found, ANSWER_S))

    def power_off(self, number: int) -> None:
        """Its network goes first: a machine without power says no goodbye."""
        self.nodes.blackhole(number)
        self.nodes[number].kill()


def output(node: Node, name: str = "job") -> str:
    return (node.home / f"{name}.out").read_text(errors="replace")
