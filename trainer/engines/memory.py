"""What a rank needs in memory, by the size of its group: the model that chooses the group.

Owns the arithmetic.  A model of memory and not a promise: what the allocator loses to fragments is
in the share of a device that is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

IN_FLIGHT = 2  # units that are gathered at once: the one that computes, and the next


class Need(NamedTuple):
    """Bytes."""

    weights: int  # of all parameters
    gradients: int  # of those that are trained
    moments: int  # of AdamW
    unit: int  # the largest unit's parameters, gathered
    whole: int  # parameters of no unit: gathered from the forward to the backward pass
    activations: int = 0  # kept for one backward pass

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[str]) -> Need:
        sizes = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        by_unit = [sum(size for name, size in sizes.items() if name.startswith(f"{unit}."))
                   for unit in units]
        gradients = sum(size for name, size in sizes.items() if name in trained)
        return cls(sum(sizes.values()), gradients, 2 * sum(sizes.values()),
                   max(by_unit, default=0), sum(sizes.values()) - sum(by_unit))

    def with_activations(self, nbytes: int) -> Need:
        return self._replace(activations=nbytes)

    def bytes(self, size: int) -> int:
        """On one rank of a group of `size`."""
        state = (self.weights + self.gradients + self.moments) // size
        # Gathered parameters have gathered gradients beside them in the backward pass.
        return state + 2 * (self.whole + IN_FLIGHT * self.unit) + self.activations

    def words(self, size: int) -> str:
        state = (self.weights + self.gradients + self.moments) / size
        gathered = 2 * (self.whole + IN_FLIGHT * self.unit)
        return (f"{self.bytes(size) / 1e6:.1f} MB a rank: weights, gradients and moments "
                f"{state / 1e6:.1f}, gathered {gathered / 1e6:.1f}, "
                f"activations {self.activations / 1e6:.1f}")
