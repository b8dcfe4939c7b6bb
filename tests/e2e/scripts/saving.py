"""A plain torchrun script that checkpoints itself every third step, nothing of Holdfast."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
start = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
print(f"from {start} rank {rank}", flush=True)
for step in range(start, steps):
    generator = torch.Generator().manual_seed(step * 2 + rank)
    loss = model(torch.randn(8, 32, generator=generator)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 3 == 2:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, path + ".new")
        os.rename(path + ".new", path)
    time.sleep(0.05)
    print(f"step {step} rank {rank}", flush=True)
print(f"weights {model.module.weight.double().sum().item():.17g}", flush=True)
dist.destroy_process_group()
