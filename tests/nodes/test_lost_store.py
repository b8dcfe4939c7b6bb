"""An etcd that loses its data below a run: restored from a backup, then empty and seeded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .harness import Nodes
from .test_jobs import Cluster

STORE = 2  # the node of its only member, which carries no rank
LEASE_S = 4.0
JOB = "alpha"


class Losing(Cluster):
    """The store's only member, whose disk is lost and comes back with a backup or with nothing."""

    def lose(self, backup: Path | None) -> None:
        process, node = self.etcd[STORE], self.nodes[STORE]
        process.kill()
        process.wait()
        shutil.rmtree(node.home / "etcd")
        if backup is not None:
            peer = f"http://{node.address}:2380"
            done = node.run(
                ["etcdctl", "snapshot", "restore", str(backup), "--data-dir",
                 str(node.home / "etcd"), "--name", node.name, "--initial-cluster",
                 f"{node.name}={peer}", "--initial-advertise-peer-urls", peer],
                {"ETCDCTL_API": "3"})
            assert done.returncode == 0, done.stdout + done.stderr
        self.start_member(STORE)

    def seed(self, number: int) -> subprocess.CompletedProcess[str]:
        """By the node's own configuration, which says where its agent keeps what it knows."""
        node = self.nodes[number]
        file = node.home / "seed.toml"
        here = f'[agent]\nstate_dir = "{node.home / "state"}"\n'
        file.write_text((node.home / "agent.toml").read_text().replace("[agent]\n", here))
        return self.operator(number, "store", "seed", "--config", str(file))

    def holds(self, key: str, words: str) -> bool:
        return words in self.documents().get(f"/holdfast/main/{key}", "")

    def stays(self, ranks: dict[str, tuple[int, int]]) -> None:
        """Nobody's process is another for longer than any permit lasts without its renewal."""
        end_s = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < end_s:
            seen = self.pids(JOB)  # of the agents that answer now
            assert seen.items() <= ranks.items(), (seen, ranks, self.said())
            time.sleep(0.2)
        self.wait(lambda: self.pids(JOB) == ranks)  # once every agent answers: none has ended

    def goes_on(self, ranks: dict[str, tuple[int, int]], generation: int
                ) -> dict[str, tuple[int, int]]:
        """A killed rank comes back in the next generation, and in no older one.  Twice: a third
        failure ends a run that shows no step."""
        os.kill(min(ranks.values())[1], signal.SIGKILL)
        found: dict[str, tuple[int, int]] = self.wait(lambda: self.whole(JOB, generation))
        return found


def test_a_run_goes_on_over_a_store_that_was_restored_and_one_that_was_seeded() -> None:
    with Nodes(3) as nodes:
        cluster = Losing(nodes, members=(STORE,))
        cluster.lease_s = LEASE_S
        cluster.start_store()
        cluster.start_agents()
        for number in range(2):
            cluster.submit(number, JOB, 2)
        ranks = cluster.wait(lambda: cluster.whole(JOB, 1))
        backup = nodes.home / "backup.db"
        cluster.etcdctl(STORE, cluster.endpoints, "snapshot", "save", str(backup))

        # What the backup does not know: a generation, and a node that a person excluded.
        ranks = cluster.goes_on(ranks, 2)
        done = cluster.operator(0, "exclude", f"n{STORE}", "--reason", "its fan")
        assert done.returncode == 0, done.stdout + done.stderr

        cluster.lose(backup)
        cluster.wait(lambda: cluster.holds(f"run/{JOB}", '"generation":2'))
        cluster.wait(lambda: cluster.holds(f"node/n{STORE}", "its fan"))
        cluster.stays(ranks)
        ranks = cluster.goes_on(ranks, 3)

        # Empty, it is nobody's cluster: nothing is written there until a person says whose it is.
        cluster.lose(None)
        cluster.wait(lambda: "store seed" in cluster.operator(1, "status").stdout)
        assert not cluster.documents()
        cluster.stays(ranks)
        done = cluster.seed(1)
        assert done.returncode == 0, done.stdout + done.stderr
        cluster.wait(lambda: cluster.holds(f"run/{JOB}", '"generation":3'))
        cluster.wait(lambda: cluster.holds(f"node/n{STORE}", "its fan"))
        cluster.stays(ranks)

        (cluster.shared / JOB / "end").write_text("")
        codes = {key: process.wait(60) for key, process in cluster.jobs.items()}
        assert set(codes.values()) == {0}, (codes, cluster.said())
