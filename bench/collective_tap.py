"""What timing the collectives costs: of a call, and of a step of FSDP2, on and off in one run.

Owns the switch: the methods of torch's process group and of its work, tapped and as they were.
`call_open` and `call_closed` (in a window, and between two) are one gloo rank alone, blocks of
calls in turns; `step_open` and `step_closed` two ranks that train a small model under FSDP2, blocks
of steps in turns, alike on both.  Processor time of the calling thread: what the tap costs is spent
there, and nothing else of a busy machine is in it.

    python -m bench.collective_tap [--blocks 200] [--step-blocks 200]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from . import common
from .common import BENCH, Results

BLOCK_CALLS = 200
WAYS = ("open", "closed", "plain")
RANKS, WARM_BLOCKS, BLOCK_STEPS = 2, 3, 5
LAYERS, WIDTH, BATCH = 8, 128, 64


class Switch:
    """Every method that the tap replaces, both ways."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from holdfast.worker import page as pages
        from holdfast.worker.rank import collectives

        names = [(dist.ProcessGroup, name) for name in collectives.METHODS
                 if name in vars(dist.ProcessGroup)]
        self.places = [*names, (dist.Work, "wait")]
        self.plain = [vars(owner)[name] for owner, name in self.places]
        self.tap = collectives.Tap([0] * pages.FIELDS)  # type: ignore[arg-type]
        self.tap.each_beat()
        self.tapped = [vars(owner)[name] for owner, name in self.places]
        assert all(a is not b for a, b in zip(self.plain, self.tapped, strict=True))

    def turn(self, on: bool, is_open: bool = True) -> None:
        self.tap.is_open[0] = is_open
        for (owner, name), method in zip(self.places, self.tapped if on else self.plain,
                                         strict=True):
            setattr(owner, name, method)


def join(rank: int, world: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=world)


def calls(_: int, port: int, blocks: int, pipe: Any) -> None:
    """Sends the nanoseconds of a call, in a window, between two, and untapped, by blocks."""
    import torch
    import torch.distributed as dist

    join(0, 1, port)
    switch, number, found = Switch(), torch.ones(16), []
    for block in range(blocks + 1):
        took = {}
        for way in random.Random(block).sample(WAYS, 3):
            switch.turn(way != "plain", way == "open")
            began = time.thread_time_ns()
            for _ in range(BLOCK_CALLS):
                dist.all_reduce(number)
            took[way] = (time.thread_time_ns() - began) / BLOCK_CALLS
        found.append(tuple(took[way] for way in WAYS))
    pipe.send(found[1:])
    dist.destroy_process_group()


def steps(rank: int, port: int, blocks: int, pipe: Any) -> None:
    """Sends the main thread's nanoseconds of a step, in a window, between two, and untapped, by
    blocks; and how many calls a step has."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    join(rank, RANKS, port)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    switch, data, found = Switch(), torch.randn(BATCH, WIDTH), []
    for block in range(WARM_BLOCKS + blocks):
        took = {}
        for way in random.Random(block).sample(WAYS, 3):
            switch.turn(way != "plain", way == "open")
            began = time.thread_time_ns()
            for _ in range(BLOCK_STEPS):
                model(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            took[way] = (time.thread_time_ns() - began) / BLOCK_STEPS
        found.append(tuple(took[way] for way in WAYS))
    made = sum(row[0] for row in switch.tap.rows.values()) / (WARM_BLOCKS + blocks) / BLOCK_STEPS
    pipe.send((found[WARM_BLOCKS:], made))
    dist.destroy_process_group()


def ranks(function: Any, world: int, count: int) -> list[Any]:
    """What each rank sends."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(False) for _ in range(world)]
    processes = [context.Process(target=function, args=(rank, port, count, there))
                 for rank, (_, there) in enumerate(pipes)]
    try:
        for process, (_, there) in zip(processes, pipes, strict=True):
            process.start()
            there.close()
        return [here.recv() for here, _ in pipes]
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()


def compared(found: list[tuple[float, float]]) -> dict[str, Any]:
    differences = [on - off for on, off in found]
    off = statistics.fmean(b for _, b in found)
    low, high = common.bootstrap(differences)
    return {
        "pairs": len(found), "off_us": round(off / 1e3, 3),
        "more_us": round(statistics.fmean(differences) / 1e3, 3),
        "low_us": round(low / 1e3, 3), "high_us": round(high / 1e3, 3),
        "median_us": round(statistics.median(differences) / 1e3, 3),
        "percent": round(100 * statistics.fmean(differences) / off, 3),
        "median_percent": round(100 * statistics.median(differences) / off, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--step-blocks", type=int, default=200)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    results = Results("collective_tap", options.out)
    (of_calls,) = ranks(calls, 1, options.blocks)
    (of_steps, made), *_ = ranks(steps, RANKS, options.step_blocks)
    for case, blocks in (("call", of_calls), ("step", of_steps)):
        for number, way in enumerate(WAYS[:2]):
            row = {"case": f"{case}_{way}", "ok": True, "calls_a_step": made,
                   **compared([(block[number], block[2]) for block in blocks])}
            results.add(row)
            print(row)


if __name__ == "__main__":
    main()
