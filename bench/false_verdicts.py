"""Four nodes lose packets beside busy processors: how often one that lives is called lost.

Owns one case.  Agents of four nodes carry a command that only waits; every cable loses 5 % of what
is sent each way, and as many processes as there are nodes burn the processors that all share.
Each row counts, over a part of the time, the nodes that an agent called lost, and generations
behind the first.  At the end one node really loses power: who had gone blind would not see it, and
the last row says after how long every other agent had named it.  Needs root, iproute2, nftables and
etcd-server.

    python -m bench.false_verdicts [--minutes 360] [--loss 5] [--burners 4]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cluster import log_of, says_lost
from .common import BENCH, ROOT, Results, rounded

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import World

NODES, MEMBERS = 4, (0, 1, 2)
LOOPING = ROOT / "tests/nodes/looping.py"
ROW_S, LOOK_S, KNOWN_LIMIT_S = 120.0, 0.02, 30.0
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


def watched(world: World, until_s: float, at: dict[int, int]) -> dict[str, Any]:
    """Counts what the agents say until then; `at`: where their logs were read to."""
    begin_s, said = time.monotonic(), 0
    time.sleep(max(0.0, until_s - begin_s))
    for number in range(NODES):
        path = log_of(world, number)
        with open(path, "rb") as file:
            file.seek(at[number])
            said += sum(b" is lost" in line for line in file)
            at[number] = file.tell()
    ranks = [rank for number in range(NODES) for rank in world.ranks(number).values()]
    return {"minutes": rounded((time.monotonic() - begin_s) / 60.0), "called_lost": said,
            "generation": max((rank["generation"] for rank in ranks), default=0),
            "ranks": len(ranks), "load_1m": os.getloadavg()[0]}


def power_off(world: World, number: int, at: dict[int, int]) -> dict[str, Any]:
    """Seconds until every other agent has named a node that really went."""
    others = [one for one in range(NODES) if one != number]
    world.nodes.blackhole(number)
    (world.nodes[number].cgroups.all / "cgroup.kill").write_text("1")
    begin_s = time.monotonic()
    known: dict[int, float] = {}
    while len(known) < len(others) and time.monotonic() - begin_s < KNOWN_LIMIT_S:
        for one in others:
            if one not in known and says_lost(log_of(world, one), at[one], number):
                known[one] = time.monotonic() - begin_s
        time.sleep(LOOK_S)
    return {"known": len(known), "of": len(others),
            "known_s": [rounded(known[one]) for one in sorted(known)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=360.0)
    parser.add_argument("--loss", type=int, default=5, help="per cent, each way")
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    results = Results("false_verdicts", options.out)
    common = {"loss": options.loss, "burners": options.burners}
    with Nodes(NODES) as nodes:
        world = World(nodes, members=MEMBERS)
        world.start_store()
        for number in range(NODES):
            world.launch(number, "run", "--nnodes", str(NODES), "--nproc-per-node", "1",
                         "--no-python", sys.executable, str(LOOPING), str(world.shared))
        world.wait(lambda: begun(world))
        at = {number: log_of(world, number).stat().st_size for number in range(NODES)}
        wrong = 0
        with burners(options.burners):
            for number in range(NODES):
                nodes.loss(number, options.loss)
            end_s = time.monotonic() + options.minutes * 60.0
            while time.monotonic() < end_s:
                row = watched(world, min(end_s, time.monotonic() + ROW_S), at)
                wrong += row["called_lost"] + (row["generation"] != 1) + (row["ranks"] != NODES)
                results.add({"case": "alive", **common, **row})
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            row = power_off(world, NODES - 1, at)
        results.add({"case": "dead", **common, **row})
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        (world.shared / "end").write_text("")
    return int(bool(wrong) or row["known"] != row["of"])


if __name__ == "__main__":
    sys.exit(main())
