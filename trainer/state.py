"""All of a rank's training state as one flat run of bytes.

Owns the layout: every tensor (parameters, buffers, AdamW's moments and step counts), sorted by
name, 64-byte aligned, is a view into one uint8 buffer.  So a survivor hands its state over in one
broadcast, a snapshot is one memcpy, a checkpoint shard is one slice, and a digest covers all.
Must not know of files, groups or processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from .checkpoint.format import Entry, align, shard_ranges, weights_digest


class State:
    """Model and AdamW state in one buffer.  `data` is uint8, `entries` say what lies where."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors = _model_tensors(model)
        moments = _optimizer_tensors(model)
        sizes = {name: (t.dtype, tuple(t.shape)) for name, t in {**tensors, **moments}.items()}
        self.entries, offset = [], 0
        for name in sorted(sizes):
            dtype, shape = sizes[name]
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            self.entries.append(
                Entry(name, str(dtype).removeprefix("torch."), shape, offset, nbytes))
            offset += align(nbytes)
        device = next(model.parameters()).device
        # Zeros, padding included: equal states must have equal digests.
        self.data = torch.zeros(offset, dtype=torch.uint8, device=device)
        self.views = {e.name: self._view(e, self.data) for e in self.entries}
        for name, tensor in tensors.items():
            self.views[name].copy_(tensor.detach())
            tensor.data = self.views[name]
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {
                "step": self.views[f"adamw.step.{name}"],
                "exp_avg": self.views[f"adamw.exp_avg.{name}"],
                "exp_avg_sq": self.views[f"adamw.exp_avg_sq.{name}"]}
        self.buffers = [self.views[f"model.{name}"] for name in _persistent_buffers(model)]
        self.host = self.data if device.type == "cpu" else torch.empty(offset, dtype=torch.uint8)
        self.memory = memoryview(self.host.numpy())  # type: ignore[arg-type]
        self.model_class = f"{type(model).__module__}:{type(model).__qualname__}"
        self.parameters = sum(p.numel() for p in model.parameters())
        table = [(e.name, e.dtype, e.shape) for e in self.entries]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(table).encode())

    @staticmethod
    def _view(entry: Entry, data: Tensor) -> Tensor:
        dtype = getattr(torch, entry.dtype)
        return data[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def bytes(self, first: int = 0, end: int | None = None) -> memoryview:
        """The bytes in host memory; on an accelerator copied there first."""
        if self.host is not self.data:
            self.host[first:end].copy_(self.data[first:end])
        return self.memory[first:end]

    def written(self) -> None:
        """To be called after `bytes()` was written to: carries it to the accelerator."""
        if self.host is not self.data:
            self.data.copy_(self.host)

    def digest(self) -> str:
        return str(xxhash.xxh3_128_hexdigest(self.bytes()))

    def weights_digest(self) -> str:
        """Of parameters and buffers alone, as format.weights_digest reads it from a checkpoint."""
        data = self.bytes()
        return weights_digest((e.name, data[e.offset : e.offset + e.nbytes]) for e in self.entries)

    def digest_while(self, arriving: Sequence[Any]) -> str:
        """The digest, chunk by chunk as each of `arriving` (the handles of data.chunk(n)) is in."""
        hasher, begin = xxhash.xxh3_128(), 0
        for work, chunk in zip(arriving, self.data.chunk(len(arriving))):
            work.wait()
            hasher.update(self.bytes(begin, begin + chunk.numel()))
            begin += chunk.numel()
        return str(hasher.hexdigest())

    def shard(self, rank: int, world: int) -> tuple[list[Entry], int, int]:
        """This rank's entries, and the first and end byte of its slice of `data`."""
        first, end = shard_ranges(self.entries, world)[rank]
        mine = self.entries[first:end]
        if not mine:
            return [], 0, 0
        begin = mine[0].offset
        return mine, begin, mine[-1].offset + align(mine[-1].nbytes)

    def describe(self) -> dict[str, Any]:
        return {
            "class": self.model_class, "parameters": self.parameters,
            "fingerprint": self.fingerprint}


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    keys = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in keys}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | _persistent_buffers(model)
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _optimizer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What AdamW keeps, before its first step: it would make the same, but not in our buffer."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"adamw.step.{name}"] = torch.zeros((), dtype=torch.float32)
        tensors[f"adamw.exp_avg.{name}"] = parameter.detach()
        tensors[f"adamw.exp_avg_sq.{name}"] = parameter.detach()
    return tensors
