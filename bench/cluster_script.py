"""A script over nodes that are hurt for real: under `holdfast run` and under torchrun, in turns.

The same DDP script, nodes and faults for each.  `rank_kill`: SIGKILL of one rank of four.
`exception`: one rank of four raises behind a step.  `node_loss`: one node of four loses power and a
fifth stands by.  `shrink`: the same without one, and three go on (`--nnodes 3:4`).  Runners:
`holdfast`, with an etcd of three members among the nodes (the lease as it ships, etcd's timers as
docs/cluster.md sets them); `torchrun` as it comes; `tuned`, torchrun whose rendezvous drops a
silent node after 3 s instead of 15, with a store of its own for each restart (fresh_prefix.py) and
a gloo time-out of 3 s.  torchrun's rendezvous is on node 0, which is never hurt: its loss ends
torchrun's run.  From the fault to the first step that no rank had finished before, on the slowest
rank of those that go on.  Needs root, iproute2, nftables and etcd-server.

    python -m bench.cluster_script [--runs 5 | --quick] [--runners holdfast torchrun tuned]
                                   [--faults rank_kill exception node_loss shrink] [--limit 60]
                                   [--lease 10]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .common import BENCH, ROOT, Failed, Results, rounded
from .observe import Step, StepFile
from .report import cluster_script

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import World

from holdfast.agent.config import settings

RUNNERS = ("holdfast", "torchrun", "tuned")
FAULTS = ("rank_kill", "exception", "node_loss", "shrink")
RANKS, MEMBERS, FAULT_AFTER, PORT = 4, (0, 1, 2), 17, 29500
START_LIMIT_S, POLL_S, WEIGHT = 300.0, 0.002, 16
RESTARTS = "20"  # torchrun's nodes restart each other, and count each time
ETCD_MS = (20, 200)
GLOO_LIMIT_S = 3  # of the tuned script: ten of its steps
# A node is dropped whose word is older than interval x attempts; both are whole numbers.  A word is
# sent on each tick of one interval, but only where the last one is a whole interval old: a tick
# that is a moment early sends none, and words are up to two intervals apart.  With two attempts
# nodes that live are dropped all the time, and five never begin; three is the least that can work.
TUNED = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
# The address of the store that it shares is told in the first round alone: who joins in a later one
# waits for it until that read times out, 60 s later, and no spare ever comes in.
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Script:
    """One world of nodes, each with a launcher of the same script."""

    def __init__(self, nodes: Nodes, runner: str, fault: str, lease_s: float) -> None:
        self.nodes, self.runner, self.fault = nodes, runner, fault
        self.nnodes = f"{RANKS - 1}:{RANKS}" if fault == "shrink" else str(RANKS)
        self.left = RANKS - (fault == "shrink")  # ranks that go on
        self.world = World(nodes, members=MEMBERS, lease_s=lease_s)
        self.world.heartbeat_ms, self.world.election_ms = ETCD_MS
        file = self.world.shared / "steps"
        file.touch()
        self.file = StepFile(file)
        self.raises = self.world.shared / "raises"
        self.words = ["--dir", str(self.world.shared), "--steps-file", str(file), "--steps",
                      "1000000", "--raises", str(self.raises)]

    def launch(self) -> None:
        if self.runner == "holdfast":
            self.world.start_store()
        for node in self.nodes:
            if self.runner == "holdfast":
                self.world.launch(
                    node.number, "run", "--nnodes", self.nnodes, "--nproc-per-node", "1",
                    "--max-restarts", RESTARTS, str(BENCH / "workload_script.py"), *self.words)
            else:
                self._torchrun(node.number)

    def _torchrun(self, number: int) -> None:
        node, tuned = self.nodes[number], self.runner == "tuned"
        rendezvous = f"is_host={int(number == 0)}" + (f",{TUNED}" if tuned else "")
        wrapper = [str(BENCH / "fresh_prefix.py"), "--gloo-limit", str(GLOO_LIMIT_S)]
        node.start(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nnodes,
             "--nproc-per-node", "1", "--max-restarts", RESTARTS, "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"{self.nodes[0].address}:{PORT}", "--rdzv-id", "job",
             "--rdzv-conf", rendezvous, "--local-addr", node.address,
             *(wrapper if tuned else []), str(BENCH / "workload_script.py"), *self.words],
            {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **(UNSHARED if tuned else {})},
            output="job.out")

    def until(self, met: Callable[[], bool], limit_s: float) -> bool:
        """Reads the ranks' steps until it is met; False where it is not within the limit."""
        limit_s += time.monotonic()
        while not met():
            if time.monotonic() > limit_s:
                return False
            self.file.poll()
            time.sleep(POLL_S)
        return True

    def placed(self) -> dict[int, Step]:
        """Node -> the last step of the rank there, once all have come far enough."""
        def newest() -> dict[int, Step]:
            found = {step.rank: step for step in self.file.steps}
            return found if len(found) == RANKS and all(
                step.step >= FAULT_AFTER for step in found.values()) else {}

        if not self.until(lambda: bool(newest()), START_LIMIT_S):
            raise Failed(f"no step {FAULT_AFTER} of all ranks: {self.said()}")
        of_pid = {pid: node.number for node in self.nodes for pid in node.pids()}
        return {of_pid[step.pid]: step for step in newest().values()}

    def said(self) -> str:
        return "\n".join(f"{node.name}: {node.said('job.out')[-1500:]}" for node in self.nodes)

    def hurt(self, number: int, victim: Step) -> int:
        """When, on the monotonic clock, in nanoseconds."""
        if self.fault == "rank_kill":
            begun_ns = time.monotonic_ns()
            os.kill(victim.pid, signal.SIGKILL)
        elif self.fault == "exception":
            order = self.raises.with_suffix(".tmp")
            order.write_text(str(victim.pid))
            order.rename(self.raises)
            raised = Path(f"{self.raises}.at")
            if not self.until(raised.exists, START_LIMIT_S):
                raise Failed(f"rank {victim.rank} did not raise: {self.said()}")
            begun_ns = int(raised.read_text())
        else:  # a machine without power says no goodbye
            self.nodes.blackhole(number)
            begun_ns = time.monotonic_ns()
            (self.nodes[number].cgroups.all / "cgroup.kill").write_text("1")
        return begun_ns

    def back(self, begun_ns: int, limit_s: float) -> dict[str, Any]:
        old = {step.pid for step in self.file.steps}

        def firsts() -> dict[int, int]:
            """Rank -> when it first finished a step that none had finished before."""
            top = max(step.step for step in self.file.steps if step.pid in old)
            found: dict[int, int] = {}
            for step in self.file.steps:
                if step.pid not in old and step.step > top:
                    found.setdefault(step.rank, step.end_ns)
            return found

        came = self.until(lambda: len(firsts()) == self.left, limit_s)
        top = max(step.step for step in self.file.steps if step.pid in old)
        again = {step.step for step in self.file.steps if step.pid not in old and step.step <= top}
        return {"came_back": came, "top_step": top, "redone_steps": len(again), "recovery_s": (
            (max(firsts().values()) - begun_ns) / 1e9 if came else None)}


@contextmanager
def started(runner: str, fault: str, lease_s: float) -> Iterator[Script]:
    with Nodes(RANKS + (fault == "node_loss"), weight=WEIGHT) as nodes:
        run = Script(nodes, runner, fault, lease_s)
        try:
            run.launch()
            yield run
        finally:
            run.file.close()


def measure(
    runner: str, fault: str, draw: random.Random, limit_s: float, lease_s: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"script_{fault}", "runner": runner, "ok": False, "why": "",
                           "load_1m": round(os.getloadavg()[0], 2)}
    try:
        with started(runner, fault, lease_s) as run:
            before = run.placed()
            number = draw.choice(sorted(set(before) - {0}))
            row.update(node=number, rank=before[number].rank)
            begun_ns = run.hurt(number, before[number])
            found = run.back(begun_ns, limit_s)
            row.update({key: rounded(value) if isinstance(value, float) else value
                        for key, value in found.items()})
            row["ok"] = True
            if not found["came_back"]:
                # The environment first: it may lie below the checkout, or below another one.
                said = run.said()[-4000:]
                for path, word in ((run.nodes.home, "$NODES"), (sys.prefix, "$PYTHON"),
                                   (sys.base_prefix, "$PYTHON"), (ROOT, ".")):
                    said = said.replace(str(path), word)
                row["log"] = said
    except Failed as error:
        row["why"] = str(error)[-2000:]
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.cluster_script", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=RUNNERS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to come back in")
    parser.add_argument("--lease", type=float, default=settings.Detect().lease_s,
                        metavar="SECONDS", help="a script's ranks are replaced when it is over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results, rows, draw = Results("cluster_script", options.out), [], random.Random(options.seed)
    for fault in options.faults:
        for _ in range(1 if options.quick else options.runs):
            for runner in options.runners:
                row = measure(runner, fault, draw, options.limit, options.lease)
                ours = {"lease_s": options.lease, "etcd_ms": list(ETCD_MS), "etcd_pre_vote": True}
                results.add({**row, **(ours if runner == "holdfast" else {})})
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items() if key != "log"),
                      flush=True)
    print(cluster_script(rows), f"rows: {results.path}", sep="\n\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
