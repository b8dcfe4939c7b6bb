"""What a user's own model and data must offer.  Owns two Protocols, and no code.

`model = "mine:Model"` and `data = "mine:Data"` in train.toml name any classes of this shape; both
are built with one dict, the tables [model_options] and [data_options].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]


class Model(Protocol):
    """A torch.nn.Module, built as `Class(options)`, whose forward returns the loss of one batch.

    It may also have `embed(tokens) -> Tensor` (rows of length 1): then held-out retrieval is
    measured; with several tasks it is `embed(inputs, task)`.  Randomness must come from torch's
    generators: they are seeded for every batch.
    """

    def __init__(self, options: dict[str, Any]) -> None: ...

    def forward(self, batch: Batch) -> Tensor:
        """A scalar, the mean loss over the batch."""
        ...


class Data(Protocol):
    """Samples by number, built as `Class(options, work_dir)`; the same numbers give the same batch.

    It may also have `heldout() -> (queries, documents)`, two token tensors with equal row counts,
    or one such pair for each task by its name; where the second is one number a row, it is the
    number of the right class, and `embed` returns a score for each.

    It may also have `soon(indices)`, which is told in each step what this rank will ask for in the
    next one: it begins to bring that in the background, returns at once and raises nothing.
    """

    digest: str  # names the content: a checkpoint says which data it was trained on

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int]) -> Batch: ...
