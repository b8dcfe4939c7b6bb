"""An all-gather in two hops, for a group that spans nodes: over the slow links first, then inside.

Owns the order of the hops.  A ring over p ranks, k to a node, carries (p-1)/p of the weights from
node to node; here each rank fetches the rows of its counterparts over the slow links and its
neighbours bring the rest: (p-k)/p a node, and all its ranks send at once (MiCS, VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather


class InTwoHops(AllGather):
    """FSDP's part for set_custom_all_gather.

    `across`: a group of the ranks that hold this place on each node, in the order of nodes;
    `inside`: of this node's ranks of the group.  The group's ranks are ordered node by node.
    """

    def __init__(self, across: Any, inside: Any) -> None:
        self.across, self.inside = across, inside

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """output_tensor: [p * n], input_tensor: [n].  Done, or on the current stream, on return."""
        nodes = self.across.size()
        column = torch.empty(
            nodes * input_tensor.numel(), dtype=input_tensor.dtype, device=input_tensor.device)
        dist.all_gather_into_tensor(column, input_tensor, group=self.across)
        for row, part in zip(output_tensor.chunk(nodes), column.chunk(nodes)):
            dist.all_gather_into_tensor(row, part, group=self.inside)
