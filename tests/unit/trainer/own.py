"""Strategies of a user's own: `own:Plain` does what ddp does; some fail in ways of theirs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from holdfast.trainer.engines.balanced import Balanced, sum_balanced
from holdfast.trainer.engines.ddp import DataParallel
from holdfast.trainer.engines.sharded import MiCS
from holdfast.trainer.engines.strategy import Layout, Place, Proposal


class Plain(DataParallel):
    def lay_out(self, labels):
        places = tuple(Place(data=rank, words=f"mine {rank}") for rank in range(len(labels)))
        return Layout(places, data=len(labels), words=f"own: {len(labels)} ranks")


class Checked(Balanced):
    """Sums of whole numbers, which no order changes, beside torch's."""

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


class Near(MiCS):
    """Shards as mics does, under a name that nobody knows."""


class Fails(Plain):
    """Does what ddp does, and goes over to the same layout once: all but the one call that the
    settings name by method and number, in which torch is given what it cannot take."""

    def __init__(self, setup):
        super().__init__(setup)
        self.asked, options = False, setup.config.strategy_options
        goes_on, left = getattr(self, options["where"]), [options["call"]]

        def method(*given):
            left[0] -= 1
            if left[0] == 0:
                torch.nn.functional.mse_loss(torch.ones(1), None)
            return goes_on(*given)

        setattr(self, options["where"], method)

    def hold(self, layout, rank):
        self.layout = layout
        return super().hold(layout, rank)

    def said(self):
        return ""

    def kept(self):
        return None

    def proposed(self, left):
        before, self.asked = self.asked, True
        return None if before else Proposal(self.layout._replace(version=1), "as it was")

    def moves(self, before, after):
        return []

    def moved(self, layout, seconds):
        pass


class Gone:
    """Cannot be left."""

    def forget(self):
        pass

    def leave(self):
        raise RuntimeError("my mistake")


def fail(error):
    raise error


def call(function):
    return function()


def put_into_words(error):
    try:
        raise error
    except RuntimeError as lost:
        raise KeyError("my sums") from lost


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
