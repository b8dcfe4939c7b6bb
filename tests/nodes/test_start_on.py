"""A run that is started on three nodes from one of them, by agents and the user's own accept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from holdfast.agent.cli.client import Agent
from holdfast.worker.exits import INTERRUPTED, RETRY

from .harness import Nodes
from .test_jobs import LOOPING, USERS, Cluster, words_of
from .worlds import ANSWER_S, CLI

ENDS_S = 60.0


class Started(Cluster):
    """Jobs that are typed on one node alone."""

    def accept(self, number: int, job: str) -> subprocess.Popen[bytes]:
        command, environ = self.as_user(number, job, *CLI, "accept")
        return self.nodes[number].start(command, environ, output=f"accept-{job}.out")

    def type(self, number: int, job: str, on: str, nnodes: str, run: str
             ) -> subprocess.Popen[bytes]:
        folder = self.shared / run
        folder.mkdir(exist_ok=True)
        os.chown(folder, USERS[job], USERS[job])
        command, environ = self.as_user(
            number, job, *CLI, "run", "--on", on, "--env", "COLOUR=green", "--run", run,
            "--nnodes", nnodes, "--nproc-per-node", "1", "--preload", "none", "--hang-limit",
            "600", LOOPING, str(folder))
        return self.nodes[number].start(
            command, {**environ, "NCCL_DEBUG": "WARN", "WANDB_API_KEY": "word"},
            output=f"{run}.out")

    def accepts(self, number: int, job: str) -> bool:
        return "accepts runs of" in self.nodes[number].said(f"accept-{job}.out")


def test_one_command_starts_and_ends_a_run_on_three_nodes() -> None:
    with Nodes(3) as nodes:
        cluster = Started(nodes, members=(0, 1, 2))
        cluster.start_store()
        cluster.start_agents()
        story(cluster)


def story(cluster: Started) -> None:
    # Where nobody accepts, nothing begins, on no node, and each says what to do there.
    cluster.wait(lambda: in_touch(cluster), ANSWER_S)
    refused = cluster.type(0, "alpha", "n1,n2", "3", "none")
    assert cluster.wait(lambda: refused.poll() is not None) and refused.returncode == RETRY
    said = cluster.nodes[0].said("none.out")
    assert said.count("nobody accepts runs of") == 2 and "nothing is started" in said

    accepting = [cluster.accept(number, "alpha") for number in (1, 2)]
    cluster.wait(lambda: all(cluster.accepts(number, "alpha") for number in (1, 2)))
    second = cluster.accept(1, "alpha")
    assert cluster.wait(lambda: second.poll() is not None) and second.returncode == 1
    command = cluster.type(0, "alpha", "n1,n2", "3", "one")
    first = cluster.wait(lambda: worlds(cluster, "one", 3))
    for node, (_, pid) in first.items():
        process = Path(f"/proc/{pid}")
        assert process.stat().st_uid == USERS["alpha"], node
        environ = process.joinpath("environ").read_text().split("\0")
        assert {"COLOUR=green", "NCCL_DEBUG=WARN"} <= set(environ) or node == "n0"
        assert "WANDB_API_KEY=word" not in environ or node == "n0"
        assert os.readlink(process / "cwd") == os.readlink(f"/proc/{command.pid}/cwd")

    # Whose it is not neither ends nor sees it, and may start nothing in another's name.
    other = cluster.asks(1, "beta", "end", "one")
    assert other.returncode == 1 and "Traceback" not in other.stderr, other.stderr
    # An agent begins anew: launchers stay, and are told of again.
    agent = next(pid for pid in cluster.nodes[1].pids() if "cli\0agent\0" in words_of(pid))
    os.kill(agent, signal.SIGKILL)
    cluster.start_agent(1)
    cluster.wait(lambda: worlds(cluster, "one", 3) == first)
    answers = cluster.wait(lambda: known(cluster, 2, "one"))
    assert answers == {"n1": "running", "n2": "running"}

    # Ctrl-C where it was typed ends it everywhere, and says how.
    command.send_signal(signal.SIGINT)
    assert cluster.wait(lambda: command.poll() is not None, ENDS_S), cluster.said()
    assert command.returncode == INTERRUPTED, cluster.nodes[0].said("one.out")
    said = cluster.nodes[0].said("one.out")
    assert all(f"{node}: its launcher ended with {RETRY}" in said for node in ("n1", "n2")), said
    assert gone(first)

    # Ended from another node than where it was typed.
    command = cluster.type(0, "alpha", "all", "3", "two")
    second_run = cluster.wait(lambda: worlds(cluster, "two", 3))
    done = cluster.asks(2, "alpha", "end", "two")
    assert done.returncode == 0 and done.stdout.count("told to end") == 3, done
    assert cluster.wait(lambda: command.poll() is not None, ENDS_S)
    assert command.returncode == RETRY, cluster.nodes[0].said("two.out")
    assert gone(second_run)

    # The command is killed: the run does not feel it, and is ended from any node.
    command = cluster.type(0, "alpha", "n1,n2", "3", "three")
    third_run = cluster.wait(lambda: worlds(cluster, "three", 3))
    command.kill()
    command.wait()
    cluster.wait(lambda: worlds(cluster, "three", 3) == third_run, ANSWER_S)
    done = cluster.asks(2, "alpha", "end", "three")
    assert done.returncode == 0 and done.stdout.count("told to end") == 3, done
    cluster.wait(lambda: gone(third_run) and not cluster.pids("three"), ENDS_S)

    for one in accepting:
        one.terminate()
        assert one.wait(ENDS_S) == 0


def in_touch(cluster: Started) -> bool:
    """Whether the agent of n0 is answered by all others."""
    rows = Agent(cluster.socket(0)).get("/api/v1/fleet/status")["nodes"]
    return [row["age_s"] for row in rows] == [0.0] * len(cluster.nodes.all)


def worlds(cluster: Started, run: str, size: int) -> dict[str, tuple[int, int]]:
    """Node -> generation and pid once so many nodes are in one generation, else {}."""
    found = cluster.pids(run)
    return found if len(found) == size and len({one for one, _ in found.values()}) == 1 else {}


def gone(ranks: dict[str, tuple[int, int]]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for _, pid in ranks.values())


def known(cluster: Started, number: int, run: str) -> dict[str, str]:
    """What the nodes' agents know of launchers that were started from elsewhere, by `look`."""
    script = ("import json, sys; from holdfast.agent.cli.client import Agent; "
              "from pathlib import Path; "
              "print(json.dumps(Agent(Path(sys.argv[1])).post('/api/v1/starts/look', "
              "{'nodes': ['n1', 'n2'], 'run': sys.argv[2]})))")
    command, environ = cluster.as_user(
        number, "alpha", CLI[0], "-c", script, str(cluster.socket(number)), run)
    done = cluster.nodes[number].run(command, environ)
    if done.returncode:
        return {}
    rows = json.loads(done.stdout)["nodes"]
    found = {node: row["state"] for node, row in rows.items()}
    return found if "refused" not in found.values() else {}
