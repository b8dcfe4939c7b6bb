"""A plain torchrun script that prints as much as a careless one does, on both streams."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    print(f"step {step} " + "x" * 2000)
    print(f"step {step} " + "y" * 2000, file=sys.stderr, flush=True)
dist.destroy_process_group()
