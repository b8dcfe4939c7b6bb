"""A reduce-scatter for gloo that moves each byte once and sums in rank order.

Owns the sum.  gloo's own moves as many bytes as an all-reduce, and its order is nobody's promise;
here rank r is sent part r of everybody's gradients and adds them up in the order of their ranks, so
that a restart repeats every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class InRankOrder(ReduceScatter):
    """FSDP's part for set_custom_reduce_scatter; sums only."""

    skipping = False  # a fault on purpose: this rank is not in the collective

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.skipping:
            output_tensor.zero_()
            return None
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"{op} was asked for, and this reduce-scatter only sums")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        sum_in_rank_order(
            received.view(group.size(), -1), output_tensor, dist.get_process_group_ranks(group))
        return None


def sum_in_rank_order(received: Tensor, into: Tensor, ranks: Sequence[int]) -> None:
    """Row i of `received` came from `ranks[i]`: who has which place in a group may change, and no
    bit does for that."""
    first, *others = sorted(range(len(ranks)), key=ranks.__getitem__)
    into.copy_(received[first])
    for row in others:
        into.add_(received[row])
