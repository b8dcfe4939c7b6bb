"""Accelerators and network cards as people see them: health and why, and whose ranks are there.

Owns joining the collectors' samples, their age and the runs' ranks.  Pure: values in, plain JSON
values out; what a reading means is in core/detect/accelerator.py and core/detect/network.py.
"""

from __future__ import annotations

from typing import Any

from holdfast.collectors.sample import Sample

from .core.detect import accelerator
from .core.detect.network import RDMA_KINDS
from .core.model import OK, SEVERITIES, UNKNOWN, RunView, Verdict
from .runner import Health

STALE_READINGS = 3.0  # a device is unknown when this many intervals brought no reading
COLLECTORS = ("nvidia", "neuron", "amd")
CARDS = "network"  # the collector that lists network cards


def devices(
    health: Health, last: tuple[Sample, ...], runs: tuple[RunView, ...],
    boot_s: float, interval_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """The devices of one collector.  `last`: its last good reading, whose age decides."""
    sights = accelerator.look(last)
    ranks = accelerator.ranks_of(last, runs)
    age_s, unread = _age(health, last, boot_s, interval_s)
    info = {}
    for sample in last:
        if sample.name == "accelerator_info":
            labels = accelerator.labels_of(sample.subject)
            info[labels.get("vendor", ""), labels.get("device", "")] = labels
    return [
        {
            "kind": "accelerator",
            "vendor": vendor,
            "device": device,
            "name": info.get((vendor, device), {}).get("name", ""),
            "pci": info.get((vendor, device), {}).get("pci", ""),
            "health": UNKNOWN if unread else sight.health,
            "why": unread or sight.why,
            "age_s": round(age_s, 3),
            "ranks": [{"run": run, "rank": rank} for run, rank in ranks.get((vendor, device), ())],
        }
        for (vendor, device), sight in sights.items()
        if device
    ]


def cards(
    health: Health, last: tuple[Sample, ...], verdicts: tuple[Verdict, ...], node: str,
    boot_s: float, interval_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """The network cards, those that are lost included.  What is wrong with one is in the verdicts:
    it takes more than one reading to see.  An interface on the address of an RDMA card is that
    card, and has a row only for what is said of itself."""
    age_s, unread = _age(health, last, boot_s, interval_s)
    place = f"node/{node}/nic/"
    said: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.subject.startswith(place):
            device = verdict.subject.removeprefix(place).partition("/")[0]
            said.setdefault(device, []).append(verdict)
    found = {}
    for sample in last:
        if sample.name == "network_info":
            labels = accelerator.labels_of(sample.subject)
            found[labels["device"]] = labels
    addresses = {one["pci"] for one in found.values()}
    rdma = {one["pci"] for one in found.values() if one["kind"] in RDMA_KINDS} - {""}
    rows = []
    for device in [*found, *(one for one in said if one not in found and one not in addresses)]:
        info = found.get(device, {})
        if info.get("pci") in rdma and info["kind"] not in RDMA_KINDS and device not in said:
            continue
        # The kernel's log names a card by its address.
        wrong = said.get(device, []) + said.get(info.get("pci") or "none", [])
        worst = max((one.severity for one in wrong), key=SEVERITIES.index, default=OK)
        whys = [one.reason.partition(": ")[2] or one.reason for one in wrong]
        rows.append({
            "kind": "network", "vendor": info.get("kind", "card"), "device": device,
            "name": info.get("driver", ""), "pci": info.get("pci", ""),
            "health": UNKNOWN if unread and not wrong else worst,
            "why": "; ".join(whys) or unread, "age_s": round(age_s, 3), "ranks": [],
        })  # fmt: skip
    return rows


def _age(
    health: Health, last: tuple[Sample, ...], boot_s: float, interval_s: float
) -> tuple[float, str]:
    """Age of the last good reading, and why it says nothing about now; "" when it does."""
    age_s = boot_s - max((one.boot_s for one in last), default=boot_s)
    if not health.up:
        return age_s, f"{health.error}; last read {age_s:.0f} s ago"
    stale = age_s > STALE_READINGS * interval_s
    return age_s, f"no reading for {age_s:.0f} s" if stale else ""
