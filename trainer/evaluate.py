"""Retrieval quality on held-out pairs: MRR@10 and recall@10.

Owns the measure.  Each query is searched among all held-out documents; ranks share the encoding.
Must not change the weights or any generator's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .checkpoint import format as files
from .group import Group
from .quality import kept

ROWS = 32  # encoded at a time
CUTOFF = 10
HeldOut = tuple[Tensor, Tensor]  # inputs, and the right answer to each: another input, or a class
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


def places_of_class(scores: Tensor, right: Tensor) -> Tensor:
    """The same for classes: where the right one stands among all that a row has scores for."""
    return (scores >= scores.gather(1, right.unsqueeze(1))).sum(dim=1).clamp(min=1)


def evaluate(
    embed: Callable[..., Tensor], held_out: HeldOut | Mapping[str, HeldOut], group: Group
) -> Evaluated:
    """All ranks call it, and get the same numbers.  Of several tasks the first one's figures have
    the names that a single one's have."""
    if isinstance(held_out, Mapping):
        found = {task: _places(functools.partial(embed, task=task), pairs, group)
                 for task, pairs in held_out.items()}
    else:
        found = {TASK: _places(embed, held_out, group)}
    figures, tasks = dict[str, float](), dict[str, kept.Task]()
    for task, (places, classes, digest) in found.items():
        before = f"{task}_" if figures else ""
        if classes:
            figures[f"{before}accuracy"] = round(float((places == 1).float().mean()), 6)
        else:
            figures |= {before + name: value for name, value in retrieval(places).items()}
        tasks[task] = kept.Task(len(places), digest, places[: kept.PAIRS_MAX].tolist())
    return Evaluated(figures, tasks)


def _places(
    embed: Callable[[Tensor], Tensor], pairs: HeldOut, group: Group
) -> tuple[Tensor, bool, str]:
    """The places, whether they are those of classes, and a digest of what was asked."""
    digest = files.digest(b"".join(one.contiguous().numpy().tobytes() for one in pairs))
    first = _encode(embed, pairs[0], group)
    if pairs[1].dim() == 1:
        return places_of_class(first, pairs[1].to(first.device)), True, digest
    return places_of(first, _encode(embed, pairs[1], group)), False, digest


def _encode(embed: Callable[[Tensor], Tensor], tokens: Tensor, group: Group) -> Tensor:
    """Embeddings of all rows: rank r encodes rows r, r + world, ..."""
    rows, world = tokens.shape[0], group.world
    each = -(-rows // world)
    mine = torch.arange(each) * world + group.rank
    mine = tokens[mine.clamp(max=rows - 1)].to(group.device)
    parts = [embed(mine[first : first + ROWS]) for first in range(0, each, ROWS)]
    gathered = torch.stack(group.gather(torch.cat(parts)), dim=1)
    return gathered.flatten(0, 1)[:rows]
