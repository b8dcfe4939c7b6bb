"""A model with a ModuleList, for strategies that gather it unit by unit; and some that none can."""

from __future__ import annotations

import tiny
import torch
from torch import nn

from holdfast.trainer.example import picture


class Data(tiny.Data):
    """With held-out pairs, so that there is an evaluation."""

    def heldout(self):
        return self.rows[:7], self.rows[7:14]


class Pages:
    """What the example of several tasks is fed, at random."""

    digest = "pages"

    def __init__(self, options, work_dir):
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(1, 50, (40, 2, 8), generator=generator)
        self.all = {
            "query": tokens[:, 0], "document": tokens[:, 1],
            "picture": torch.rand(40, picture.PATCHES, picture.PATCH_VALUES, generator=generator),
            "kind": torch.randint(len(picture.KINDS), (40,), generator=generator)}

    def __len__(self):
        return 40

    def batch(self, indices):
        return {name: one[list(indices)] for name, one in self.all.items()}

    def heldout(self):
        some = self.batch(range(7))
        return {"text": (some["query"], some["document"]),
                "picture": (some["picture"], some["document"]),
                "kind": (some["document"], some["kind"])}


class Model(nn.Module):
    """Odd sizes, so that the last shard is short; a tensor with fewer rows than ranks."""

    def __init__(self, options):
        super().__init__()
        width = options.get("width", 33)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.last = nn.Linear(width, 1)
        self.register_buffer("steps_seen", torch.zeros(()))

    def embed(self, tokens):
        return nn.functional.normalize(self.hidden(tokens.float()), dim=-1)

    def hidden(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden

    def forward(self, batch):
        if self.training:
            self.steps_seen += 1
        return nn.functional.mse_loss(self.last(self.hidden(batch["x"])), batch["y"])


class Tied(Model):
    """One weight in two units."""

    def __init__(self, options):
        super().__init__(options)
        self.blocks[2][0].weight = self.blocks[0][0].weight


class Scalar(Model):
    def __init__(self, options):
        super().__init__(options)
        self.scale = nn.Parameter(torch.ones(()))


class Drawn(Model):
    """Draws a tensor that is no parameter, behind its weights."""

    def __init__(self, options):
        super().__init__(options)
        self.register_buffer("directions", torch.randn(8), persistent=False)


class Computed(Model):
    """Has a table of its own, the same whatever its weights are; and one weight twice in a unit."""

    def __init__(self, options):
        super().__init__(options)
        self.table = torch.arange(8.0)
        self.blocks[0].append(nn.Linear(33, 33))
        self.blocks[0][3].weight = self.blocks[0][0].weight


class Reading(Model):
    """Begins with weights that follow from one another."""

    def __init__(self, options):
        super().__init__(options)
        self.last.weight.data *= float(self.first.weight.detach().abs().max())
