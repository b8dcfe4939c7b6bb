"""A plain torchrun script of which rank 1 reads its data from a file, step by step."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100000):
    if dist.get_rank() == 1:
        with open(sys.argv[1], "rb") as file:
            assert file.read() == b"data"
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(torch.ones(8))
    time.sleep(0.05)
