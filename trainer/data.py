"""Which samples each step sees, and the built-in data set.

Owns the order.  It is a function of (seed, epoch) alone, and a step's place in it of the step's
number alone: nothing is kept that could be lost.  Must not know of ranks, except for which
micro-batches are a rank's.
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

from .config import ConfigError, Options, read_options, setting
from .example import corpus, tokenizer
from .protocol import Batch


class Sampler:
    """Every sample exactly once an epoch, whatever the world; a step may cross two epochs."""

    def __init__(self, samples: int, seed: int, batch: int, micro_batches: int) -> None:
        if samples < batch * micro_batches:
            raise ConfigError(
                [f"batch x micro_batches = {batch * micro_batches}, but the data has only "
                 f"{samples} samples: set a smaller batch"]
            )
        self.samples, self.seed = samples, seed
        self.batch, self.micro_batches = batch, micro_batches
        self._orders: dict[int, np.ndarray] = {}

    def order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # RandomState's stream is frozen by numpy's own promise; Generator's is not.
            state = np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32, epoch])
            recent = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders = {**recent, epoch: state.permutation(self.samples)}
        return self._orders[epoch]

    def indices(self, step: int, micro_batch: int) -> list[int]:
        """Samples of one micro-batch; `step` counts from 0."""
        first = (step * self.micro_batches + micro_batch) * self.batch
        places = (divmod(place, self.samples) for place in range(first, first + self.batch))
        return [int(self.order(epoch)[place]) for epoch, place in places]

    def mine(self, rank: int, world: int) -> range:
        """This rank's micro-batches.  Raises ConfigError if some rank would have none."""
        if self.micro_batches < world:
            raise ConfigError(
                [f"micro_batches = {self.micro_batches} for {world} ranks: "
                 f"set micro_batches to at least {world}"]
            )
        return range(rank, self.micro_batches, world)


def seed_for(seed: int, step: int, micro_batch: int) -> int:
    """The generators' seed for one micro-batch, wherever it is computed (splitmix64's finisher)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch + 1) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63


@dataclasses.dataclass(frozen=True)
class CodeSearchOptions(Options):
    """What the built-in data set reads; data of your own read their own."""

    tokens: int = setting(64, "of a query or a document, cut there; at least 1")
    vocabulary: int = setting(8192, "size of the tokenizer that is trained; 300 to 65536")
    held_out: int = setting(512, "pairs at most that are kept for evaluation; 0 or more")

    def problems(self) -> list[str]:
        found = []
        if not 300 <= self.vocabulary <= 65536:
            found.append(f"vocabulary = {self.vocabulary}: set 300 to 65536")
        if self.tokens < 1:
            found.append(f"tokens = {self.tokens}: set at least 1")
        if self.held_out < 0:
            found.append(f"held_out = {self.held_out}: set 0 or more")
        return found


class CodeSearch:
    """docstring -> code pairs of the installed Python: `query` and `document`, [batch, tokens]."""

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        chosen = read_options(CodeSearchOptions, options, "data_options")
        text = corpus.load(work_dir, _say)
        self.digest = text.digest
        encoded, held_out = tokenizer.load_encoded(
            work_dir, text, chosen.vocabulary, chosen.tokens, _say
        )
        # In memory, so that no step waits for the disk: 2 x 6,800 x 64 numbers are 1.7 MB.
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
