"""Two users' jobs on the agents of four nodes: what befalls one changes nothing for the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waiting import wait_for

from holdfast.agent.cli.client import Agent
from holdfast.agent.cli.text import Failure

from .harness import Nodes
from .worlds import ANSWER_S, CLI, World

LOOPING = str(Path(__file__).with_name("looping.py"))
USERS = {"alpha": 64101, "beta": 64102}
# Another user's process, which yet may read where the tests lie.
READS = ("--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


class Cluster(World):
    """The nodes' own agents, as systemd starts them, and jobs of several users."""

    def __init__(self, nodes: Nodes, members: Sequence[int]) -> None:
        super().__init__(nodes, members=members, lease_s=15.0)  # an agent is back before that
        self.jobs: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start_agents(self) -> None:
        for node in self.nodes:
            (node.home / "sys/holdfast").mkdir(parents=True)
            node.run_folder = str(node.home / "sys")
            self.start_agent(node.number)

    def start_agent(self, number: int) -> None:
        node = self.nodes[number]
        socket = self.socket(number)
        socket.unlink(missing_ok=True)
        environ = self.environ(number)
        environ["HOLDFAST_RUNTIME_DIR"] = ""
        node.start([*CLI, "agent", "--config", environ["HOLDFAST_CONFIG"]], environ,
                   output="agent.out")
        wait_for(socket.exists, what=lambda: node.said("agent.out"))

    def socket(self, number: int) -> Path:
        return self.nodes[number].home / "sys/holdfast/api.sock"

    def as_user(self, number: int, job: str, *words: str) -> tuple[list[str], dict[str, str]]:
        """Command and environment of a job's user on one node."""
        uid, home = USERS[job], self.nodes[number].home / job
        home.mkdir(exist_ok=True)
        os.chown(home, uid, uid)
        return (["setpriv", f"--reuid={uid}", f"--regid={uid}", *READS, *words],
                {**self.environ(number), "HOLDFAST_RUNTIME_DIR": "", "HOME": str(home),
                 "HOLDFAST_STATE_DIR": str(home / "state"), "TMPDIR": str(home)})

    def submit(self, number: int, job: str, nnodes: int) -> None:
        folder = self.shared / job
        folder.mkdir(exist_ok=True)
        os.chown(folder, USERS[job], USERS[job])
        command, environ = self.as_user(
            number, job, *CLI, "run", "--run", job, "--nnodes", str(nnodes), "--nproc-per-node",
            "1", "--preload", "none", "--hang-limit", "600", LOOPING, str(folder))
        self.jobs[job, number] = self.nodes[number].start(command, environ, output=f"{job}.out")

    def asks(self, number: int, job: str, *words: str) -> subprocess.CompletedProcess[str]:
        command, environ = self.as_user(number, job, *CLI, *words)
        return self.nodes[number].run(command, environ)

    def operator(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        return self.nodes[number].run(
            [*CLI, *words], {**self.environ(number), "HOLDFAST_RUNTIME_DIR": ""})

    def seen(self, number: int, job: str) -> dict[str, Any]:
        try:
            runs = Agent(self.socket(number)).get("/api/v1/status")["runs"]
        except (OSError, Failure):
            return {}
        return next((dict(one) for one in runs if one["run"] == job), {})

    def pids(self, job: str) -> dict[str, tuple[int, int]]:
        """Node -> generation and pid of the job's rank there."""
        return {node.name: (rank["generation"], rank["pid"]) for node in self.nodes
                for rank in self.seen(node.number, job).get("ranks", ())
                if rank["state"] != "ended"}

    def whole(self, job: str, generation: int) -> dict[str, tuple[int, int]]:
        """`pids` once two nodes are in this generation, else {}."""
        found = self.pids(job)
        return found if [g for g, _ in found.values()] == [generation] * 2 else {}

    def said(self) -> str:
        texts = [f"--- {file}\n{file.read_text(errors='replace')[-3000:]}"
                 for node in self.nodes for file in sorted(node.home.glob("*.out"))]
        return "\n".join(texts)


def test_two_jobs_of_two_users_share_agents_and_nothing_else() -> None:
    with Nodes(4) as nodes:
        cluster = Cluster(nodes, members=(0, 1, 2))
        cluster.start_store()
        cluster.start_agents()
        story(cluster)


def story(cluster: Cluster) -> None:
    for number in range(3):
        cluster.submit(number, "alpha", 2)
        cluster.submit(number + 1, "beta", 2)
    alpha = cluster.wait(lambda: cluster.whole("alpha", 1))
    beta = cluster.wait(lambda: cluster.whole("beta", 1))
    owners = {Path(f"/proc/{pid}").stat().st_uid for _, pid in alpha.values()}
    assert owners == {USERS["alpha"]}

    # Whose job it is not may see that it is there, and change nothing of it or of a node.
    for words in (("restart", "--run", "alpha", "--reason", "mine now"),
                  ("exclude", "n1", "--reason", "mine now")):
        refused = cluster.asks(1, "beta", *words)
        assert refused.returncode != 0, refused.stdout
        assert "Traceback" not in refused.stderr, refused.stderr

    # One job loses a rank: the other one's processes and generation stay.
    node, (_, pid) = sorted(alpha.items())[0]
    os.kill(pid, signal.SIGKILL)
    alpha = cluster.wait(lambda: cluster.whole("alpha", 2))
    cluster.wait(lambda: cluster.pids("beta") == beta, ANSWER_S)  # once every agent answers

    # A member of the store dies that carries no lease of its own: nobody feels it, and a rank that
    # is lost then comes back.
    os.kill(cluster.etcd[2].pid, signal.SIGKILL)
    cluster.etcd[2].wait()
    os.kill(sorted(beta.values())[0][1], signal.SIGKILL)
    beta = cluster.wait(lambda: cluster.whole("beta", 2))
    cluster.wait(lambda: cluster.pids("alpha") == alpha, ANSWER_S)

    # The agent of a node with ranks of both or one of them dies: they train on, and are its again.
    number = int(node[1:])
    agent = next(pid for pid in cluster.nodes[number].pids() if "cli\0agent\0" in words_of(pid))
    os.kill(agent, signal.SIGKILL)
    cluster.start_agent(number)
    cluster.wait(lambda: cluster.pids("alpha") == alpha and cluster.pids("beta") == beta)

    # An operator excludes a node: whoever has ranks there goes on with its spare, on other nodes.
    there = sorted(set(alpha) & set(beta) or set(alpha))[0]
    asked = next(node.number for node in cluster.nodes if node.name != there)
    done = cluster.operator(asked, "exclude", there, "--reason", "its memory")
    assert done.returncode == 0, done.stdout + done.stderr + cluster.said()
    for job, before in (("alpha", alpha), ("beta", beta)):
        if there in before:
            cluster.wait(lambda job=job: cluster.whole(job, 3))  # type: ignore[misc]
        assert there not in cluster.pids(job)
    why = cluster.operator(asked, "why", there)
    assert "its memory" in why.stdout, why.stdout + why.stderr

    for job in USERS:
        (cluster.shared / job / "end").write_text("")
    codes = {key: process.wait(60) for key, process in cluster.jobs.items()}
    assert set(codes.values()) == {0}, (codes, cluster.said())
    environment = json.loads((cluster.shared / "alpha/0.json").read_text())
    assert environment["WORLD_SIZE"] == "2"


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
