"""Data parallel training whose gradients cross between nodes in balanced parts (SDP, SC20).

Owns one DDP communication hook.  Each full bucket is summed inside the node, cut into as many equal
parts as there are nodes, part i summed by node i, and sent back: every node moves the same bytes in
every bucket, whatever the sizes of the parameters, and sums are made in the order of ranks and
nodes, so that a restart repeats every bit.  Several buckets are in flight, each in a lane with
process groups of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..breakable import LEFT
from ..config import ConfigError
from . import topology
from .ddp import DataParallel, Hook
from .strategy import Layout, Member, MicroBatch

INSIDE, ACROSS = "inside", "across"


class Balanced(DataParallel):
    """As engines/strategy.py's Strategy: ddp, with another way for the gradients."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.in_flight = setup.config.sdp.lanes
        self.lanes: list[ThreadPoolExecutor] = []
        self.errors: list[BaseException] = []

    def lay_out(self, members: Sequence[Member]) -> Layout:
        """Ranks of one label are a node; the k-th ranks of all nodes meet across."""
        plain = super().lay_out(members)
        by_label: dict[str, list[int]] = {}
        for rank, label in enumerate(topology.labels(self.topology, members)):
            by_label.setdefault(label, []).append(rank)
        nodes = list(by_label.values())
        if len({len(ranks) for ranks in nodes}) > 1:
            raise ConfigError([
                "strategy = 'sdp': the nodes have unlike numbers of ranks ("
                + ", ".join(f"{label}: {len(ranks)}" for label, ranks in by_label.items())
                + "): start equally many on each, or set strategy = 'ddp'"])
        inside = [tuple(ranks) for ranks in nodes]
        across = [tuple(sorted(ranks)) for ranks in zip(*nodes)]
        groups = {f"{name}{lane}": made for lane in range(self.in_flight)
                  for name, made in ((INSIDE, inside), (ACROSS, across))}
        places = list(plain.places)
        for number, ranks in enumerate(nodes):
            for place, rank in enumerate(ranks):
                places[rank] = places[rank]._replace(
                    words=f"node {number + 1} of {len(nodes)}, rank {place + 1} of {len(ranks)}")
        # Each rank sends its part of every bucket to the other nodes, and their sums of it back.
        slow = 2 * (len(nodes) - 1) / len(members) * self.gradient_bytes
        words = (f"sdp: gradients in {len(nodes)} equal part(s), one for each node of "
                 f"{len(nodes[0])} ranks, {self.in_flight} bucket(s) in flight; "
                 f"{slow / 1e6:.1f} MB a rank over slow links a step")
        return plain._replace(places=tuple(places), groups=groups, alike=tuple(groups), words=words)

    def sum_hook(self, group: Any) -> Hook | None:
        # A thread each: DDP hands the buckets over in one order on all ranks, and a lane keeps it.
        self.lanes = [ThreadPoolExecutor(1, f"sdp-{lane}")
                      for lane in range(self.in_flight)]
        self.errors = []
        return lambda _, bucket: self._sum(group, bucket)

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        try:
            return super().run(micro_batches, look, skip)
        except RuntimeError:
            if self.errors:  # of which DDP says that it is no tensor
                raise self.errors[0] from None
            raise

    def _sum(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        lane = bucket.index() % len(self.lanes)
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def work() -> Tensor:
            flat = bucket.buffer()
            summed = sum_balanced(
                flat, group.parts[f"{INSIDE}{lane}"], group.parts[f"{ACROSS}{lane}"])
            return flat.copy_(summed).div_(group.world)

        def done(of: Future[Tensor]) -> None:
            """Whoever waits for the bucket is woken, whatever came of it: a lost peer is the
            group's matter, and anything else this rank's end."""
            error = RuntimeError(LEFT) if of.cancelled() else of.exception()
            if error is None:
                future.set_result(of.result())
            else:
                self.errors.append(error)
                future.set_exception(error)  # type: ignore[arg-type]  # torch: "of type T"

        self.lanes[lane].submit(work).add_done_callback(done)
        return future

    def leave(self) -> None:
        for lane in self.lanes:
            lane.shutdown(wait=True, cancel_futures=True)  # its sockets are cut: nothing blocks
        self.lanes = []
        super().leave()


def sum_balanced(flat: Tensor, inside: Any, across: Any) -> Tensor:
    """The sum of all ranks' `flat`: two hops out, two back.  Padded so that all parts are equal."""
    pieces = inside.size() * across.size()
    room = -(-flat.numel() // pieces) * pieces
    mine = torch.zeros(room, dtype=flat.dtype, device=flat.device)
    mine[: flat.numel()] = flat
    part = reduce_scatter(reduce_scatter(mine, inside), across)
    for group in (across, inside):
        whole = torch.empty(part.numel() * group.size(), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(whole, part, group=group)
        part = whole
    return part[: flat.numel()]


def reduce_scatter(tensor: Tensor, group: Any) -> Tensor:
    """This rank's part of the group's sum, added up in the order of the ranks."""
    if group.size() == 1:
        return tensor
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    first, *others = received.view(group.size(), -1)
    total: Tensor = first.clone()
    for other in others:
        total.add_(other)
    return total
