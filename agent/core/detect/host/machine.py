"""Everything that the host's samples say for certain: disks, mounts, drives, names, clock, fabric.

Owns the order of their detectors and that equal samples are looked at once.  Pure.
"""

from __future__ import annotations

from ...model import Readings, Rows, Selection, Verdict
from ..devices import fabric
from . import clock, hardware, reach, storage

NAMES = storage.NAMES | reach.NAMES | hardware.NAMES | clock.NAMES | fabric.NAMES


class Machine:
    """The verdicts on this node's host."""

    def __init__(self, node: str) -> None:
        self._storage, self._reach = storage.Storage(node), reach.Reach(node)
        self._hardware, self._clock = hardware.Hardware(node), clock.Clock(node)
        self._fabric = fabric.Fabric(node)
        self._selection = Selection(NAMES.__contains__)
        self._own: Rows = ()
        self._verdicts: list[Verdict] = []

    def verdicts(self, samples: Readings, writable: list[str]) -> list[Verdict]:
        """Faults now.  `writable`: see storage.py."""
        own = self._selection.of(samples)
        if own is not self._own:  # what another collector read changes nothing here
            self._own = own
            self._verdicts = [
                *self._storage.verdicts(own, writable), *self._reach.verdicts(own),
                *self._hardware.verdicts(own), *self._clock.verdicts(own),
                *self._fabric.verdicts(own),
            ]
        return self._verdicts
