"""Retrieval quality on held-out pairs: MRR@10 and recall@10.

Owns the measure.  Each query is searched among all held-out documents; ranks share the encoding.
Must not change the weights or any generator's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checkpoint import format as files
from .group import Group
from .quality import kept

ROWS = 32  # encoded at a time
CUTOFF = 10
TASK = "text"  # of data that has but one


class Evaluated(NamedTuple):
    """The printed figures, and what they were made of."""

    figures: dict[str, float]
    tasks: dict[str, kept.Task]


def places_of(queries: Tensor, documents: Tensor) -> Tensor:
    """Where each query's right answer stands among all documents, from 1 on.

    Row i of `documents` is the right answer to row i of `queries`; rows have length 1."""
    scores = queries @ documents.T
    right = scores.diagonal().unsqueeze(1)
    # Ties count against us: a model that maps all to one point must not look good.
    return (scores >= right).sum(dim=1).clamp(min=1)


def retrieval(places: Tensor) -> dict[str, float]:
    hit = places <= CUTOFF
    reciprocal = torch.where(hit, 1.0 / places, torch.zeros_like(places, dtype=torch.float32))
    return {
        "mrr_at_10": round(float(reciprocal.mean()), 6),
        "recall_at_10": round(float(hit.float().mean()), 6)}


def evaluate(
    embed: Callable[[Tensor], Tensor], held_out: tuple[Tensor, Tensor], group: Group
) -> Evaluated:
    """All ranks call it, and get the same numbers."""
    encoded = [_encode(embed, tokens, group) for tokens in held_out]
    places = places_of(encoded[0], encoded[1])
    digest = files.digest(b"".join(tokens.contiguous().numpy().tobytes() for tokens in held_out))
    task = kept.Task(len(places), digest, places[: kept.PAIRS_MAX].tolist())
    return Evaluated(retrieval(places), {TASK: task})


def _encode(embed: Callable[[Tensor], Tensor], tokens: Tensor, group: Group) -> Tensor:
    """Embeddings of all rows: rank r encodes rows r, r + world, ..."""
    rows, world = tokens.shape[0], group.world
    each = -(-rows // world)
    mine = torch.arange(each) * world + group.rank
    mine = tokens[mine.clamp(max=rows - 1)].to(group.device)
    parts = [embed(mine[first : first + ROWS]) for first in range(0, each, ROWS)]
    gathered = torch.stack(group.gather(torch.cat(parts)), dim=1)
    return gathered.flatten(0, 1)[:rows]
