"""A model whose graph becomes another one in mid-training, and takes seconds to compile."""

from __future__ import annotations

import tiny

WARM_UP = 3  # forward passes before the first step
PIECES = 24


class Model(tiny.Still):
    def forward(self, batch):
        self.turns = getattr(self, "turns", 0) + 1
        loss = super().forward(batch)
        if self.turns <= WARM_UP + 12:
            return loss
        rows = self.first(batch["x"])
        for size in range(1, PIECES):  # every product of a shape of its own
            part = rows[:, : 1 + size % rows.shape[1]].repeat(1, 1 + size // 16)
            loss = loss + 1e-6 * (part.T @ part).square().mean()
        return loss
