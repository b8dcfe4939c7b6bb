"""The reference script with Holdfast's hooks switched on and off per step; runs until ended.

Under `holdfast run` alone.  bench/overhead.py starts it, reads its lines and ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from overhead_switch import Switch  # type: ignore[import-not-found,unused-ignore]
from torch.nn.parallel import DistributedDataParallel
from workload_script import Encoder, batch_of  # type: ignore[import-not-found,unused-ignore]

from holdfast.worker import elastic  # type: ignore[import-not-found,unused-ignore]


def main() -> None:
    folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, step = dist.get_rank(), 0
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
    switch = Switch(elastic, folder / f"overhead-{rank}", pairs)
    while True:
        switch.next_step()
        ddp(batch_of(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1


if __name__ == "__main__":
    main()
