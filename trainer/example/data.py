"""The built-in data set: docstring -> code pairs as token numbers, with some held out.

Owns its options and its batches.  Must not know of ranks or steps.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import FROM_0, FROM_1, Limit, Options, read_options, setting
from ..protocol import Batch
from . import corpus, tokenizer


@dataclasses.dataclass(frozen=True)
class CodeSearchOptions(Options):
    """What the built-in data set reads; data of your own read their own."""

    tokens: int = setting(64, "of a query or a document, cut there; at least 1", FROM_1)
    vocabulary: int = setting(8192, "size of the tokenizer that is trained; 300 to 65536",
                              Limit("300 to 65536", lambda value: 300 <= value <= 65536))
    held_out: int = setting(512, "pairs at most that are kept for evaluation; 0 or more", FROM_0)


class CodeSearch:
    """docstring -> code pairs of the installed Python: `query` and `document`, [batch, tokens]."""

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        chosen = read_options(CodeSearchOptions, options, "data_options")
        text = corpus.load(work_dir, say)
        self.digest = text.digest
        encoded, held_out = tokenizer.load_encoded(
            work_dir, text, chosen.vocabulary, chosen.tokens, say)
        # In memory, so that no step waits for the disk: 2 x 6,800 x 64 numbers are 1.7 MB.
        self.held_out = held_out
        self._train = encoded[:, ~held_out]
        self._held_out = encoded[:, held_out][:, : chosen.held_out]

    def __len__(self) -> int:
        return int(self._train.shape[1])

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.from_numpy(self._train[:, list(indices)].astype(np.int64))
        return {"query": rows[0], "document": rows[1]}

    def heldout(self) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self._held_out.astype(np.int64))
        return rows[0], rows[1]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
