"""A healthy script whose step time varies 50-fold: no fault ever happens in it.

Slow first steps, a compile pause in a child, evaluations on rank 0 with the others in a barrier,
checkpoints on rank 0, slow reads on one rank.  Runs until it is ended, or for argv[1] steps.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from uneven import BASE_S, carry_out, pause_of  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    last = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
    dist.init_process_group("gloo")
    rank, step = dist.get_rank(), 0
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(ddp.parameters())
    while step < last:
        step += 1
        kind, seconds = pause_of(step, rank)
        carry_out(kind, seconds)
        if kind == "evaluation":
            dist.barrier()
        time.sleep(BASE_S)  # the work of an ordinary step
        ddp(torch.randn(8, 256)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
