"""Pipeline parallel training: the model cut into stages, micro-batches in flight between them.

Owns the cut, the schedule of one generation and who holds which stage.  Tracing, stages and both
schedules (GPipe is "simple", 1F1B "interleaved") are torch.distributed.pipelining's; the plan is
engines/partition.py's, a stage that several ranks share engines/stage_shards.py's.  Must not know
of steps, data or generations.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.export._trace  # torch.export's first call imports it: 1.3 s, here before the fork
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, pipeline

from .. import optimizer as adamw
from ..config import ConfigError
from ..state import Rows, Spec, State, class_of, moments_in, persistent_buffers, rows_of, specs_of
from . import topology, trace
from .balance import SLOW, Balance, Measured
from .outline import fill, hollow
from .partition import Costs, NoPlan, Piece, Stage, Terms, judged, plan
from .stage_shards import BUCKET_BYTES, StageShards
from .strategy import Layout, Member, MicroBatch, Move, Place, Proposal, Ranks, Setup, of_memory

LINK_BYTES_S = 1e9  # between two stages, beside what engines/trace.py takes a device for
INSIDE = "model"  # the user's model within what is traced: names begin as in State


class Inputs(nn.Module):
    """The model as a function of tensors alone, with a loss that has a dimension."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        # Cloned: what a later stage reads is then the first one's to send, as any other value.
        batch = {name: one.clone() for name, one in zip(self.names, tensors)}
        loss: Tensor = self.model(batch)
        return loss.reshape(1)


class Holding(NamedTuple):
    """What this process has of the state, as the model was cut once."""

    held: tuple[int, int]  # shard, shards
    state: State
    parameters: dict[str, nn.Parameter]  # of its stage
    rows: dict[str, nn.Parameter]  # what it steps: the parameters, or its part of them
    optimizer: torch.optim.Optimizer
    shards: StageShards | None


class Pipeline:
    """As engines/strategy.py's Strategy and Movable.

    `rows` are what this rank keeps and steps: its stage's parameters, or its part of them.
    """

    bucket_bytes = BUCKET_BYTES

    def __init__(self, setup: Setup) -> None:
        self.setup, self.device = setup, setup.device
        self.options, self.optimizer_options = setup.config.pipeline, setup.config.optimizer
        model = setup.build()
        if found := persistent_buffers(model):
            raise ConfigError([
                f"strategy = 'pipeline': {class_of(model)} has the buffer {next(iter(found))!r}, "
                "which a stage cannot keep equal: set strategy = 'ddp', or a model without"])
        self.specs, self.model_class = specs_of(model), class_of(model)
        self.places = {f"{INSIDE}.{name}": place
                       for place, (name, _) in enumerate(model.named_parameters())}
        self.pipes: dict[tuple[int, ...], Any] = {}  # torch's, by cuts
        self.pipe: Any = None
        self.pieces: list[Piece] = []
        self.home: tuple[int, ...] = ()  # the cuts of the plan
        self.plans: dict[int, tuple[int, ...]] = {}  # those for ranks of any memory, by stages
        self.source: tuple[int, tuple[int, ...]] | None = None  # version and cuts before others
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.stage, self.held = -1, (-1, 0)  # shard, shards
        self.holdings: dict[tuple[int, tuple[int, ...]], Holding] = {}  # by version and cuts
        self.state: State | None = None
        self.shards: StageShards | None = None
        self.schedules: dict[int, Any] = {}
        self.group: Any = None
        self.balance: Balance | None = None
        self.measured: Measured | None = None
        self.trace_s, self.computed_s, self.took = 0.0, 0.0, list[float]()

    # ------------------------------------------------------------------------------ the cut

    def warm_up(self, batch: dict[str, Tensor]) -> None:
        """Traces the model and cuts it.  Raises ConfigError for a model that cannot be."""
        self.model = self.setup.build().to(self.device)
        self.shapes = {name: tuple(one.shape) for name, one in batch.items()}
        _reject_tied(self.model, self.options.stages)
        self.batch = {name: torch.zeros_like(one) for name, one in batch.items()}
        self._trace(None)
        self.plans[self.options.stages] = self.home
        self._use(self.home)
        hollow(self.model.parameters())

    def _use(self, cuts: tuple[int, ...]) -> None:
        if cuts not in self.pipes:
            self._trace(cuts)
        self.pipe = self.pipes[cuts]

    def _trace(self, cuts: tuple[int, ...] | None) -> None:
        """Makes torch's pipe for these cuts, or for the plan's own.  The parameters are the same
        objects in each."""
        problems, began = list[ConfigError](), time.monotonic()
        fill(self.model.parameters())  # that has none: tracing looks at shapes, and reads nothing

        def cut(graph_module: Any) -> Any:
            try:
                return self._cut(graph_module, cuts)
            except ConfigError as error:
                problems.append(error)
                raise

        try:
            with warnings.catch_warnings():  # torch's own, about itself
                warnings.simplefilter("ignore")
                pipe = pipeline(Inputs(self.model, list(self.batch)), tuple(self.batch.values()),
                                split_policy=cut)
            self.pipes[self.home if cuts is None else cuts] = pipe
        except Exception as error:  # whatever torch meets in a user's model
            if problems:
                raise problems[0] from None
            if found := of_memory(error):
                raise found from None  # like any other failure: it may be there next time
            raise ConfigError([
                f"strategy = 'pipeline': {self.model_class} cannot be traced: "
                f"{trace.root_of(error)}; take what depends on values out of its forward, or set "
                "strategy = 'ddp'"
            ]) from error
        self.trace_s = time.monotonic() - began

    def _cut(self, graph_module: Any, cuts: tuple[int, ...] | None) -> Any:
        found = trace.read(graph_module, self.model, INSIDE, self.options.group)
        self.terms = terms = Terms(
            self.options.stages, max(self.setup.config.micro_batches, 1), self.options.schedule,
            self.options.optimize, LINK_BYTES_S)
        if cuts is None:
            try:
                cuts = self.home = plan(found.pieces, terms).cuts
            except NoPlan as error:
                raise ConfigError([f"strategy = 'pipeline': {error}"]) from None
        self.pieces = found.pieces
        for number in cuts:
            with graph_module.graph.inserting_before(found.begins[number]):
                graph_module.graph.call_function(torch.ops.pippy._pipe_split.default, (), {})
        trace.seeded(graph_module)
        trace.relay(graph_module, [found.begins[number] for number in cuts])
        graph_module.recompile()
        return graph_module

    # ------------------------------------------------------------------------------ who does what

    def lay_out(self, members: Sequence[Member]) -> Layout:
        """Ranks side by side are the stages of one pipeline; ranks of one stage are copies, or
        share a copy in groups of near ones."""
        self.members, told = list(members), [json.loads(one.said) for one in members if one.said]
        held = [{(version, tuple(cuts)) for version, cuts in one["held"]}
                for one in told if one["held"]]
        stages = self._stages(len(members))
        if not held:
            self._reject_too_few()
        self.home = self._home(stages, len(members) // stages, begins=not held)
        # The newest cuts that all have who have any: nobody steps under newer ones before all do.
        version, cuts = max(set.intersection(*held) or set.union(*held)) if held else (0, self.home)
        self.source = None
        if len(cuts) + 1 != stages:  # another world than the one before
            self.source, version, cuts = (version, cuts), version + 1, self.home
        self.cost_s = max((one["trace_s"] for one in told), default=0.0)
        known = [one["measured"] for one in told if one["measured"] and one["held"]]
        self.measured = Measured(*map(tuple, max(known))) if known else None
        return self._laid_out(version, cuts)

    def _stages(self, world: int) -> int:
        """In this world.  Raises ConfigError for one that cannot be laid out."""
        options = self.options
        if found := options.stages_of(world, self.setup.config.micro_batches):
            return found
        copies, left = divmod(world, options.stages)
        if left:
            fewer = f", nor does any down to pipeline.fewest = {options.fewest}" * (
                0 < options.fewest < options.stages)
            raise ConfigError([
                f"pipeline.stages = {options.stages} does not divide {world} ranks{fewer}: set one "
                f"of {', '.join(map(str, topology.divisors(world)))}"])
        raise ConfigError([
            f"pipeline.group = {options.group} does not divide the {copies} ranks of a stage: set "
            f"one of {', '.join(map(str, topology.divisors(copies)))}"])

    def _reject_too_few(self) -> None:
        """Raises ConfigError where the fewest stages need more memory than there is."""
        options = self.options
        try:
            if options.fewest:
                self._home(options.fewest, options.group, begins=True)
        except ConfigError as error:
            raise ConfigError([f"pipeline.fewest = {options.fewest}: {error}"]) from None

    def _home(self, count: int, copies: int, begins: bool) -> tuple[int, ...]:
        """The plan's cuts into so many stages for the memory of these ranks.  Where a run `begins`,
        raises ConfigError if there are none."""
        room = min(one.memory_bytes for one in self.members) or math.inf
        terms = self._terms(count, copies)
        if count not in self.plans:
            self.plans[count] = plan(self.pieces, self.terms._replace(stages=count)).cuts
        traced = self.plans[count]
        stages = Costs(self.pieces, terms).stages(traced)
        most = max(stages, key=lambda stage: stage.memory_bytes)
        if most.memory_bytes <= room:
            return traced
        try:
            return plan(self.pieces, terms._replace(memory_bytes=room)).cuts
        except NoPlan as error:
            if not begins:
                return traced
            names = (self.pieces[most.first].name, self.pieces[most.end - 1].name)
            raise ConfigError([
                f"strategy = 'pipeline': stage {stages.index(most) + 1} of {len(stages)} "
                f"({names[0]} to {names[1]}) needs {most.memory_bytes / 1e6:.0f} MB a rank, and "
                f"there are {room / 1e6:.0f}: {error}"]) from None

    def _laid_out(self, version: int, cuts: tuple[int, ...]) -> Layout:
        """Traces nothing: `hold` does, where a going over has a phase for it and may be left."""
        members = self.members
        world, stages, size = len(members), len(cuts) + 1, self.options.group
        copies = world // stages
        terms = self._terms(stages, copies)
        chosen = judged(Costs(self.pieces, terms).stages(cuts), terms)
        pipelines = [tuple(range(n * stages, (n + 1) * stages)) for n in range(copies)]
        of_stage = [tuple(range(stage, world, stages)) for stage in range(stages)]
        words = [f"stage {rank % stages + 1} of {stages}, pipeline {rank // stages + 1}"
                 for rank in range(world)]
        about = chosen.describe(self.pieces)
        fewer = "" if stages == self.options.stages else (
            f"; pipeline.stages = {self.options.stages}"
            + f" times pipeline.group = {self.options.group}" * (self.options.group > 1)
            + f" does not divide {world} ranks")
        groups, slow_bytes = self._near(of_stage, chosen.stages, terms.micro_batches)
        slow = f"{slow_bytes / 1e6:.1f} MB a rank over slow links a step"
        if size == 1:
            places = tuple(Place(rank % stages, rank // stages, words[rank])
                           for rank in range(world))
            return Layout(places, stages, copies, {"pipeline": pipelines, "copies": of_stage},
                          words=f"{chosen.words()}{fewer}; {slow}"
                                f"{topology.exposed(of_stage, members)}",
                          about=about, cuts=cuts, version=version)
        shards, more = dict[int, int](), dict[int, str]()
        for number, ranks in enumerate(groups):
            stage, group = divmod(number, copies // size)
            for part, rank in enumerate(ranks):
                shards[rank] = stage * size + part
                more[rank] = f", shard {part + 1} of {size}" + (
                    f", partition group {group + 1}" if size < copies else "")
        places = tuple(Place(shards[rank], rank // stages, words[rank] + more[rank])
                       for rank in range(world))
        same: list[Ranks] = [tuple(rank for rank in range(world) if shards[rank] == shard)
                             for shard in range(stages * size)]
        return Layout(
            places, stages * size, copies,
            {"pipeline": pipelines, "shard": groups, "copies": same},
            words=f"{chosen.words()}{fewer}; each stage in {copies // size} group(s) of {size} of "
                  f"its {copies} ranks (pipeline.group); {slow}"
                  f"{topology.exposed(same, members)}",
            about={**about, "group": size}, cuts=cuts, version=version)

    def _terms(self, stages: int, copies: int) -> Terms:
        """The cost table is the model's; stages and micro-batches in flight are this world's."""
        many = max(1, (self.setup.config.micro_batches or copies) // copies)
        return self.terms._replace(stages=stages, micro_batches=many)

    def _near(
        self, of_stage: Sequence[Ranks], cut: Sequence[Stage], many: int
    ) -> tuple[list[Ranks], int]:
        """The partition groups, stage by stage, and the bytes that the busiest rank sends to far
        ones in a step of `many` micro-batches: for its stage's copies, and to the stages beside."""
        given = self.setup.config.topology
        labels = topology.labels(given, self.members)
        places = topology.places(given, self.members)
        groups, most, size = list[Ranks](), 0.0, self.options.group
        for number, (ranks, stage) in enumerate(zip(of_stage, cut)):
            own = [labels[rank] for rank in ranks]
            near = topology.apart(
                topology.near_first([places[rank] for rank in ranks], size),
                [self.members[rank] for rank in ranks],
                number * size, len(of_stage) * size)
            weights = sum(piece.weight_bytes for piece in self.pieces[stage.first : stage.end])
            sent = topology.sent_far(own, near, weights, 1, gathers=1)
            for rank, far in zip(ranks, sent):
                if stage.end < len(self.pieces) and labels[rank + 1] != labels[rank]:
                    far += many * stage.send_bytes
                if number and labels[rank - 1] != labels[rank]:
                    far += many * cut[number - 1].send_bytes  # gradients, as large as what came
                most = max(most, far)
            groups += [tuple(ranks[place] for place in group) for group in near]
        return groups, int(most)

    def hold(self, layout: Layout, rank: int) -> State:
        shard, key = layout.places[rank].shard, (layout.version, layout.cuts)
        self._use(layout.cuts)
        found = self.holdings.get(key)
        if found is None or found.held != (shard, layout.shards):
            found = self.holdings[key] = self._new(shard, layout.shards)
        self.layout, self.stage = layout, shard // self.options.group
        self.held, self.state, self.parameters, self.rows, self.optimizer, self.shards = found
        if self.shards is None:
            for name, parameter in self.parameters.items():
                parameter.data = self.state.views[name]
        else:
            fill(self.parameters.values())
        own = {id(parameter) for parameter in self.parameters.values()}
        others = [one for one in self.model.parameters() if id(one) not in own]
        for one in others:
            one.grad = None  # of a half step, in a world that had this parameter here
        hollow(others)
        return self.state

    def _new(self, shard: int, count: int) -> Holding:
        """A part of zeros."""
        size = self.options.group
        parameters = dict(self.pipe.get_stage_module(shard // size).named_parameters())
        names = [name for parameter in parameters for name in _tensors(parameter)]

        def cut(name: str, spec: Spec) -> Rows | None:
            return rows_of(spec.shape, shard % size, size) if size > 1 else None

        state = State(self.specs, self.device, self.model_class, cut, names)
        shards = StageShards(
            state, parameters, shard % size, size, self.bucket_bytes) if size > 1 else None
        rows = parameters if shards is None else shards.rows
        optimizer = adamw.build(list(rows.values()), self.optimizer_options)
        for name, one in rows.items():
            optimizer.state[one] = moments_in(state, name.removeprefix(f"{INSIDE}."))
        return Holding((shard, count), state, parameters, rows, optimizer, shards)

    def initialise(self) -> None:
        assert self.state is not None
        self.state.data.zero_()
        whole = dict(self.setup.build().named_parameters())
        for name in self.rows:
            tensor = whole[name.removeprefix(f"{INSIDE}.")].detach()
            if self.shards is not None:
                self.shards.take(name, tensor)
            else:
                self.state.views[name].copy_(tensor)

    # ------------------------------------------------------------------------------ a step

    def wrap(self, group: Any, _check: Callable[..., None]) -> None:
        if group is not self.group:
            self._watch(group)
        self.group = group
        self.schedules = {}
        self.step: list[MicroBatch] = []

    def _schedule(self, many: int) -> Any:
        """torch's, for that many micro-batches; made once a generation."""
        if many not in self.schedules:
            stage = self.pipe.build_stage(self.stage, self.device, self.group.parts["pipeline"])
            forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

            def seeded(number: int, *given: Any, **named: Any) -> Any:
                trace.seed(self.step[number].seed)
                return computed(forward, number, *given, **named)

            def computed(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
                """Between these a stage waits for others: what tells one that hangs from them."""
                self.group.phase("forward_backward")  # raises when the generation is over
                began = time.perf_counter()
                made = function(*given, **named)
                self.computed_s += time.perf_counter() - began
                self.group.phase("collective")
                return made

            stage.forward_one_chunk, stage.backward_one_chunk = seeded, partial(
                computed, backward)
            kind = ScheduleGPipe if self.options.schedule == "simple" else Schedule1F1B
            self.schedules[many] = kind(stage, many, loss_fn=self._loss, scale_grads=False)
        return self.schedules[many]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        one = self.step[int(target.reshape(-1)[0])]
        self.look(one.number, float(output.detach()))
        self.total += float(output.detach())
        return output.sum() / one.of

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        many = len(micro_batches)
        self.step, self.look, self.total = list(micro_batches), look, 0.0
        self.computed_s = 0.0
        schedule, last = self._schedule(many), len(self.layout.cuts)
        inputs = self._inputs(micro_batches) if self.stage == 0 else ()
        targets = torch.arange(many).reshape(many, 1) if self.stage == last else None
        self.group.phase("collective")
        if self.shards is not None:
            self.shards.gather(self.group.parts["shard"])
        schedule.step(*inputs, **({"target": targets} if targets is not None else {}))
        told = torch.tensor([self.total / many], dtype=torch.float64, device=self.device)
        if skip():
            return float(told)
        dist.broadcast(told, self.group.rank - self.stage + last,
                       group=self.group.parts["pipeline"])
        if self.shards is not None:
            several = len(self.group.copies) > 1
            self.shards.reduce(
                self.group.parts["shard"], self.group.parts["copies"] if several else None)
        elif self.group.layout.data > 1:
            self._sum_over_copies()
        return float(told)

    def _inputs(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
        for one in micro_batches:
            for name, tensor in one.batch.items():
                if tuple(tensor.shape) != self.shapes.get(name):
                    raise ConfigError([
                        f"strategy = 'pipeline': {name} of a batch is {tuple(tensor.shape)}, and "
                        f"{self.shapes.get(name)} was traced: make every batch of one shape"])
        return tuple(torch.cat([one.batch[name] for one in micro_batches]) for name in self.shapes)

    def _sum_over_copies(self) -> None:
        """In one flat buffer, so that the order of summing is the same in every step."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self.group.parts["copies"])
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(part.view_as(gradient))

    def norm(self) -> float:
        """From each tensor's own norm, told by one rank that holds it: the same number on every
        rank, and wherever the model is cut."""
        size, gradients = self.options.group, dict[str, Tensor]()
        if self.group.rank == self.group.copies[0]:
            gradients = self.shards.counted() if self.shards is not None else {
                name: p.grad for name, p in self.rows.items() if p.grad is not None}
        tensors = len(self.places) * size
        table = torch.zeros(tensors + self.group.world, dtype=torch.float64)
        table[tensors + self.group.rank] = self.computed_s / len(self.step)
        if gradients:
            norms = torch._foreach_norm(list(gradients.values()))
            places = [self.places[name] * size + self.held[0] % size for name in gradients]
            table[places] = torch.stack([norm.double() for norm in norms]).cpu()
        table = table.to(self.device)
        # Over all ranks: none goes on before every one has its sums.
        dist.all_reduce(table)
        told = table.tolist()
        self.took = told[tensors:]
        self._forget_others()
        return math.sqrt(math.fsum(norm * norm for norm in told[:tensors]))

    def update(self, rate: float, norm: float) -> None:
        limit = self.optimizer_options.clip_norm or math.inf
        torch.nn.utils.clip_grads_with_norm_(
            list(self.rows.values()), limit, torch.tensor(norm, device=self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def forget(self) -> None:
        for one in (*self.rows.values(), *self.parameters.values()):
            one.grad = None

    def leave(self) -> None:
        self.schedules = {}

    # ------------------------------------------------------------------------------ cut anew

    def said(self) -> str:
        held = [key for key, one in self.holdings.items() if not one.state.empty]
        measured = self.balance.measured if self.balance is not None else None
        return json.dumps({"held": held, "measured": measured, "trace_s": self.trace_s})

    def kept(self) -> State | None:
        found = self.holdings.get(self.source) if self.source is not None else None
        return found.state if found is not None and not found.state.empty else None

    def _watch(self, group: Any) -> None:
        """The ranks of a new generation.  Time on an accelerator is not measured."""
        options, layout = self.options, group.layout
        self.balance = None
        if (options.repartition == "never" or options.optimize == "memory" or not layout.cuts
                or self.device.type != "cpu"):
            return
        room = min(one.memory_bytes for one in self.members) or math.inf
        self.balance = Balance(
            self.pieces,
            self._terms(len(layout.cuts) + 1, layout.data)._replace(memory_bytes=room),
            [place.shard // options.group for place in layout.places], layout.cuts, self.home,
            self.cost_s, self.measured, layout.version)

    def proposed(self, left: int) -> Proposal | None:
        found = self.balance.after_step(self.took, left) if self.balance is not None else None
        if found is None:
            return None
        if found.speed < SLOW:
            words = (f"rank {found.rank} ({self.layout.places[found.rank].words}) computes at "
                     f"{100 * found.speed:.0f} % of the fastest stage's speed")
        else:
            words = "no rank is slow any more"
        if found.cuts == self.layout.cuts:
            return Proposal(None, f"{words}; no other cut of the model gains enough")
        layout = self._laid_out(self.layout.version + 1, found.cuts)
        return Proposal(layout, f"{words}: the pipeline is cut anew, {found.times:.2f} times the "
                                "throughput expected")

    def moves(self, before: Layout, after: Layout) -> list[Move]:
        size, found = self.options.group, list[Move]()
        stages = range(len(before.cuts) + 1)
        owner = {name: stage for stage in stages for name in self._names(stage, before.cuts)}
        for rank, place in enumerate(after.places):
            stage, part = divmod(place.shard, size)
            for name in self._names(stage, after.cuts):
                if owner[name] == stage:
                    continue
                holders = before.holders(owner[name] * size + part)
                # Of its own pipeline where that one has it, so that all of them send at once.
                near = [one for one in holders if before.places[one].data == place.data]
                source = near[0] if near else holders[place.data % len(holders)]
                found += [Move(one, source, rank) for one in _tensors(f"{INSIDE}.{name}")]
        return found

    def moved(self, layout: Layout, seconds: float) -> None:
        assert self.balance is not None
        self.balance.moved(layout.cuts, seconds)
        self.schedules = {}
        for key in [key for key in self.holdings if key[0] > layout.version]:
            del self.holdings[key]  # it was left

    def _forget_others(self) -> None:
        """What was held under other cuts: every rank has now gone over to these."""
        here = self.layout.version, self.layout.cuts
        for key in [key for key in self.holdings if key != here]:
            del self.holdings[key]
        self.pipes = {self.layout.cuts: self.pipe}

    @contextlib.contextmanager
    def encoder(self) -> Iterator[Callable[..., Tensor] | None]:
        """The whole model on every rank, for as long as it is asked: stages do not embed."""
        model = self.setup.build().to(self.device)
        if not hasattr(model, "embed"):
            yield None
            return
        owner = {f"{INSIDE}.{name}": stage for stage in range(len(self.layout.cuts) + 1)
                 for name in self._names(stage, self.layout.cuts)}
        first = self.group.rank - self.stage
        if self.shards is not None:
            self.shards.gather(self.group.parts["shard"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                full = f"{INSIDE}.{name}"
                if full not in owner:
                    continue  # used by no stage, so that it is as it was
                if full in self.parameters:
                    parameter.copy_(self.parameters[full])
                dist.broadcast(parameter.data, first + owner[full],
                               group=self.group.parts["pipeline"])
        model.eval()
        with torch.inference_mode():
            yield getattr(model, "embed", None)

    def _names(self, stage: int, cuts: tuple[int, ...]) -> list[str]:
        module = self.pipes[cuts].get_stage_module(stage)
        return [name.removeprefix(f"{INSIDE}.") for name, _ in module.named_parameters()]


def _tensors(parameter: str) -> list[str]:
    """What the state has of a parameter, by its name in a stage."""
    name = parameter.removeprefix(f"{INSIDE}.")
    return [parameter, *(f"adamw.{kind}.{name}" for kind in ("step", "exp_avg", "exp_avg_sq"))]


def _reject_tied(model: nn.Module, stages: int) -> None:
    """One tensor under two names: what is saved under one would not be the other's."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and stages > 1:
            raise ConfigError([
                f"strategy = 'pipeline': {seen[id(parameter)]} and {name} are one parameter, which "
                "a cut would part: untie them, or set strategy = 'ddp'"])
        seen[id(parameter)] = name
