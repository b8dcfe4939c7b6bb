"""Pairs to be found again and a small encoder that learns to: `paired:Data`, `paired:Encoder`."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

WIDTH, NOISE = 8, 0.5  # so much that a right answer has near rivals, which bf16 confuses


class Data:
    """A point as its query shows it, and the same point, turned, as its document does."""

    digest = "paired"

    def __init__(self, options, work_dir):
        generator = torch.Generator().manual_seed(11)
        turned, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))
        many, self.held = 4000, options.get("held_out", 2000)
        points = torch.randn(many, WIDTH, generator=generator)
        shown = [torch.zeros(many, 2 * WIDTH) for _ in range(2)]
        for place, seen in enumerate((points, points @ turned)):
            noise = NOISE * torch.randn(many, WIDTH, generator=generator)
            shown[place][:, WIDTH * place : WIDTH * (place + 1)] = seen + noise
        self.queries, self.documents = shown

    def __len__(self):
        return len(self.queries) - self.held

    def batch(self, indices):
        rows = self.held + torch.tensor(list(indices))
        return {"query": self.queries[rows], "document": self.documents[rows]}

    def heldout(self):
        return self.queries[: self.held], self.documents[: self.held]


class Encoder(nn.Module):
    """Contrastive over a micro-batch; `bf16` computes it as mixed precision does."""

    def __init__(self, options):
        super().__init__()
        self.bf16 = options.get("bf16", False)
        self.layers = nn.Sequential(
            nn.Linear(2 * WIDTH, 32), nn.Tanh(), nn.Linear(32, 16))

    def precision(self):
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def embed(self, tokens):
        with self.precision():
            found = self.layers(tokens)
        return nn.functional.normalize(found.float(), dim=-1)

    def forward(self, batch):
        scores = self.embed(batch["query"]) @ self.embed(batch["document"]).T / 0.1
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
