"""Survivors of a peer killed in mid-message: who is woken, and what that costs a collective.

Owns one case.  Four ranks of one machine move tensors without a pause; one of them, drawn at
random, is killed at a random moment, and the others' sockets are shut down as a launcher asks for.
A survivor that still waits after 3 s is asleep.  torch's own gloo group and the trainer's take
turns, within one run.  Then the same two, without a kill: the time of a collective.

    python -m bench.gloo_waits [--kills 10] [--pairs 11] [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from .common import BENCH, Results, rounded

RANKS, ASLEEP_S, LIMIT_S = 4, 3.0, 60.0
KINDS = ("transfer", "all_reduce", "broadcast")
NUMBERS = (20_000, 1_000_000, 8_000_000)  # of four bytes
ROUNDS = {20_000: 300, 1_000_000: 40, 8_000_000: 8}
GROUPS = ("gloo", "ours")


def rank(number: int, port: int, pipe: Any, which: str, kind: str, size: int, rounds: int) -> None:
    """Joins; moves tensors until somebody is lost, or for `rounds` rounds and tells the seconds."""
    import torch
    import torch.distributed as dist

    from holdfast.trainer import breakable
    from holdfast.trainer.engines.strategy import Layout, Place
    from holdfast.trainer.group import Group

    torch.set_num_threads(1)
    if which == "gloo":
        breakable.NAME = "gloo"
    elastic = types.SimpleNamespace(phase=lambda _: None, register_group=lambda *_: None)
    assignment = types.SimpleNamespace(rank=number, world=RANKS, store_host="127.0.0.1",
                                       store_port=port, generation=1, node="n", labels=None)
    group = Group(assignment, torch.device("cpu"), elastic)
    group.join(assignment, elastic, lambda _: Layout((Place(),) * RANKS, data=RANKS))

    def cut() -> None:
        pipe.recv()
        while True:  # as the ticker of a rank does while it has not left
            group.cut()
            time.sleep(0.1)

    def turn() -> None:
        if kind == "all_reduce":
            dist.all_reduce(tensor)
        elif kind == "broadcast":
            dist.broadcast(tensor, 0)
        elif number % 2 == 0:
            dist.send(tensor, number + 1)
            dist.recv(tensor, number + 1)
        else:
            dist.recv(tensor, number - 1)
            dist.send(tensor, number - 1)

    tensor = torch.zeros(size)
    turn()
    pipe.send("joined")
    if rounds:
        pipe.recv()
        begin = time.perf_counter()
        for _ in range(rounds):
            turn()
        pipe.send((time.perf_counter() - begin) / rounds)
        pipe.recv()
        return
    threading.Thread(target=cut, daemon=True).start()
    try:
        while True:
            turn()
    except RuntimeError:
        pipe.send("left")
        time.sleep(LIMIT_S)


class World:
    """Four ranks, ended with it."""

    def __init__(self, which: str, kind: str, size: int, rounds: int = 0) -> None:
        import torch.distributed as dist

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "holdfast.trainer.group"])
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.members: list[tuple[Any, Any]] = []
        for number in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank, daemon=True, args=(
                number, self.store.port, theirs, which, kind, size, rounds))
            process.start()
            theirs.close()
            self.members.append((process, ours))

    def __enter__(self) -> World:
        self.said(LIMIT_S)
        return self

    def said(self, limit_s: float, but: int = -1) -> list[Any]:
        """What each rank says within the limit, None for silence."""
        end_s = time.monotonic() + limit_s
        return [pipe.recv() if pipe.poll(max(0.0, end_s - time.monotonic())) else None
                for number, (_, pipe) in enumerate(self.members) if number != but]

    def tell(self, but: int = -1) -> None:
        for number, (_, pipe) in enumerate(self.members):
            if number != but:
                pipe.send("go")

    def __exit__(self, *_: object) -> None:
        for process, pipe in self.members:
            process.kill()
            process.join()
            pipe.close()


def kill(which: str, kind: str, size: int, draw: random.Random) -> int:
    """How many of the survivors are asleep."""
    with World(which, kind, size) as world:
        time.sleep(draw.uniform(0.0, 0.2))
        lost = draw.randrange(RANKS)
        world.members[lost][0].kill()
        time.sleep(draw.choice((0.0, 0.002, 0.02)))
        world.tell(but=lost)
        return world.said(ASLEEP_S, but=lost).count(None)


def time_s(which: str, kind: str, size: int) -> float:
    """Of one round, by the slowest rank."""
    with World(which, kind, size, ROUNDS[size]) as world:
        world.tell()
        return max(float(one) for one in world.said(LIMIT_S))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each size, kind and group")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="2 kills and 1 pair")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    kills, pairs = (2, 1) if options.quick else (options.kills, options.pairs)
    results, draw = Results("gloo_waits", options.out), random.Random(1)
    for kind in KINDS:
        for size in NUMBERS:
            asleep = dict.fromkeys(GROUPS, 0)
            for number in range(kills):
                for which in GROUPS[:: 1 if number % 2 else -1]:
                    asleep[which] += kill(which, kind, size, draw) > 0
            took = [{which: time_s(which, kind, size) for which in GROUPS[:: 1 if n % 2 else -1]}
                    for n in range(pairs)]
            ratio = statistics.median(one["ours"] / one["gloo"] for one in took)
            results.add({"case": kind, "bytes": 4 * size, "kills": kills,
                         "runs_with_a_sleeper": asleep, "took_s": took, "ratio": rounded(ratio)})
            print(f"{kind} of {4 * size / 1e6:g} MB: a survivor slept in {asleep['gloo']} of "
                  f"{kills} kills with torch's group, {asleep['ours']} with ours; "
                  f"time of a round {ratio:.2f} of torch's", flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
