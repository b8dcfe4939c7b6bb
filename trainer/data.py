"""Which samples each step sees.

Owns the order.  It is a function of (seed, epoch) alone, and a step's place in it of the step's
number alone: nothing is kept that could be lost.  Must not know of ranks, except for which
micro-batches are a rank's.
"""

from __future__ import annotations

import numpy as np

from .config import ConfigError


class Sampler:
    """Every sample exactly once an epoch, whatever the world; a step may cross two epochs."""

    def __init__(self, samples: int, seed: int, batch: int, micro_batches: int) -> None:
        if samples < batch * micro_batches:
            raise ConfigError(
                [f"batch x micro_batches = {batch * micro_batches}, but the data has only "
                 f"{samples} samples: set a smaller batch"])
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
                 f"set micro_batches to at least {world}"])
        return range(rank, self.micro_batches, world)


def seed_for(seed: int, step: int, micro_batch: int) -> int:
    """The generators' seed for one micro-batch, wherever it is computed (splitmix64's finisher)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_batch + 1) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) % 2**63
