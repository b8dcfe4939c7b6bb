"""PCI devices with a driver: whether each card and each accelerator is there at all.

Owns one listing of the kernel's own table.  A device may leave its class's list for good reasons (a
bond takes two ports for one, a container takes a card along); it leaves this table when it fell off
the bus or its driver gave it up.  Virtual functions are left out: they come and go on demand.
"""

from __future__ import annotations

import os
import re

from .contract import SLOW, Metric, NoData, Roots, Sample
from .sources.files import names_in

DEVICES_MAX = 1024
DRIVERS_MAX = 512
SWITCHES = "nvidia-nvswitch"
BRIDGES = "pcieport"  # a bridge only leads to other devices
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class PciCollector:
    """How many devices have a driver, and an undeclared sample of each for the detectors."""

    name = "pci"
    pace = SLOW
    metrics = (
        Metric("host_pci_devices", "gauge",
               "PCI devices that a driver has, without bridges and virtual functions.", (), True),
        Metric("host_pci_nvswitches", "gauge", "NVSwitches that their driver has.", (), True))

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One listing.  NoData where no PCI device has a driver."""
        folder = f"{roots.sys}/bus/pci/drivers"
        found: list[str] = []
        switches = 0
        for driver in names_in(folder)[:DRIVERS_MAX]:
            if driver == BRIDGES:
                continue
            bound = [one for one in names_in(f"{folder}/{driver}") if ADDRESS.fullmatch(one)]
            switches += len(bound) if driver == SWITCHES else 0
            found += [one for one in bound
                      if not os.path.lexists(f"{folder}/{driver}/{one}/physfn")]
        if not found:
            raise NoData(f"no PCI device with a driver below {folder}")
        samples = [Sample("host_pci_devices", "", float(len(found)), boot_s)]
        if switches:
            samples.append(Sample("host_pci_nvswitches", "", float(switches), boot_s))
        return samples + [Sample("pci_bound", f"pci={one}", 1.0, boot_s)
                          for one in found[:DEVICES_MAX]]
