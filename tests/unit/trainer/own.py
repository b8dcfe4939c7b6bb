"""Strategies of a user's own: `own:Plain` does what ddp does, the others fail in ways of theirs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from holdfast.trainer.engines.balanced import Balanced, sum_balanced
from holdfast.trainer.engines.ddp import DataParallel
from holdfast.trainer.engines.strategy import Layout, Place


class Plain(DataParallel):
    def lay_out(self, labels):
        places = tuple(Place(data=rank, words=f"mine {rank}") for rank in range(len(labels)))
        return Layout(places, data=len(labels), words=f"own: {len(labels)} ranks")


class Checked(Balanced):
    """Sums of whole numbers, which no order changes, beside torch's; and what crosses nodes."""

    def wrap(self, group, check):
        super().wrap(group, check)
        inside, across = group.parts["inside0"], group.parts["across0"]
        for size in (1, 7, 4096, 10_001):
            mine = torch.arange(size, dtype=torch.float32) * (group.rank + 1)
            theirs = mine.clone()
            dist.all_reduce(theirs)
            if not torch.equal(sum_balanced(mine, inside, across), theirs):
                raise RuntimeError(f"not the sum of {size}")
        parts = [group.process_group, *group.parts.values()]
        if len({id(part) for part in parts}) < len(parts):
            raise RuntimeError("a lane shares a group")


class ThroughHost(Balanced):
    """Takes on processors the way that a device's gradients take: each bit of a sum as without it,
    and the same buffers in every step."""

    def through_host(self):
        return True

    def wrap(self, group, check):
        super().wrap(group, check)
        self.buffers = {}
        inside, across = group.parts["inside0"], group.parts["across0"]
        generator = torch.Generator().manual_seed(group.rank)
        for size in (1, 7, 4096, 10_001):
            mine = torch.randn(size, generator=generator)
            direct = sum_balanced(mine, inside, across)
            if not torch.equal(sum_balanced(mine, inside, across, self.lanes[0].buffer), direct):
                raise RuntimeError(f"another sum of {size}")
        self.lanes[0].buffers.clear()

    def run(self, *given):
        mean = super().run(*given)
        found = {(number, *size): buffer.data_ptr() for number, lane in enumerate(self.lanes)
                 for size, buffer in lane.buffers.items()}
        if not found or self.buffers not in ({}, found):
            raise RuntimeError(f"in the buffers {found}, and before in {self.buffers}")
        self.buffers = found
        return mean


class FailsAtOnce(DataParallel):
    def __init__(self, setup):
        raise KeyError("no such thing")


class FailsInAStep(DataParallel):
    def run(self, micro_batches, look, skip):
        raise RuntimeError("my mistake")


class Breaks(Balanced):
    """Its sums meet a mistake of the process's own, in a lane, on one rank."""

    def sum_hook(self, group):
        if group.rank == 1:
            group.parts["inside0"] = None  # AttributeError, and not what a lost peer raises
        return super().sum_hook(group)
