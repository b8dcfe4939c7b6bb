"""Everything that the host's own samples say for certain: disks, mounts, drives, names, clock.

Owns the order of their detectors and that equal samples are looked at once.  Pure.
"""

from __future__ import annotations

from ..model import Verdict
from .clock import Clock
from .hardware import Hardware
from .reach import Reach
from .storage import Storage

PREFIXES = ("host_filesystem_", "host_mount_", "host_nvme_", "host_dns_", "host_clock_",
            "host_memory_errors_", "host_machine_checks_", "host_pcie_")  # fmt: skip
Reading = tuple[str, str, float, float]  # collectors.sample.Sample, as in Observed


class Machine:
    """The verdicts on this node's host."""

    def __init__(self, node: str) -> None:
        self._storage, self._reach = Storage(node), Reach(node)
        self._hardware, self._clock = Hardware(node), Clock(node)
        self._samples: tuple[Reading, ...] = ()
        self._verdicts: list[Verdict] = []

    def verdicts(self, samples: tuple[Reading, ...], writable: list[str]) -> list[Verdict]:
        """Faults now.  `writable`: see storage.py."""
        if samples is not self._samples:
            self._samples = samples
            own = tuple(one for one in samples if one[0].startswith(PREFIXES))
            self._verdicts = [
                *self._storage.verdicts(own, writable), *self._reach.verdicts(own),
                *self._hardware.verdicts(own), *self._clock.verdicts(own),
            ]  # fmt: skip
        return self._verdicts
