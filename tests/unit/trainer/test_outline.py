"""Models without memory for their parameters: what they have, and what a pass through one costs."""

from __future__ import annotations

import gc

import blocks
import pytest
import tiny
import torch
from torch import nn

from holdfast.trainer.config import load
from holdfast.trainer.engines import outline
from holdfast.trainer.engines.ddp import DataParallel
from holdfast.trainer.engines.sharded import MiCS
from holdfast.trainer.engines.strategy import Setup
from holdfast.trainer.example.model import Encoder

CPU = torch.device("cpu")
ENCODER = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "dropout": 0.1}


def builder(kind, options=None):
    def build():
        torch.manual_seed(7)
        return kind(options or {})
    return build


def counted(monkeypatch, build):
    """`build`, and the largest number of bytes that its parameters had at once, by passes."""
    peaks = []

    def watched():
        held, register = {}, nn.Module.register_parameter

        def registering(module, name, parameter):
            register(module, name, parameter)
            for one in module._parameters.values():
                if one is not None:
                    held[id(one)] = one
            peaks[-1] = max(peaks[-1], sum(one.untyped_storage().nbytes() for one in held.values()
                                           if not one.is_meta))

        peaks.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "register_parameter", registering)
            return build()

    return watched, peaks


@pytest.mark.parametrize(("kind", "options", "builds"), [
    (blocks.Model, {}, 1), (blocks.Tied, {}, 1), (tiny.Model, {}, 1), (Encoder, ENCODER, 1),
    (blocks.Computed, {}, 1), (blocks.Drawn, {}, 2), (blocks.Reading, {}, 2),
])
def test_an_outline_is_the_model_without_its_weights(monkeypatch, kind, options, builds):
    build, peaks = counted(monkeypatch, builder(kind, options))
    made, whole = outline.outlined(build), builder(kind, options)()
    assert len(peaks) == builds
    assert peaks[0] == 0, "no weight was in memory"
    assert nn.Module.register_parameter.__name__ == "register_parameter", "patched for a while only"
    ours, theirs = (dict(one.named_parameters(remove_duplicate=False)) for one in (made, whole))
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in ours.items()} == {
        name: (p.shape, p.dtype, p.requires_grad) for name, p in theirs.items()}
    assert all(p.is_meta for p in ours.values())
    assert dict(made.named_parameters()).keys() == dict(whole.named_parameters()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(made.named_buffers())[name], buffer), name
    if kind is blocks.Computed:
        assert torch.equal(made.table, whole.table)


def test_what_a_model_computes_of_its_weights_is_as_in_the_whole_one():
    """It holds the parameter as well as its module does, and asks it for its size or its values."""
    class Asking(nn.Module):
        def __init__(self, options):
            super().__init__()
            weight = nn.Parameter(torch.ones(4))
            self.gain, self.numbers = weight, weight.numel()
            if options["reads"] == "a buffer":
                self.register_buffer("norm", weight.detach().norm(), persistent=False)
            elif options["reads"] == "an attribute":
                self.norm = weight.detach().norm()

    for reads in ("nothing", "a buffer", "an attribute"):
        made = outline.outlined(builder(Asking, {"reads": reads}))
        assert made.gain.is_meta and made.gain.shape == (4,) and made.numbers == 4
        assert reads == "nothing" or float(made.norm) == 2.0


def test_what_a_model_has_against_its_settings_is_said(monkeypatch):
    class Refusing(nn.Module):
        def __init__(self, options):
            super().__init__()
            raise ValueError("width = 3: set a multiple of heads")

    with pytest.raises(ValueError, match="width = 3"):
        outline.outlined(builder(Refusing))
    assert nn.Module.register_parameter.__name__ == "register_parameter"


def as_the_whole_model(model, batch):
    """What one forward pass keeps for its backward pass, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(dict(batch)).backward()
    return sum(nbytes for place, nbytes in kept.items() if place not in parameters)


@pytest.mark.parametrize(("kind", "options"), [
    (blocks.Model, {}), (tiny.Model, {}), (blocks.Computed, {}), (Encoder, ENCODER)])
def test_a_pass_is_counted_as_that_of_the_whole_model_and_leaves_nothing(kind, options):
    tokens = torch.arange(24).view(4, 6) % 63 + 1
    batch = ({"query": tokens, "document": tokens.flip(0)} if kind is Encoder else
             tiny.Data({}, None).batch(range(4)))
    made = outline.outlined(builder(kind, options))
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    found = outline.kept_for_backward(made, batch, CPU)
    assert found == as_the_whole_model(builder(kind, options)(), batch) > 0
    assert all(p.is_meta and p.grad is None for p in made.parameters())
    assert all(torch.equal(before[name], buffer) for name, buffer in made.named_buffers())


def test_a_sharded_rank_prepares_in_less_memory_than_its_model_has():
    """Of the kernel's word, in a model of many equal layers; what torch loads with its first pass
    is no model's."""
    class Wide(nn.Module):
        def __init__(self, options):
            super().__init__()
            width = options["width"]
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(48))

        def forward(self, batch):
            hidden = batch["x"]
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.sum()

    config = load(None, ["strategy=mics", "mics.group=1", "device=cpu"])
    for width in (8, 1024):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is counted from here on
        before = peak_bytes()
        rank = MiCS(Setup(config, builder(Wide, {"width": width}), CPU))
        rank.warm_up({"x": torch.ones(2, width)})
    assert rank.need.weights > 192e6 and rank.need.activations > 0
    assert peak_bytes() - before < rank.need.weights / 3


def test_a_rank_that_holds_the_whole_state_holds_it_once_and_can_begin_anew():
    builds = []

    def build():
        builds.append(1)
        return builder(Encoder, ENCODER)()

    tokens = torch.arange(24).view(4, 6) % 63 + 1
    batch = {"query": tokens, "document": tokens.flip(0)}
    rank = DataParallel(Setup(load(None, ["device=cpu"]), build, CPU))
    untrained = bytes(rank.state.bytes())
    rank.warm_up(batch)
    rank.initialise()
    assert bytes(rank.state.bytes()) == untrained and len(builds) == 1
    for _ in range(2):
        rank.model(batch).backward()
        rank.update(0.1, rank.norm())
        rank.forget()
    assert bytes(rank.state.bytes()) != untrained
    rank.initialise()
    assert bytes(rank.state.bytes()) == untrained and len(builds) == 2
    gc.collect()
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)}
    assert [nbytes for nbytes in kept.values() if nbytes == rank.state.nbytes] == [
        rank.state.nbytes]


def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
