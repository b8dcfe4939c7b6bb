"""A chain of equal blocks that wait instead of compute, so that a rank can be slow on any machine.

Owns the operation that waits: as many seconds as its block takes, times what a file says of this
rank: `{"1": 2.5}`.  A rank is slow by waiting and never by competing for processors.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

BACKWARD = 2.0  # as the cost table has it


def times(path):
    """How much longer this rank takes than others, now."""
    try:
        slow = json.loads(Path(path).read_text())
    except (OSError, ValueError):  # nobody is slow; or the file is being written
        return 1.0
    return float(slow.get(str(dist.get_rank() if dist.is_initialized() else 0), 1.0))


@torch.library.custom_op("slowed::wait", mutates_args=())
def wait(given: torch.Tensor, seconds: float, path: str) -> torch.Tensor:
    time.sleep(seconds * times(path))
    return given.clone()


@wait.register_fake
def _(given, seconds, path):
    return torch.empty_like(given)


def _keep(ctx, inputs, output):
    _, ctx.seconds, ctx.path = inputs


def _back(ctx, gradient):
    time.sleep(BACKWARD * ctx.seconds * times(ctx.path))
    return gradient, None, None


wait.register_autograd(_back, setup_context=_keep)


class Block(nn.Module):
    """One piece of the cost table, whose whole time is the wait."""

    def __init__(self, width, seconds, path):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.seconds, self.path = seconds, path

    def forward(self, given):
        made = nn.functional.dropout(torch.tanh(given @ self.weight), 0.1, self.training)
        return given + wait(made, self.seconds, self.path)


class Model(nn.Module):
    """`blocks` alike; with dropout, which must not follow from where it is cut."""

    def __init__(self, options):
        super().__init__()
        width = options.get("width", 16)
        seconds, path = options.get("seconds", 0.003), options.get("slow", "")
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            Block(width, seconds, path) for _ in range(options.get("blocks", 12)))
        self.last = nn.Linear(width, 1)

    def forward(self, batch):
        hidden = self.first(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(self.last(hidden), batch["y"])
