"""A stage whose state a partition group shares: gathered once a step, reduced once in two hops.

Owns both ways between a stage's whole parameters and this rank's rows of them.  Must not know of
schedules, steps or generations.  Why so: docs/decisions/013-stages-gathered-once-a-step.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..state import State, rows_of
from .reduce_scatter import sum_in_rank_order

BUCKET_BYTES = 25_000_000  # about as DDP's: what travels at once needs memory beside the stage's


class Bucket(NamedTuple):
    """Parameters whose rows lie side by side in the state: at the same bytes on every rank of a
    group, since each has room for as many rows as the first."""

    names: tuple[str, ...]
    begin: int
    end: int


class StageShards:
    """This rank's part, number `part` of `parts`, of the stage whose whole parameters these are.

    `rows` lie in the state and are what AdamW steps; the whole parameters hold for one step.
    """

    def __init__(
        self, state: State, parameters: Mapping[str, nn.Parameter], part: int, parts: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.state, self.parameters = state, dict(parameters)
        self.part, self.parts = part, parts
        self.rows = {name: nn.Parameter(state.views[name], parameter.requires_grad)
                     for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.data = torch.empty_like(parameter.data, device=state.data.device)
        self.offsets = {one.name: one.offset for one in state.entries}
        self.buckets = list(self._buckets(bucket_bytes))

    def _buckets(self, bucket_bytes: int) -> Iterator[Bucket]:
        names = list[str]()
        ends = [*(one.offset for one in self.state.entries[1:]), self.state.nbytes]
        begin = 0
        for entry, end in zip(self.state.entries, ends):
            if entry.name not in self.parameters:
                continue
            if not names:
                begin = entry.offset
            names.append(entry.name)
            if (end - begin) * self.parts >= bucket_bytes:
                yield Bucket(tuple(names), begin, end)
                names = []
        if names:
            yield Bucket(tuple(names), begin, self.state.nbytes)

    def part_of(self, whole: Tensor, number: int) -> Tensor:
        """The rows that rank `number` of the group holds; a tensor of no rows is everybody's."""
        if not whole.ndim:
            return whole
        rows = rows_of(whole.shape, number, self.parts)
        return whole[rows.first : rows.first + rows.number]

    def take(self, name: str, whole: Tensor) -> None:
        """This rank's rows of a parameter into the state."""
        self.state.views[name].copy_(self.part_of(whole, self.part))

    def gather(self, group: Any) -> None:
        """The whole parameters, as the rows of all ranks of the group now are."""
        for bucket in self.buckets:
            mine = self.state.data[bucket.begin : bucket.end]
            found = [torch.empty_like(mine) for _ in range(self.parts)]
            dist.all_gather(found, mine, group=group)
            for name in bucket.names:
                place, whole = self.offsets[name] - bucket.begin, self.parameters[name].data
                for number, sent in enumerate(found):
                    target = self.part_of(whole, number)
                    nbytes = target.numel() * target.element_size()
                    target.copy_(sent[place : place + nbytes].view(whole.dtype).view_as(target))

    def reduce(self, group: Any, copies: Any) -> None:
        """Sums the gradients over the group, each rank its rows, and these over the ranks of other
        groups that hold the same.  The whole gradients are dropped as they go."""
        for bucket in self.buckets:
            # Without a gradient here, a parameter is without one on every rank of its stage.
            names = [name for name in bucket.names if self.parameters[name].grad is not None]
            if not names:
                continue
            pieces = [[self.part_of(_gradient(self.parameters[name]), number).reshape(-1)
                       for name in names] for number in range(self.parts)]
            counts = [sum(piece.numel() for piece in one) for one in pieces]
            sent = torch.cat([piece for one in pieces for piece in one])
            mine = counts[self.part]
            received = sent.new_empty(self.parts, mine)
            dist.all_to_all_single(
                received.view(-1), sent, [mine] * self.parts, counts, group=group)
            summed = sent.new_empty(mine)
            sum_in_rank_order(received, summed, dist.get_process_group_ranks(group))
            if copies is not None and mine:
                dist.all_reduce(summed, group=copies)
            sizes = [self.rows[name].numel() for name in names]
            for name, gradient in zip(names, summed.split(sizes)):
                self.rows[name].grad = gradient.view_as(self.rows[name]).to(self.rows[name].dtype)
                self.parameters[name].grad = None

    def counted(self) -> dict[str, Tensor]:
        """Gradients whose norms are this rank's to tell: what all hold alike is the first's."""
        return {name: rows.grad for name, rows in self.rows.items()
                if rows.grad is not None and (rows.ndim or not self.part)}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
