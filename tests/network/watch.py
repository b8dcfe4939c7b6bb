"""Reads a tree as the agent does, again and again, and says what is concluded."""

from __future__ import annotations

from detectors import judged

from holdfast.agent.core.detect.network.network import NetworkMemory, Networks
from holdfast.agent.core.model import readings_of
from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.network import NetworkCollector
from holdfast.collectors.pci import PciCollector
from holdfast.collectors.rdma import RdmaCollector

from .tree import Tree

READ_S = 15.0


def read(roots: Roots, boot_s: float = 1.0) -> tuple[Sample, ...]:
    """Both collectors, as the agent joins them."""
    found = NetworkCollector().collect(roots, boot_s)
    rdma = RdmaCollector()
    return tuple(found + (rdma.collect(roots, boot_s) if not rdma.here(roots) else []))


def values(samples) -> dict[tuple[str, str], float]:
    return {(one.name, one.subject): one.value for one in samples}


def unread(samples) -> dict[str, float]:
    return {one.subject: one.value for one in samples
            if one.name == "network_unread_files" and one.value}


def bus(roots: Roots, boot_s: float) -> tuple[Sample, ...]:
    """What has a driver; nothing on a virtual machine."""
    try:
        return tuple(PciCollector().collect(roots, boot_s))
    except NoData:
        return ()


class Watch:
    """One node, read every 15 s, and what is concluded."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.boot_s = tree, 1000.0
        self.networks, self.memory = Networks("n"), NetworkMemory()
        self.read()

    def read(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.boot_s += READ_S
            self.samples = read(self.tree.roots, self.boot_s)
            seen = readings_of((*self.samples, *bus(self.tree.roots, self.boot_s)))
            self.verdicts = judged(self.networks, seen, self.memory)
        return [f"{one.fault} ({one.severity}) {one.subject}: {one.reason}"
                for one in self.verdicts]
