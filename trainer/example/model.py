"""The built-in model: a text encoder with an MLP head, for retrieval.

Owns the network and its loss.  Must not know of ranks, steps or files.  Queries and documents go
through the same weights; the loss is contrastive with the other pairs of the micro-batch as
negatives, in both directions, so that no rank needs another's embeddings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ABOVE_0, BELOW_1, FROM_1, Options, read_options, setting
from ..protocol import Batch


@dataclasses.dataclass(frozen=True)
class EncoderOptions(Options):
    """What the built-in encoder reads; a model of your own reads its own."""

    layers: int = setting(4, "of the encoder; at least 1", FROM_1)
    width: int = setting(256, "of a layer; a multiple of `heads`", FROM_1)
    heads: int = setting(4, "of attention; at least 1", FROM_1)
    tokens: int = setting(64, "positions; at least `data_options.tokens`", FROM_1)
    vocabulary: int = setting(8192, "tokens that the embedding knows; as in `data_options`", FROM_1)
    head_width: int = setting(128, "length of an embedding; at least 1", FROM_1)
    dropout: float = setting(
        0.0, "part of the activations that is dropped; 0 up to below 1", BELOW_1)
    temperature: float = setting(0.05, "of the contrastive loss; above 0", ABOVE_0)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.heads >= 1 and self.width % self.heads:
            found.append(f"width = {self.width}: set a multiple of heads = {self.heads}")
        return found


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before it."""

    def __init__(self, options: EncoderOptions) -> None:
        super().__init__()
        width = options.width
        self.heads, self.dropout = options.heads, options.dropout
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection_in = nn.Linear(width, 3 * width, bias=False)
        self.projection_out = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.projection_in(self.norm_attention(hidden))
        query, key, value = parts.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        mixed = self.projection_out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = hidden + F.dropout(mixed, self.dropout, self.training)
        grown = self.contract(F.gelu(self.expand(self.norm_forward(hidden))))
        return hidden + F.dropout(grown, self.dropout, self.training)


class Encoder(nn.Module):
    """tokens [rows, length] (0 = padding) -> embeddings [rows, head_width] of length 1."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = chosen = read_options(EncoderOptions, options, "model_options")
        self.tokens = nn.Embedding(chosen.vocabulary, chosen.width)
        self.positions = nn.Parameter(torch.empty(chosen.tokens, chosen.width))
        self.blocks = nn.ModuleList(Block(chosen) for _ in range(chosen.layers))
        self.norm = nn.LayerNorm(chosen.width)
        self.head = nn.Sequential(
            nn.Linear(chosen.width, chosen.head_width), nn.GELU(),
            nn.Linear(chosen.head_width, chosen.head_width))
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def encoded(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Through all layers, then the mean over what is real: [rows, width]."""
        for block in self.blocks:
            hidden = block(hidden, real[:, None, None, :])
        weight = real.unsqueeze(-1).to(hidden.dtype)
        pooled: Tensor = (self.norm(hidden) * weight).sum(1) / weight.sum(1).clamp(min=1.0)
        return pooled

    def embed(self, tokens: Tensor) -> Tensor:
        real = tokens != 0
        hidden = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return F.normalize(self.head(self.encoded(hidden, real)), dim=-1)

    def contrast(self, left: Tensor, right: Tensor) -> Tensor:
        """Row i of both belong together; the other rows are what is not to be found."""
        logits = left @ right.T / self.options.temperature
        target = torch.arange(len(left), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    def forward(self, batch: Batch) -> Tensor:
        pairs = batch["query"].shape[0]
        embedded = self.embed(torch.cat([batch["query"], batch["document"]]))
        return self.contrast(embedded[:pairs], embedded[pairs:])
