"""A model and data small enough for a test, plugged in as a user would: `tiny:Model`."""

from __future__ import annotations

import os

import torch
from torch import nn


class Data:
    """Vectors to be summed."""

    digest = "tiny"

    def __init__(self, options, work_dir):
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(options.get("samples", 40), 8, generator=generator)

    def __len__(self):
        return len(self.rows)

    def batch(self, indices):
        rows = self.rows[list(indices)]
        return {"x": rows, "y": rows.sum(1, keepdim=True)}


class Own(Data):
    """Another content in every process."""

    def __init__(self, options, work_dir):
        super().__init__(options, work_dir)
        self.digest = f"of {os.getpid()}"


class Ahead(Data):
    """Writes down what it is asked for ahead."""

    def __init__(self, options, work_dir):
        super().__init__(options, work_dir)
        self.log = options["log"]

    def soon(self, indices):
        with open(self.log, "a") as file:
            file.write(f"{indices}\n")


class Model(nn.Module):
    """Dropout (so that seeding shows), a running statistic (so that buffers show), four layers
    of odd sizes (so that DDP's order of summing shows)."""

    def __init__(self, options):
        super().__init__()
        width = options.get("width", 33)
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, 1),
        )
        self.nan_after = options.get("nan_after", 0)
        self.seen = 0

    def forward(self, batch):
        self.seen += 1
        loss = nn.functional.mse_loss(self.layers(self.norm(batch["x"])), batch["y"])
        return loss * float("nan") if 0 < self.nan_after < self.seen else loss


class OtherModel(Model):
    def __init__(self, options):
        super().__init__({"width": 17})


class Moved(Model):
    """The same network under another name."""


class Embedding(Model):
    """One that embeds, as a user's own."""

    def embed(self, tokens):
        return self.layers[0](self.norm(tokens))


class Chain(nn.Module):
    """Without buffers, in pieces of unlike sizes, so that it can be cut into stages; with a value
    that a late stage takes from the first one, and dropout."""

    def __init__(self, options):
        super().__init__()
        width = options.get("width", 33)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width * (1 + n % 2)), nn.GELU(), nn.Dropout(0.1),
                          nn.Linear(width * (1 + n % 2), width))
            for n in range(options.get("blocks", 4)))
        self.last = nn.Linear(width, 1)

    def forward(self, batch):
        begin = hidden = self.first(batch["x"])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.mse_loss(self.last(hidden + begin), batch["y"])


class Untraceable(Chain):
    def forward(self, batch):
        if float(batch["x"].sum()) > 0:
            return super().forward(batch)
        return super().forward(batch) * 2


class Tied(Chain):
    """One layer before and behind all others."""

    def forward(self, batch):
        hidden = self.first(batch["x"])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.mse_loss(
            self.last(hidden) + self.first(batch["x"]).sum(1, keepdim=True), batch["y"])


class Shared(Chain):
    """Two layers of one tensor, as tied weights are."""

    def __init__(self, options):
        super().__init__(options)
        self.blocks[2][0].weight = self.blocks[0][0].weight


class Still(Chain):
    """Nothing is drawn at random: the same numbers however it is cut."""

    def __init__(self, options):
        super().__init__(options)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class Searched(Still):
    """One whose embeddings an evaluation asks for."""

    def embed(self, tokens):
        hidden = self.first(tokens.float())
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.normalize(hidden, dim=-1)
