"""Fully sharded training on torch's FSDP2: over all ranks, or over groups of near ones (MiCS).

Owns who holds which rows, how gradients are summed in two hops, and the step of a shard.  Must not
know of steps, data or generations.  AdamW works on the rows alone: plain tensors in the state's
buffer, which FSDP reads as its shards.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from .. import optimizer as adamw
from ..config import ConfigError, FsdpOptions, MicsOptions
from ..state import Rows, Spec, State, class_of, moments_in, persistent_buffers, rows_of, specs_of
from . import memory, topology
from .hierarchical import InTwoHops
from .outline import kept_for_backward, outlined
from .reduce_scatter import InRankOrder
from .strategy import Layout, Member, MicroBatch, Place, Setup

REPLICATE, SHARD = "replicate", "shard"
ACROSS, INSIDE = "across", "inside"  # the two hops of an all-gather over nodes
CUT = ("model.", "adamw.exp_avg.", "adamw.exp_avg_sq.")


class Sharded:
    """As engines/strategy.py's Strategy.  Rows and moments live through all generations while this
    process keeps its shard; FSDP's modules live in one."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config, self.device = setup, setup.config, setup.device
        self.skeleton = model = outlined(setup.build)
        self.specs, self.model_class = specs_of(model), class_of(model)
        self.names = [name for name, _ in model.named_parameters()]
        self.units = units_of(model)
        check_shapes(model, self.units)
        self.need = memory.Need.of(model, self.units)
        self.state: State | None = None
        self.held = (-1, 0)  # shard, shards
        self.rows = dict[str, nn.Parameter]()
        self.optimizer: torch.optim.Optimizer | None = None
        self.model: Any = None
        self.sharded, self.world = dict[str, nn.Parameter](), 1
        self.group: Any = None
        self.reduce_scatter = InRankOrder()

    def warm_up(self, batch: dict[str, Tensor]) -> None:
        self.need = self.need.with_activations(
            kept_for_backward(self.skeleton, batch, self.device))

    # -------------------------------------------------------------------------- who holds what

    @property
    def options(self) -> FsdpOptions | MicsOptions:
        """The strategy's own table of settings."""
        raise NotImplementedError

    def group_size(self, _members: Sequence[Member]) -> tuple[int, str]:
        """Ranks that share one copy of the state, and why so many."""
        raise NotImplementedError

    def lay_out(self, members: Sequence[Member]) -> Layout:
        world = len(members)
        size, why = self.group_size(members)
        if world % size:
            raise ConfigError([
                f"{self.config.strategy}.group = {size} does not divide the world of {world} "
                f"ranks: set one of {', '.join(map(str, topology.divisors(world)))}"])
        given = self.config.topology
        labels, where = topology.labels(given, members), topology.places(given, members)
        partitions = topology.apart(topology.near_first(where, size), members, shards=size)
        places = [Place()] * world
        for number, ranks in enumerate(partitions):
            for shard, rank in enumerate(ranks):
                words = f"shard {shard + 1} of {size}"
                more = f", partition group {number + 1}" if len(partitions) > 1 else ""
                places[rank] = Place(shard, rank, words + more)
        copies = [tuple(sorted(ranks[shard] for ranks in partitions)) for shard in range(size)]
        micro_steps = -(-(self.config.micro_batches or world) // world)
        near = topology.ranks_a_hop(given, members, partitions) if self.options.hierarchical else 1
        slow = topology.slow_bytes(
            labels, partitions, self.need.weights, micro_steps, near=near)
        groups = {SHARD: partitions, REPLICATE: copies}
        hops = ""
        if near > 1:
            groups[ACROSS] = [ranks[place::near] for ranks in partitions for place in range(near)]
            groups[INSIDE] = [ranks[first : first + near] for ranks in partitions
                              for first in range(0, size, near)]
            hops = f"gathered in two hops, {size // near} places of {near} ranks a group; "
        words = (
            f"{self.config.strategy}: {len(partitions)} group(s) of {size} of {world} ranks "
            f"({why}); {self.need.words(size)}; {hops}{slow / 1e6:.1f} MB a rank over slow links "
            f"a step{topology.exposed(copies, members)}")
        return Layout(tuple(places), size, world, groups, tuple(groups), words)

    def hold(self, layout: Layout, rank: int) -> State:
        shard = layout.places[rank].shard
        if self.state is not None and self.held == (shard, layout.shards):
            return self.state

        def cut(name: str, spec: Spec) -> Rows | None:
            start = next((start for start in CUT if name.startswith(start)), None)
            parameter = start is not None and name[len(start) :] in self.rows_wanted
            return rows_of(spec.shape, shard, layout.shards) if parameter else None

        self.forget()
        self.state = state = State(self.specs, self.device, self.model_class, cut)
        self.held = (shard, layout.shards)
        wanted = dict(self.skeleton.named_parameters())
        self.rows = {name: nn.Parameter(state.views[f"model.{name}"], wanted[name].requires_grad)
                     for name in self.names}
        self.optimizer = adamw.build(self.rows.values(), self.config.optimizer)
        for name, rows in self.rows.items():
            self.optimizer.state[rows] = moments_in(state, name)
        state.buffers = [state.views[f"model.{name}"]
                         for name in persistent_buffers(self.skeleton)]
        return state

    @property
    def rows_wanted(self) -> frozenset[str]:
        return frozenset(self.names)

    def initialise(self) -> None:
        """Builds the whole model once more, in host memory, and takes the rows of it."""
        assert self.state is not None
        model = self.setup.build()
        self.state.data.zero_()
        for name, tensor in (*model.named_parameters(), *persistent_buffers(model).items()):
            view = self.state.views[f"model.{name}"]
            if name in self.rows and tensor.ndim:
                rows = rows_of(tensor.shape, *self.held)
                tensor = tensor.detach()[rows.first : rows.first + rows.number]
            view.copy_(tensor.detach())

    # -------------------------------------------------------------------------- one generation

    def wrap(self, group: Any, check: Callable[..., None]) -> None:
        assert self.state is not None
        self.group, self.world = group, group.world
        model: Any = copy.deepcopy(self.skeleton)
        self.model = model
        kept = persistent_buffers(model)
        for name, buffer in model.named_buffers():
            buffer.data = self.state.views[f"model.{name}"] if name in kept else buffer.to(
                self.device)
        mesh = DeviceMesh.from_group(
            [group.parts[REPLICATE], group.parts[SHARD]], self.device.type,
            mesh=torch.tensor(group.layout.groups[SHARD]), mesh_dim_names=(REPLICATE, SHARD))
        if len(group.copies) == 1:
            mesh = mesh[SHARD]
        modules = dict(model.named_modules())
        for unit in (*self.units, ""):
            fully_shard(modules[unit], mesh=mesh)
        self.use_rows()
        if hasattr(model, "embed"):
            register_fsdp_forward_method(model, "embed")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Each loss is weighted, so the sums need no division.  Both hold for one module.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if ACROSS in group.parts:
                    module.set_custom_all_gather(
                        InTwoHops(group.parts[ACROSS], group.parts[INSIDE]))
                if self.device.type == "cpu":
                    module.set_custom_reduce_scatter(self.reduce_scatter)
        # A branch that only some ranks take would leave the others waiting.
        model.set_reduce_scatter_unused_params(True)
        self.sharded = dict(model.named_parameters())
        for parameter in self.sharded.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(check)

    def use_rows(self) -> None:
        """Lets FSDP's shards be the rows in the state's buffer, without a copy."""
        assert self.state is not None
        entries = {entry.name: entry for entry in self.state.entries}
        places = {id(module): name for name, module in self.model.named_modules()}
        infos = []
        for module in self.model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    # FSDP pads a short last shard by a copy, unless its flat tensor lies in the
                    # same storage: the state has room for the padding.
                    info = one._module_info
                    infos.append(info)
                    prefix = places[id(info.module)]
                    name = f"{prefix}.{info.param_name}" if prefix else info.param_name
                    entry = entries[f"model.{name}"]
                    room = one.padded_sharded_param_size.numel() * one.sharded_param.itemsize
                    one._sharded_param_data = self.state.room(entry, room)
        shards = {}
        for name, parameter in self.model.named_parameters():
            shards[name] = DTensor.from_local(
                self.rows[name].detach(), parameter.device_mesh, parameter.placements,
                run_check=False, shape=parameter.shape, stride=parameter.stride())
        self.model.load_state_dict(shards, strict=False, assign=True)
        for info in infos:  # a weight under two names in one unit stays one
            for module, name in zip(info.shared_modules, info.shared_param_names):
                setattr(module, name, getattr(info.module, info.param_name))

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        of, total = micro_batches[0].of, 0.0
        # Every rank of a group is in every collective: who has one micro-batch fewer repeats its
        # last one with weight 0.
        passes = -(-of // self.world)
        for turn in range(passes):
            number, seed, batch, _ = micro_batches[min(turn, len(micro_batches) - 1)]
            counts = turn < len(micro_batches)
            torch.manual_seed(seed)
            self.model.set_requires_all_reduce(turn == passes - 1)
            loss = self.model(batch)
            if counts:
                value = float(loss.detach())
                look(number, value)
                total += value
            self.reduce_scatter.skipping = turn == passes - 1 and skip()
            (loss * (counts / of)).backward()
        self.reduce_scatter.skipping = False
        with torch.no_grad():
            for name, parameter in self.sharded.items():
                gradient: Any = parameter.grad
                self.rows[name].grad = None if gradient is None else gradient.to_local()
        return total / len(micro_batches)

    def norm(self) -> float:
        """From one holder of each shard, in their order: the same number on every rank."""
        gradients = [rows.grad for rows in self.rows.values() if rows.grad is not None]
        mine = torch.nn.utils.get_total_norm(gradients).double().reshape(1).to(self.device)
        found = self.group.gather(mine)
        layout = self.group.layout
        return math.sqrt(sum(
            float(found[layout.holders(shard)[0]]) ** 2 for shard in range(layout.shards)))

    def update(self, rate: float, norm: float) -> None:
        assert self.optimizer is not None
        limit = self.config.optimizer.clip_norm or math.inf
        torch.nn.utils.clip_grads_with_norm_(
            self.rows.values(), limit, torch.tensor(norm, device=self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def forget(self) -> None:
        for rows in self.rows.values():
            rows.grad = None
        for parameter in self.sharded.values():
            parameter.grad = None

    def leave(self) -> None:
        self.model, self.sharded, self.group = None, {}, None

    @contextlib.contextmanager
    def encoder(self) -> Iterator[Callable[[Tensor], Tensor] | None]:
        self.model.eval()
        try:
            with torch.no_grad():  # what inference mode makes, FSDP could not use again
                yield getattr(self.model, "embed", None)
        finally:
            self.model.train()
            self.model.reshard()


class FullySharded(Sharded):
    """One group of all ranks; or of `fsdp.group`, which torch calls HSDP."""

    @property
    def options(self) -> FsdpOptions:
        return self.config.fsdp

    def group_size(self, members: Sequence[Member]) -> tuple[int, str]:
        size = self.options.group
        return (size, "fsdp.group") if size else (len(members), "all ranks")


class MiCS(Sharded):
    """The smallest groups in which the state fits, of near ranks."""

    @property
    def options(self) -> MicsOptions:
        return self.config.mics

    def group_size(self, members: Sequence[Member]) -> tuple[int, str]:
        group = self.options.group
        if group != "auto":
            return int(group), "mics.group"
        room = self.options.memory_gb * 1e9 or min(m.memory_bytes for m in members)
        sizes = topology.divisors(len(members))
        for size in sizes:
            if self.need.bytes(size) <= room:
                return size, f"the smallest that fits into {room / 1e9:.2f} GB"
        raise ConfigError([
            f"mics.group = 'auto': even groups of {sizes[-1]} need "
            f"{self.need.bytes(sizes[-1]) / 1e9:.2f} GB a rank, and there are {room / 1e9:.2f}: "
            "start more ranks, set a smaller model or batch, or mics.memory_gb"])


# ------------------------------------------------------------------------------------ the model


def units_of(model: nn.Module) -> list[str]:
    """Modules that are gathered one at a time: the members of each outermost ModuleList."""
    units: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(
                name.startswith(f"{unit}.") for unit in units):
            units += [f"{name}.{number}" if name else str(number)
                      for number, child in enumerate(module)
                      if any(True for _ in child.parameters())]
    return units


def check_shapes(model: nn.Module, units: Sequence[str]) -> None:
    """Raises ConfigError for what FSDP cannot cut, with the parameter's name."""
    problems, seen = [], dict[int, tuple[str, str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        other, before = seen.setdefault(id(parameter), (name, unit))
        if parameter.ndim == 0:
            problems.append(f"parameter {name} is a scalar, which has no rows to share: "
                            "give it the shape [1], or set strategy = ddp")
        if before != unit:
            problems.append(f"parameter {name} is also {other}, and the two are gathered apart "
                            f"({unit or 'the root'}, {before or 'the root'}): set strategy = ddp, "
                            "or put both into one member of a ModuleList")
    if problems:
        raise ConfigError(problems)
