"""A script of a test: steps over gloo until FOLDER/end is there; a rank stands still while there is
FOLDER/RANK.RESTARTS."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
halt = folder / f"{dist.get_rank()}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ended = torch.zeros(1)
while not ended.any():
    while halt.exists():
        time.sleep(0.05)
    model(torch.ones(8)).sum().backward()
    ended.fill_(float((folder / "end").exists()))
    dist.all_reduce(ended)  # all ranks end behind the same step
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
dist.destroy_process_group()
