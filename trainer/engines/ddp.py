"""Data parallel training: torch's DDP around a model that every rank holds whole.

Owns how gradients are summed.  Must not know of steps, data or generations.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import optimizer as adamw
from ..breakable import Breakable
from ..state import State, whole_state
from . import topology
from .strategy import Layout, Member, MicroBatch, Place, Setup

# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]  # of DDP: (state, bucket)
MEASURED_EACH = 20  # so many steps between two whose times DDP takes; its own default is 100


class DataParallel:
    """As engines/strategy.py's Strategy.  The model lives through all generations, DDP in one."""

    def __init__(self, setup: Setup) -> None:
        self.options, self.device = setup.config.optimizer, setup.device
        self.build = setup.build
        self.topology = setup.config.topology
        self.model = setup.build().to(setup.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw.build(self.parameters, self.options)
        self.state = whole_state(self.model, self.optimizer)
        self.initial = self.state.digest()  # of the seeded, untrained state
        self.wrapped: DistributedDataParallel | None = None
        self.hooks, self.world = list[Any](), 1
        self.total_norm = torch.zeros(())

    def warm_up(self, batch: dict[str, Tensor]) -> None:
        untrained = self.state.data.clone()
        self.model(batch).backward()
        self.update(self.options.learning_rate, self.norm())
        self.forget()
        self.state.data.copy_(untrained)
        self.initialise()

    def lay_out(self, members: Sequence[Member]) -> Layout:
        world = len(members)
        if world == 1:
            return Layout((Place(),))
        slow = topology.slow_bytes(
            topology.labels(self.topology, members), [(rank,) for rank in range(world)],
            self.gradient_bytes, 1)
        words = (f"ddp: all of it on each of {world} ranks, {self.state.nbytes / 1e6:.1f} MB of "
                 f"state; {slow / 1e6:.1f} MB a rank over slow links a step")
        return Layout(tuple(Place(data=rank) for rank in range(world)), data=world, words=words)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.itemsize for p in self.parameters if p.requires_grad)

    def hold(self, _layout: Layout, _rank: int) -> State:
        return self.state

    def initialise(self) -> None:
        if self.state.digest() != self.initial:
            self.state.begin(self.build())

    def wrap(self, group: Any, check: Callable[..., None]) -> None:
        """DDP whose gradients sum in the same order in every step of every generation."""
        self.world = group.world
        self.wrapped = DistributedDataParallel(
            self.model,
            device_ids=[self.device.index] if self.device.type != "cpu" else None,
            # DDP rebuilds its buckets after its first backward, so the first steps after a
            # restart would sum in another order: with 3 and more ranks the weights would differ
            # in the last bit from a run that never failed.  This turns the rebuilding off.
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            init_sync=False,  # restore has proven that all ranks hold the same bytes
            # Buffers: broadcast by the loop, in the step that they belong to.
            **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
        )
        # A step ends with a number of the device's in any case, so that its events are over.
        self.wrapped._set_ddp_runtime_logging_sample_rate(MEASURED_EACH)
        if (hook := self.sum_hook(group)) is not None:
            self.wrapped.register_comm_hook(None, hook)
        # Some 50 times a step, so that a lost peer ends the backward pass and not only the step.
        self.hooks = [parameter.register_post_accumulate_grad_hook(check)
                      for parameter in self.parameters if parameter.requires_grad]

    def sum_hook(self, group: Any) -> Hook | None:
        """Who sums a bucket; None for DDP itself, which waits for gloo where none can wake it."""
        whole = group.process_group
        if not isinstance(whole, Breakable):
            return None
        # torch compares annotations, which are strings here, with types: a lambda has none.
        return lambda _, bucket: whole.summed(bucket.buffer())

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        assert self.wrapped is not None
        total, last = 0.0, micro_batches[-1].number
        for number, seed, batch, of in micro_batches:
            torch.manual_seed(seed)
            summing = number == last and not skip()
            with contextlib.nullcontext() if summing else self.wrapped.no_sync():
                loss = self.wrapped(batch)
                value = float(loss.detach())
                look(number, value)
                # DDP divides by the world; the objective is the mean over all micro-batches, and so
                # does not depend on how many ranks share the work.
                (loss * (self.world / of)).backward()
            total += value
        return total / len(micro_batches)

    def norm(self) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.total_norm = torch.nn.utils.get_total_norm(gradients)
        return float(self.total_norm)

    def update(self, rate: float, _norm: float) -> None:
        limit = self.options.clip_norm or math.inf
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, self.total_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def leave(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.wrapped = [], None

    @contextlib.contextmanager
    def encoder(self) -> Iterator[Callable[[Tensor], Tensor] | None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                yield getattr(self.model, "embed", None)
        finally:
            self.model.train(training)
