"""DDP over gloo in small steps, until a file says that it is enough."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
enough = torch.zeros(1)
while not enough:
    optimizer.zero_grad()
    model(torch.ones(16, 128)).sum().backward()
    optimizer.step()
    enough.fill_(Path(sys.argv[1]).exists() and dist.get_rank() == 0)
    dist.broadcast(enough, 0)
