"""All of a rank's training state as one flat run of bytes.

Owns the layout: every tensor (parameters, buffers, AdamW's moments and step counts), sorted by
name, 64-byte aligned, is a view into one uint8 buffer.  So a survivor hands its state over in one
broadcast, a snapshot is one memcpy, a checkpoint's share is one slice, and a digest covers all.
A sharded strategy holds a piece of each tensor: some of its rows, which are one run of its bytes.
Names and shapes are those of the whole model, whoever holds what.  Must not know of files, groups
or processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from .checkpoint.format import Entry, align, shard_ranges


class Spec(NamedTuple):
    """One tensor of the whole state."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Rows(NamedTuple):
    """Which rows of a tensor are held, and for how many there is room."""

    first: int
    number: int
    room: int


def rows_of(shape: Sequence[int], shard: int, shards: int) -> Rows:
    """The rows of a tensor that a shard holds: as torch.chunk cuts, the last ones may be short."""
    room = -(-shape[0] // shards)
    first = min(shape[0], shard * room)
    return Rows(first, min(shape[0], first + room) - first, room)


Specs = Mapping[str, Spec]
Covered = dict[str, list[tuple[int, int]]]  # by tensor: first and end bytes
Cut = Callable[[str, Spec], "Rows | None"]


def specs_of(model: nn.Module) -> dict[str, Spec]:
    """Every tensor of the whole state, by its canonical name."""
    tensors = {**model_tensors(model), **_optimizer_tensors(model)}
    return {name: Spec(t.dtype, tuple(t.shape)) for name, t in sorted(tensors.items())}


class State:
    """Model and AdamW state in one buffer.  `data` is uint8, `entries` say what lies where.

    `cut(name, spec)` says which rows are held, None for the whole tensor; a tensor that is not in
    `names` is not held at all.
    """

    def __init__(
        self, specs: Specs, device: torch.device, model_class: str = "",
        cut: Cut = lambda _name, _spec: None, names: Sequence[str] | None = None,
    ) -> None:
        self.specs, self.model_class = specs, model_class
        self.entries, self.shapes = [], dict[str, tuple[int, ...]]()
        offset = 0
        for name in sorted(specs if names is None else names):
            dtype, shape = spec = specs[name]
            row = dtype.itemsize * math.prod(shape[1:])
            rows = cut(name, spec) if shape else None
            whole = dtype.itemsize * math.prod(shape)
            nbytes, room, begin = whole, whole, 0
            if rows is not None:
                nbytes, room, begin = rows.number * row, rows.room * row, rows.first * row
            self.shapes[name] = shape if rows is None else (rows.number, *shape[1:])
            kind = str(dtype).removeprefix("torch.")
            self.entries.append(Entry(name, kind, shape, offset, nbytes, begin))
            offset += align(room)
        self._places = {entry.name: entry for entry in self.entries}
        self.empty = True  # until what it holds is proven
        # Zeros, padding included: equal states must have equal digests.
        self.data = torch.zeros(offset, dtype=torch.uint8, device=device)
        self.views = {entry.name: self.room(entry, entry.nbytes).view(self.shapes[entry.name])
                      for entry in self.entries}
        self.host = self.data if device.type == "cpu" else torch.empty(offset, dtype=torch.uint8)
        self.memory = memoryview(self.host.numpy())  # type: ignore[arg-type]
        table = [(name, str(spec.dtype).removeprefix("torch."), spec.shape)
                 for name, spec in sorted(specs.items())]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(table).encode())
        self.buffers = list[Tensor]()  # of the model, which the loop keeps equal
        # Brings into `data` what a strategy keeps elsewhere in a generation; before every reading.
        self.fetch: Callable[[], None] = lambda: None

    def begin(self, model: nn.Module) -> None:
        """The state of step 0, of a whole model as it was built."""
        self.data.zero_()
        for name, tensor in model_tensors(model).items():
            self.views[name].copy_(tensor.detach())

    def place(self, name: str) -> Entry:
        """Where a tensor that is held lies."""
        return self._places[name]

    def room(self, entry: Entry, nbytes: int) -> Tensor:
        """The first `nbytes` of an entry's place, flat, in its own type."""
        return self.data[entry.offset : entry.offset + nbytes].view(getattr(torch, entry.dtype))

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def parameters(self) -> int:
        """Numbers in the whole model."""
        moments = (spec for name, spec in self.specs.items() if name.startswith("adamw.exp_avg."))
        return sum(math.prod(spec.shape) for spec in moments)

    def bytes(self, first: int = 0, end: int | None = None) -> memoryview:
        """The bytes in host memory; on an accelerator copied there first."""
        self.fetch()
        if self.host is not self.data:
            self.host[first:end].copy_(self.data[first:end])
        return self.memory[first:end]

    def written(self) -> None:
        """To be called after `bytes()` was written to: carries it to the accelerator."""
        if self.host is not self.data:
            self.data.copy_(self.host)

    def digest(self) -> str:
        return str(xxhash.xxh3_128_hexdigest(self.bytes()))

    def digest_while(self, arriving: Sequence[Any]) -> str:
        """The digest, chunk by chunk as each of `arriving` (the handles of data.chunk(n)) is in."""
        hasher, begin = xxhash.xxh3_128(), 0
        for work, chunk in zip(arriving, self.data.chunk(len(arriving))):
            work.wait()
            hasher.update(self.bytes(begin, begin + chunk.numel()))
            begin += chunk.numel()
        return str(hasher.hexdigest())

    def share(self, number: int, of: int) -> tuple[list[Entry], int, int]:
        """What one of `of` ranks that hold the same state saves of it: the first and end byte of
        its slice of `data`, and the entries in it, whose offsets count from there."""
        first, last = shard_ranges(self.entries, of)[number]
        mine = self.entries[first:last]
        if not mine:
            return [], 0, 0
        begin, end = mine[0].offset, mine[-1].offset + align(mine[-1].nbytes)
        return [entry._replace(offset=entry.offset - begin) for entry in mine], begin, end

    def fill(self, entries: Sequence[Entry], data: memoryview, covered: Covered) -> None:
        """Takes from `data` what is held here, and says in `covered` which bytes these were.
        Raises ValueError for a tensor that this state does not know."""
        for found in entries:
            spec = self.specs.get(found.name)
            if spec is None or (str(spec.dtype).removeprefix("torch."), spec.shape) != (
                    found.dtype, found.shape):
                raise ValueError(f"unexpected tensor {found.name!r}")
            mine = self._places.get(found.name)
            if mine is None:
                continue
            first = max(found.begin, mine.begin)
            end = min(found.begin + found.nbytes, mine.begin + mine.nbytes)
            if first < end:
                source, target = (e.offset + first - e.begin for e in (found, mine))
                self.memory[target : target + end - first] = data[source : source + end - first]
                covered.setdefault(found.name, []).append((first, end))

    def wants(self, entries: Sequence[Entry]) -> bool:
        """Whether some of these bytes are held here."""
        mine = (self._places.get(e.name, e._replace(nbytes=0)) for e in entries)
        return any(max(e.begin, m.begin) < min(e.begin + e.nbytes, m.begin + m.nbytes)
                   for e, m in zip(entries, mine))

    def missing(self, covered: Covered) -> str:
        """The first tensor of which not every byte was covered, "" if there is none."""
        for entry in self.entries:
            reached = entry.begin
            for first, end in sorted(covered.get(entry.name, ())):
                if first <= reached:
                    reached = max(reached, end)
            if reached < entry.begin + entry.nbytes:
                return entry.name
        return ""

    def describe(self) -> dict[str, Any]:
        return {
            "class": self.model_class, "parameters": self.parameters,
            "fingerprint": self.fingerprint}


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state of a model that every rank holds whole; both live in it from now on."""
    device = next(model.parameters()).device
    state = State(specs_of(model), device, class_of(model))
    state.begin(model)
    for name, tensor in model_tensors(model).items():
        tensor.data = state.views[name]
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = moments_in(state, name)
    state.buffers = [state.views[f"model.{name}"] for name in persistent_buffers(model)]
    return state


def moments_in(state: State, parameter: str) -> dict[str, Tensor]:
    """AdamW's state of one parameter, as views."""
    return {key: state.views[f"adamw.{key}.{parameter}"]
            for key in ("step", "exp_avg", "exp_avg_sq")}


def class_of(model: nn.Module) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    keys = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in keys}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | persistent_buffers(model)
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _optimizer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What AdamW keeps, before its first step: it would make the same, but not in our buffer."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"adamw.step.{name}"] = torch.zeros((), dtype=torch.float32)
        tensors[f"adamw.exp_avg.{name}"] = parameter.detach()
        tensors[f"adamw.exp_avg_sq.{name}"] = parameter.detach()
    return tensors
