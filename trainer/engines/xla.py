"""Data parallel training on XLA devices: a step is two compiled graphs, ranks meet on the host.

Owns what is particular to a device that compiles what was traced: when graphs are run, that their
shapes stay, and what of the state lies on the device.  Gradients are summed over the ranks in one
place, `_summed`, in host memory: each process has a device of its own and is no part of a world
that the device's runtime knows, so that survivors of a lost rank keep process, device and graphs.

In a generation the device holds the newest weights and moments, and `state` fetches them when they
are read; between generations the host does.  Buffers are the host's: the loop keeps them equal.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .. import optimizer as adamw
from ..config import ConfigError
from ..state import moments_in, whole_state
from . import topology
from .strategy import Layout, Member, MicroBatch, Place, Setup

EPSILON = 1e-8  # AdamW's, as torch has it


class Graphs:
    """Runs what was traced so far, and knows which graphs were compiled before.

    torch_xla computes nothing before `sync`: whatever Python has gone through until then is only
    written down.  A page that moved by itself at an optimizer's step would show a device that
    hangs as a healthy one, so it moves where the device has answered.
    """

    def __init__(self) -> None:
        self.xla, self.model = import_module("torch_xla"), import_module("torch_xla.core.xla_model")
        self.native = import_module("torch_xla")._XLAC
        self.device: torch.device = self.xla.device()
        self.kind: str = import_module("torch_xla.runtime").device_type() or "CPU"
        self.phase: Callable[[str], None] | None = None
        self._known = set[bytes]()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.xla.manual_seed(seed)

    def run(self, asked: Sequence[Tensor], phase: str = "") -> None:
        """Computes these; returns when the device is done.  A graph that is new is compiled in a
        phase of its own.  `phase` is this rank's afterwards; "" leaves that to who asks."""
        graph = self.native._get_graph_hash(list(asked))
        if graph not in self._known and self.phase is not None:
            self.phase("compile")
        self.xla.sync(wait=True)
        self.model.wait_device_ops()
        self._known.add(graph)
        if phase and self.phase is not None:
            self.phase(phase)


class Feed:
    """The batches of one step, as torch_xla's loader wants them."""

    def __init__(self) -> None:
        self.batches: Sequence[dict[str, Tensor]] = ()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class DataParallel:
    """As engines/strategy.py's Strategy.  `model` is the host's, and lies in the state."""

    def __init__(self, setup: Setup) -> None:
        self.options, self.pad = setup.config.optimizer, setup.config.xla.pad
        self.topology = setup.config.topology
        self.graphs = Graphs()
        device, self.build = self.graphs.device, setup.build
        self.model = setup.build()
        self.state = whole_state(
            self.model, adamw.build(self.model.parameters(), self.options))
        self.initial = self.state.digest()
        self.state.fetch = self.fetch
        self.copy = copy.deepcopy(self.model).to(device)
        named = [(name, p) for name, p in self.copy.named_parameters() if p.requires_grad]
        if wrong := [name for name, p in named if p.dtype != torch.float32]:
            raise ConfigError([f'device = "xla": {wrong[0]} is no float32: set a model whose '
                               "parameters are"])
        self.parameters = [p for _, p in named]
        self.moments = [(torch.empty_like(p), torch.empty_like(p)) for p in self.parameters]
        self.used = self.parameters  # those that the loss depends on, known once it was computed
        self.held = [(tensor, view) for (name, p), moments in zip(named, self.moments)
                     for tensor, view in zip((p, *moments), self._views(name))]
        self.held += [(p, self.state.views[f"model.{name}"])
                      for name, p in self.copy.named_parameters() if not p.requires_grad]
        self.buffers = [dict(self.copy.named_buffers())[name]
                        for name in self.model.state_dict() if name in
                        dict(self.copy.named_buffers())]
        host = dict(self.model.named_buffers())
        self.host_buffers = [host[name] for name in self.model.state_dict() if name in host]
        self.stale = False  # the device holds newer weights than the host
        self.steps = 0
        self.shapes = dict[str, tuple[torch.Size, torch.dtype]]()
        self.feed = Feed()
        self.loader = import_module(
            "torch_xla.distributed.parallel_loader").MpDeviceLoader(self.feed, device)
        self.group: Any = None
        self.gradients = self.nothing = torch.zeros(0)

    def _views(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        moments = moments_in(self.state, name)
        return self.state.views[f"model.{name}"], moments["exp_avg"], moments["exp_avg_sq"]

    # -------------------------------------------------------------- a generation

    def warm_up(self, batch: dict[str, Tensor]) -> None:
        """Compiles both graphs of a step, which is all that steps need as long as shapes stay."""
        self._push()
        self.copy(self._on_device(self._fitted(batch))).backward()
        self.used = [p for p in self.parameters if p.grad is not None]
        self.forget()
        self.graphs.run([])
        for _ in range(2):  # the second one's weights are what an update has left on the device
            self.run([MicroBatch(0, 0, batch, 1)], lambda _number, _loss: None, lambda: False)
            self.update(self.options.learning_rate, self.norm())
        self.initialise()

    def lay_out(self, members: Sequence[Member]) -> Layout:
        world = len(members)
        kind = self.graphs.kind
        gradients = sum(p.numel() * p.itemsize for p in self.used)
        slow = topology.slow_bytes(
            topology.labels(self.topology, members), [(rank,) for rank in range(world)],
            gradients, 1)
        return Layout(
            tuple(Place(data=rank) for rank in range(world)), data=world,
            words=f"ddp on XLA devices ({kind}): all of it on each of {world} rank(s), "
                  f"{(self.state.nbytes + gradients) / 1e6:.1f} MB a rank: weights, gradients and "
                  "moments; gradients are summed in host memory; "
                  f"{slow / 1e6:.1f} MB a rank over slow links a step",
            about={"device": f"xla {kind}"})

    def hold(self, _layout: Layout, _rank: int) -> Any:
        self.fetch()
        return self.state

    def initialise(self) -> None:
        self.stale = False
        if self.state.digest() != self.initial:
            self.state.begin(self.build())

    def wrap(self, group: Any, _check: Callable[..., None]) -> None:
        self.group, self.graphs.phase = group, group.phase
        self._push()

    def leave(self) -> None:
        self.group = self.graphs.phase = None

    # -------------------------------------------------------------- host and device

    def _push(self) -> None:
        """Everything that the host holds, to the device."""
        for tensor, view in self.held:
            tensor.data = view.to(self.graphs.device)
        steps = [view for name, view in self.state.views.items() if name.startswith("adamw.step.")]
        self.steps, self.stale = int(max(steps, default=torch.zeros(()))), False
        used = sum(p.numel() for p in self.used)
        self.nothing = torch.zeros(used).to(self.graphs.device)

    def fetch(self) -> None:
        """The newest weights and moments, from the device where it has newer ones."""
        if not self.stale:
            return
        self.stale = False
        for tensor, view in self.held:
            view.copy_(tensor.detach().cpu())
        used = {id(p) for p in self.used}
        for name, parameter in self.copy.named_parameters():
            if id(parameter) in used:
                self.state.views[f"adamw.step.{name}"].fill_(self.steps)

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(self.graphs.device) for key, value in batch.items()}

    def _fitted(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch in the shapes of the first one.  Raises ConfigError for another shape."""
        if not self.shapes:
            self.shapes = {key: (value.shape, value.dtype) for key, value in batch.items()}
        if batch.keys() != self.shapes.keys():
            raise ConfigError([
                f'device = "xla": a batch has {", ".join(sorted(batch))}, and the first one had '
                f"{', '.join(sorted(self.shapes))}: set data whose batches have the same tensors"])
        return {key: self._shaped(key, value) for key, value in batch.items()}

    def _shaped(self, key: str, value: Tensor) -> Tensor:
        shape, kind = self.shapes[key]
        if (value.shape, value.dtype) == (shape, kind):
            return value
        smaller = value.dim() == len(shape) and all(
            own <= first for own, first in zip(value.shape, shape))
        if not (self.pad and smaller and value.dtype == kind):
            raise ConfigError([
                f"device = \"xla\": {key!r} of a batch is {value.dtype} {tuple(value.shape)}, and "
                f"the graphs are compiled for {kind} {tuple(shape)}: set data with batches of one "
                "shape" + ("" if self.pad else ", or xla.pad = true to fill smaller ones")])
        room = [size for own, first in zip(reversed(value.shape), reversed(shape))
                for size in (0, first - own)]
        return F.pad(value, room)

    # -------------------------------------------------------------- a step

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        device, values = self.graphs.device, list[float]()
        self.feed.batches = [self._fitted(one.batch) for one in micro_batches]
        for there, here in zip(self.buffers, self.host_buffers):
            there.data = here.to(device)
        total = self.nothing
        for (number, seed, _, of), batch in zip(micro_batches, self.loader):
            self.graphs.seed(seed)
            loss = self.copy(batch)
            loss.backward()
            # A number in a graph would make it another one; so would a tensor without dimensions.
            part = torch.tensor([1.0 / of]).to(device)
            total = total + part * torch.cat([self._gradient(p) for p in self.used])
            self.forget()
            loss = loss.detach()
            self.graphs.run([loss, total, *self.buffers], "forward_backward")
            values.append(float(loss))
            look(number, values[-1])
        for there, here in zip(self.buffers, self.host_buffers):
            here.copy_(there.detach().cpu())
        self.gradients = self._summed(total.cpu(), skip)
        return sum(values) / len(values)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        found = parameter.grad
        return (torch.zeros_like(parameter) if found is None else found).reshape(-1)

    def _summed(self, gradients: Tensor, skip: Callable[[], bool]) -> Tensor:
        """Over all ranks.  The one place that knows how: gloo, in host memory."""
        if self.group is not None and self.group.world > 1 and not skip():
            dist.all_reduce(gradients)
        return gradients

    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self.gradients))

    @torch.no_grad()
    def update(self, rate: float, norm: float) -> None:
        """AdamW as one graph.  What differs from step to step is handed over as numbers in memory,
        for numbers in a graph would make it another one."""
        options = self.options
        scale = min(1.0, options.clip_norm / (norm + 1e-6)) if options.clip_norm else 1.0
        self.steps += 1
        first, second = 1.0 - options.beta1**self.steps, 1.0 - options.beta2**self.steps
        numbers = torch.tensor([rate, scale, rate / first, math.sqrt(second)])
        decay, clip, pace, root = numbers.to(self.graphs.device)
        gradients, at, moments = self.gradients.to(self.graphs.device), 0, dict(
            zip(map(id, self.parameters), self.moments))
        changed = list[Tensor]()
        for parameter in self.used:
            gradient = gradients[at : at + parameter.numel()].view_as(parameter) * clip
            at += parameter.numel()
            mean, square = moments[id(parameter)]
            if parameter.ndim >= 2:
                parameter.mul_(1.0 - decay * options.weight_decay)
            mean.lerp_(gradient, 1.0 - options.beta1)
            square.mul_(options.beta2).addcmul_(gradient, gradient, value=1.0 - options.beta2)
            parameter.sub_(pace * mean / (square.sqrt() / root + EPSILON))
            changed += [parameter, mean, square]
        self.stale = True
        self.graphs.run(changed)

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def encoder(self) -> Iterator[Callable[[Tensor], Tensor] | None]:
        """On the host: rows of every size may come, and none of them is compiled for."""
        self.fetch()
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                yield getattr(self.model, "embed", None)
        finally:
            self.model.train(training)
