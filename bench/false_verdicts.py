"""Four nodes lose packets beside busy processors: how often one that lives is called lost.

Owns one case.  Agents of four nodes carry a command that only waits; every cable loses 5 % of what
is sent each way, and as many processes as there are nodes burn the processors that all share.
Several such clusters at once share these as well, which is more hours of them in one.
Each row counts, over a part of the time, the nodes that an agent called lost, and generations
behind the first.  At the end one node really loses power: who had gone blind would not see it, and
the last row says after how long every other agent had named it.  Needs root, iproute2, nftables and
etcd-server.

    python -m bench.false_verdicts [--minutes 360] [--loss 5] [--burners 4] [--clusters 1]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .cluster import log_of
from .common import BENCH, POLL_S, ROOT, Results, rounded
from .observe import LogWatch

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import World

NODES, MEMBERS = 4, (0, 1, 2)
LOOPING = ROOT / "tests/nodes/looping.py"
ROW_S, KNOWN_LIMIT_S = 120.0, 30.0
BURN = "while True: pass"


@contextmanager
def burners(count: int) -> Iterator[None]:
    """So many processes that only count."""
    started = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def begun(world: World) -> bool:
    """Whether every node's rank is in the first generation."""
    ranks = [rank for number in range(NODES) for rank in world.ranks(number).values()]
    return len(ranks) == NODES and {rank["generation"] for rank in ranks} == {1}


class Cluster:
    """Four nodes, their store, and what their agents' logs said up to here."""

    def __init__(self, nodes: Nodes) -> None:
        self.world = World(nodes, members=MEMBERS)
        self.world.start_store()
        for number in range(NODES):
            self.world.launch(number, "run", "--nnodes", str(NODES), "--nproc-per-node", "1",
                              "--no-python", sys.executable, str(LOOPING),
                              str(self.world.shared))
        self.world.wait(lambda: begun(self.world))
        self.at = {number: log_of(self.world, number).stat().st_size for number in range(NODES)}

    def lose(self, percent: int) -> None:
        for number in range(NODES):
            self.world.nodes.loss(number, percent)

    def said(self, since_s: float) -> dict[str, Any]:
        """Counts what the agents have said since the last look."""
        lost = 0
        for number, begin in self.at.items():
            with open(log_of(self.world, number), "rb") as file:
                file.seek(begin)
                lost += sum(b" is lost" in line for line in file)
                self.at[number] = file.tell()
        ranks = [rank for number in range(NODES) for rank in self.world.ranks(number).values()]
        return {"minutes": rounded((time.monotonic() - since_s) / 60.0), "called_lost": lost,
                "generation": max((rank["generation"] for rank in ranks), default=0),
                "ranks": len(ranks), "load_1m": os.getloadavg()[0]}


def power_off(world: World, number: int) -> dict[str, Any]:
    """Seconds until every other agent has named a node that really went."""
    logs = [LogWatch(log_of(world, one), f"n{number} is lost")
            for one in range(NODES) if one != number]
    world.nodes.blackhole(number)
    begin_ns = time.monotonic_ns()
    (world.nodes[number].cgroups.all / "cgroup.kill").write_text("1")
    end_s = time.monotonic() + KNOWN_LIMIT_S
    while not all(log.at_ns for log in logs) and time.monotonic() < end_s:
        for log in logs:
            log.poll()
        time.sleep(POLL_S)
    known_s = [rounded((log.at_ns - begin_ns) / 1e9) for log in logs if log.at_ns]
    for log in logs:
        log.close()
    return {"known": len(known_s), "of": len(logs), "known_s": known_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=360.0)
    parser.add_argument("--loss", type=int, default=5, help="per cent, each way")
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--clusters", type=int, default=1, help="of four nodes, at once")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    results = Results("false_verdicts", options.out)
    wrong = 0

    def keep(case: str, row: dict[str, Any]) -> None:
        results.add({"case": case, "loss": options.loss, "burners": options.burners,
                     "clusters": options.clusters, **row})
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    with ExitStack() as made:
        clusters = [Cluster(made.enter_context(Nodes(NODES))) for _ in range(options.clusters)]
        made.enter_context(burners(options.burners))
        for one in clusters:
            one.lose(options.loss)
        end_s = time.monotonic() + options.minutes * 60.0
        while (now_s := time.monotonic()) < end_s:
            time.sleep(max(0.0, min(end_s - now_s, ROW_S)))
            for number, one in enumerate(clusters):
                row = one.said(now_s)
                wrong += row["called_lost"] + (row["generation"] != 1) + (row["ranks"] != NODES)
                keep("alive", {"cluster": number, **row})
        for number, one in enumerate(clusters):
            row = power_off(one.world, NODES - 1)
            wrong += row["known"] != row["of"]
            keep("dead", {"cluster": number, **row})
            (one.world.shared / "end").write_text("")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
