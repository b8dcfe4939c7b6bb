"""A plain torch script that times collectives over gloo: it knows torch and nothing of Holdfast.

    python checks_script.py RANKS BYTES SECONDS

One line of JSON an operation: its name -> seconds of one, median and best of five blocks, the mean
over the ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BLOCKS, WARM_UP = 5, 2


def timed(once: Any, block_s: float) -> tuple[float, float]:
    """Seconds of one operation, as this rank sees it: median and best."""
    for _ in range(WARM_UP):
        once()
    dist.barrier()
    begin_s = time.perf_counter()
    once()
    repeats = torch.tensor([1 + int(block_s / max(time.perf_counter() - begin_s, 1e-7))])
    dist.all_reduce(repeats, dist.ReduceOp.MAX)
    blocks = []
    for _ in range(BLOCKS):
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(int(repeats)):
            once()
        blocks.append((time.perf_counter() - begin_s) / int(repeats))
    return statistics.median(blocks), min(blocks)


def rank_main(rank: int, ranks: int, size: int, block_s: float, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=ranks, timeout=timedelta(seconds=60))
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    other = torch.empty_like(whole)

    def sendrecv() -> None:
        both = [dist.P2POp(dist.isend, whole, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, other, (rank - 1) % ranks)]
        for one in dist.batch_isend_irecv(both):
            one.wait()

    operations = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "sendrecv": sendrecv,
    }
    for name, once in operations.items():
        took = torch.tensor(timed(once, block_s), dtype=torch.float64)
        dist.all_reduce(took)
        if rank == 0:
            print(json.dumps({name: (took / ranks).tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, size, block_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    mp.spawn(rank_main, (ranks, size, block_s, int(sys.argv[4])), nprocs=ranks)
