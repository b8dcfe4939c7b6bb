"""A node's samples in parts that change at different paces, so that what is equal is judged once.

Owns the split.  Collectors are read at their own intervals and the agent hands over all that is
known each time: of 3,400 readings of a large node, the 1,500 of its cores are new every second,
the host's other ones often, and everything else every 15 s.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

Reading = tuple[str, str, float, float]  # collectors.sample.Sample, as in Observed
CORES = "host_cpu_seconds_total"
HOST = "host_"


class Parts(NamedTuple):
    """Each part is the very tuple of the last time while it is equal."""

    cores: tuple[Reading, ...] = ()
    host: tuple[Reading, ...] = ()  # names that begin so, without the cores
    rest: tuple[Reading, ...] = ()


class Readings:
    """See the module."""

    def __init__(self) -> None:
        self._given: tuple[Reading, ...] = ()
        self._parts = Parts()

    def split(self, samples: tuple[Reading, ...]) -> Parts:
        """The parts, in the samples' order."""
        if samples is self._given:
            return self._parts
        self._given = samples
        cores: list[Reading] = []
        host: list[Reading] = []
        rest: list[Reading] = []
        for one in samples:
            name = one[0]
            if name == CORES:
                cores.append(one)
            elif name.startswith(HOST):
                host.append(one)
            else:
                rest.append(one)
        now = (tuple(part) for part in (cores, host, rest))
        before = self._parts
        self._parts = Parts(*(old if new == old else new
                              for new, old in zip(now, before, strict=True)))
        return self._parts
