"""Trains, and prints some 80 MB a second beside it."""

import sys
import time

import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
FLOOD = "a line of a loop that prints and prints and prints\n" * 40_000
for _ in range(100000):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write(FLOOD)
    time.sleep(0.02)
