"""What a leader's step and plan cost as the fleet grows: 128 to 2,048 nodes of 8 ranks.

    python -m bench.plan_scale [--rows FILE]

Pure code alone: the real Node with the beats of a whole fleet, no store and no network.  Times are
the process's own seconds on the processor (the machine may be busy), the least of several goes.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import (
    Beat,
    Doc,
    Documents,
    Ended,
    Lease,
    Now,
    Observed,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
    StoreView,
    node_subject,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.run import members
from holdfast.agent.core.run import plan as planning

NPROC = 8
SIZES = (128, 256, 512, 1024, 2048)
GOES = 7
NOW_S = 1000.0


def name(number: int) -> str:
    return f"node-{number:05d}"


def labels(number: int) -> tuple[tuple[str, str], ...]:
    return (("rack", f"rack-{number // 16:04d}"), ("nvlink_domain", f"nvl-{number // 8:04d}"))


def ranks_of(number: int, dead: int = -1) -> tuple[RankView, ...]:
    found = []
    for local in range(NPROC):
        rank = number * NPROC + local
        one = RankView(rank, name(number), 10_000 + local, 1, "running", step=500,
                       phase="forward_backward", still_s=0.2, beat_age_s=0.05, proc_state="S",
                       seq=((0, 4000),), step_seq=((499, 3992), (500, 4000)), step_time_s=1.0)
        if rank == dead:
            one = replace(one, state="ended", ended=Ended(137, 9, boot_s=NOW_S - 0.3))
        found.append(one)
    return tuple(found)


def beat_of(number: int, dead: int = -1) -> Beat:
    return Beat(node=name(number), run="m5", generation=1, boot_s=NOW_S - 0.2, sent_boot_s=NOW_S,
                ranks=ranks_of(number, dead), labels=labels(number), grade="trainer", nproc=NPROC,
                checkpoint_dir="/ckpt")


class Fleet:
    """One run over all nodes, as its leader (node 0) sees it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.plan = Plan(
            run="m5", generation=1, members=tuple(name(n) for n in range(nodes)),
            ranks=tuple((rank, name(rank // NPROC)) for rank in range(nodes * NPROC)),
            resume=Resume("fresh"), reason="bench", history=((1, 0),), checkpoint_dir="/ckpt")
        run = Doc("run/m5", 3, msgspec.json.encode(self.plan))
        docs = [Doc(node_subject(name(n)), 1, b'{"reason":"released"}') for n in range(nodes)]
        self.docs = Documents((run, *docs))
        self.view = RunView(
            run="m5", node=name(0), grade="trainer", nproc=NPROC, generation=1, state="running",
            max_restarts=3, nnodes_min=nodes // 2, nnodes_max=nodes, ranks=ranks_of(0),
            checkpoint_dir="/ckpt", startup_s=20.0)
        self.beats = tuple(beat_of(n) for n in range(1, nodes))
        self.settings = Settings(single_node=False)

    def observed(self, beats: tuple[Beat, ...], at_s: float) -> Observed:
        moved = tuple(replace(one, boot_s=at_s - 0.2) for one in beats)
        lease = Lease("m5", name(0), at_s + 8.0)
        return Observed(runs=(self.view,), beats=moved, store=StoreView(True, self.docs, (lease,)))

    def plan_s(self, goes: int = GOES) -> float:
        """Seconds of `plan_once`."""
        return least_s(self.plan_once, goes)

    def plan_once(self) -> None:
        """From the levels to the next plan, one node lost: members, layout, resume point."""
        now = Now(NOW_S, 1e9, "b")
        dead = self.beats[: self.nodes // 2] + self.beats[self.nodes // 2 + 1:]
        store = StoreView(True, self.docs)
        nodes = members.members(self.view, self.plan, dead, store, now, self.settings, 0.0)
        ranks = members.ranks_of(self.view, 1, dead, now, self.settings)
        known = members.known(self.view, dead, now, self.settings, {})
        made, why = planning.plan_run(planning.PlanView(
            run="m5", grade="trainer", leader=True, highest=1, nproc=NPROC, reason="bench",
            members=nodes, world=planning.World(self.nodes // 2, self.nodes),
            current=self.plan, ranks=ranks, commits=known.commits, listed=known.listed,
            checkpoint_dir="/ckpt"))
        if made is None or len(made.members) != self.nodes - 1:
            raise RuntimeError(why)
        msgspec.json.encode(made)

    def step_s(self) -> float:
        """One step of the leader while all is well, with a new beat of every node."""
        node = Node(name(0), self.settings, load_runbooks())
        at_s = [NOW_S]

        def go() -> None:
            at_s[0] += 1.0
            node.step(Now(at_s[0], 1e9 + at_s[0], "b"), self.observed(self.beats, at_s[0]))

        go()
        return least_s(go)

    def memory_bytes(self) -> int:
        """What a leader holds of the whole fleet: beats, documents, and its own step."""
        tracemalloc.start()
        fleet = Fleet(self.nodes)
        node = Node(name(0), fleet.settings, load_runbooks())
        node.step(Now(NOW_S, 1e9, "b"), fleet.observed(fleet.beats, NOW_S))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most


def least_s(go: Callable[[], None], goes: int = GOES) -> float:
    found = []
    for _ in range(goes):
        begin_s = time.process_time()
        go()
        found.append(time.process_time() - begin_s)
    return min(found)


def row(nodes: int) -> dict[str, float]:
    fleet = Fleet(nodes)
    beat = msgspec.msgpack.encode(beat_of(1))
    return {
        "nodes": nodes, "ranks": nodes * NPROC, "plan_ms": round(fleet.plan_s() * 1e3, 2),
        "step_ms": round(fleet.step_s() * 1e3, 2), "beat_bytes": len(beat),
        "plan_bytes": len(fleet.docs.get("run/m5").body),
        "memory_mb": round(fleet.memory_bytes() / 1e6, 1),
    }


def main(measured: Callable[[], list[dict[str, float]]]) -> None:
    """Prints the rows, and writes them to the file that the caller names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="", help="write the rows there, one JSON a line")
    options = parser.parse_args()
    rows = measured()
    for one in rows:
        print(json.dumps(one), flush=True)
    if options.rows:
        Path(options.rows).write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main(lambda: [row(nodes) for nodes in SIZES])
