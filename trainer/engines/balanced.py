"""Data parallel training whose gradients cross between nodes in balanced parts (SDP, SC20).

Owns one DDP communication hook.  Each full bucket is summed inside the node, cut into as many equal
parts as there are nodes, part i summed by node i, and sent back: every node moves the same bytes in
every bucket, whatever the sizes of the parameters, and sums are made in the order of ranks and
nodes, so that a restart repeats every bit.  Several buckets are in flight, each in a lane with
process groups of its own.  What lies on a device crosses between nodes from host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
        self.lanes: list[Lane] = []
        self.errors: list[BaseException] = []

    def lay_out(self, members: Sequence[Member]) -> Layout:
        """Ranks of one label are a node; the k-th ranks of all nodes meet across."""
        plain = super().lay_out(members)
        nodes, why = nodes_of(
            topology.labels(self.topology, members), members, topology.source(self.topology))
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
                 f"{len(nodes[0])} ranks{why}, {self.in_flight} bucket(s) in flight; "
                 f"{(self.state.nbytes + self.gradient_bytes) / 1e6:.1f} MB a rank: weights, "
                 f"gradients and moments; {slow / 1e6:.1f} MB a rank over slow links a step")
        # In the group of all ranks DDP tells which parameters were used, beside the lanes.  A rank
        # of the release before knows no other group for them, and all make the same.
        own = () if any(member.held is None for member in members) else tuple(groups)
        host = [name for name in own if name.startswith(ACROSS)]
        return plain._replace(places=tuple(places), groups=groups, alike=tuple(groups), own=own,
                              host=host, words=words)

    def through_host(self) -> bool:
        """Whether gradients cross between nodes from buffers in host memory: not if they lie there.
        """
        return self.device.type != "cpu"

    def sum_hook(self, group: Any) -> Hook | None:
        self.lanes = [Lane(number, self.device) for number in range(self.in_flight)]
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
        number = bucket.index() % len(self.lanes)
        lane, flat = self.lanes[number], bucket.buffer()
        filled = lane.take(flat)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if lane.stream is None else [self.device])

        def work() -> Tensor:
            with lane.behind(filled):
                summed = sum_balanced(
                    flat, group.parts[f"{INSIDE}{number}"], group.parts[f"{ACROSS}{number}"],
                    lane.buffer if self.through_host() else None)
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

        lane.thread.submit(work).add_done_callback(done)
        return future

    def leave(self) -> None:
        for lane in self.lanes:
            # Its sockets are cut: nothing blocks.
            lane.thread.shutdown(wait=True, cancel_futures=True)
        # Their tracebacks know the group.
        self.lanes, self.errors = [], []
        super().leave()


class Lane:
    """One bucket after the other: DDP hands them over in one order on all ranks, and a thread keeps
    it.  Where they lie on a device the thread has a stream of its own there, so that the backward
    pass goes on beside it."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.thread = ThreadPoolExecutor(1, f"sdp-{number}")
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.buffers = dict[tuple[int, torch.dtype], Tensor]()

    def buffer(self, part: Tensor) -> Tensor:
        """Host memory for what is in `part`: the same for each of its size."""
        size = part.numel(), part.dtype
        if size not in self.buffers:
            self.buffers[size] = torch.empty(
                part.numel(), dtype=part.dtype, pin_memory=part.device.type == "cuda")
        return self.buffers[size]

    def take(self, flat: Tensor) -> torch.Event | None:
        """Called where the bucket is handed over; the event is there when the device has filled it.
        """
        if self.stream is None:
            return None
        flat.record_stream(self.stream)  # whatever becomes of us, its memory is nobody else's yet
        return torch.accelerator.current_stream(flat.device).record_event()

    @contextlib.contextmanager
    def behind(self, filled: torch.Event | None) -> Iterator[None]:
        """In the lane's thread: what is done within it begins on the device when the bucket is
        filled, and is done there at the end.  So whoever is told then, from whichever stream, has
        nothing to wait for."""
        if self.stream is None or filled is None:
            yield
            return
        torch.accelerator.set_stream(self.stream)  # this thread's, and the device with it
        self.stream.wait_event(filled)
        yield
        self.stream.synchronize()


def nodes_of(
    labels: Sequence[str], members: Sequence[Member], source: str,
) -> tuple[list[list[int]], str]:
    """The ranks of each node, and why so in words, where that is to be said.  A label (whose they
    are says `source`) may stand for several nodes: one of them that is lost leaves the labels
    unlike numbers of ranks, and the nodes themselves are taken.  Raises ConfigError where these
    have unlike numbers too."""
    nodes, why = _together(labels), ""
    names = [member.node for member in members]
    if _unlike(nodes) and all(names):
        nodes = _together(names)
        why = f" (by the nodes' names: the labels of {source} have unlike numbers of ranks)"
    if _unlike(nodes):
        raise ConfigError([
            "strategy = 'sdp': the nodes have unlike numbers of ranks ("
            + ", ".join(f"{name}: {len(ranks)}" for name, ranks in nodes.items())
            + "): start equally many on each, or set strategy = 'ddp'"])
    return list(nodes.values()), why


def _together(names: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return found


def _unlike(nodes: dict[str, list[int]]) -> bool:
    return len({len(ranks) for ranks in nodes.values()}) > 1


def sum_balanced(
    flat: Tensor, inside: Any, across: Any, buffer: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The sum of all ranks' `flat`: two hops out, two back.  Padded so that all parts are equal.

    `buffer(part)`: host memory that is as large; with it the part of a node crosses from there, by
    a group of the host's, and both hops between the nodes are made on the CPUs."""
    pieces = inside.size() * across.size()
    room = -(-flat.numel() // pieces) * pieces
    mine = torch.zeros(room, dtype=flat.dtype, device=flat.device)
    mine[: flat.numel()] = flat
    part = reduce_scatter(mine, inside)
    if buffer is None:
        part = gather(reduce_scatter(part, across), across)
    elif across.size() > 1:
        there = buffer(part).copy_(part)
        part.copy_(gather(reduce_scatter(there, across), across, there))
    return gather(part, inside)[: flat.numel()]


def gather(part: Tensor, group: Any, whole: Tensor | None = None) -> Tensor:
    """The parts of all ranks in the group, in their order; into `whole` where it is given."""
    if whole is None:
        whole = torch.empty(part.numel() * group.size(), dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


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
