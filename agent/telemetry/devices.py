"""Accelerators and network cards as people see them: health and why, and whose ranks are there.

Owns joining the collectors' samples, their age and the runs' ranks.  Pure: values in, plain JSON
values out; what a reading means is decided in agent/core/detect/devices and network.
"""

from __future__ import annotations

from typing import Any

from holdfast.collectors.contract import Sample

from ..core.detect.devices import accelerator
from ..core.detect.network.network import RDMA_KINDS
from ..core.model import OK, SEVERITIES, UNKNOWN, RunView, Verdict, labels_of, node_subject
from ..core.parse.kernel_line import pci_of
from .collectors import Health

STALE_READINGS = 3.0  # a device is unknown when this many intervals brought no reading
COLLECTORS = ("nvidia", "neuron", "amd")
SPOKEN_OF = ("nvidia", "neuron")  # vendors whose devices the kernel's log names
CARDS = "network"  # the collector that lists network cards


def devices(
    health: Health, last: tuple[Sample, ...], runs: tuple[RunView, ...],
    verdicts: tuple[Verdict, ...], node: str, boot_s: float, interval_s: float,
) -> list[dict[str, Any]]:
    """The devices of one collector.  `last` is its last good reading, whose age decides.  The
    kernel's lines about a device are in the verdicts: a driver may call a device healthy that has
    fallen off the bus.  A device that the collector does not list has a row when the kernel names
    it."""
    sights = accelerator.sights(last)
    ranks = accelerator.ranks_of(last, runs)
    age_s, unread = _age(health, last, boot_s, interval_s)
    info = {}
    for sample in last:
        if sample.name == "accelerator_info":
            labels = labels_of(sample.subject)
            info[labels.get("vendor", ""), labels.get("device", "")] = labels
    vendor = health.name
    place = node_subject(node, f"{accelerator.SCOPE.get(vendor, 'gpu')}/")
    heard = tuple(one for one in verdicts if one.detector != accelerator.Accelerators.name)
    by_kernel = _said(heard, place)
    # A fresh reading holds the driver's own declarations; verdicts keep them while there is none.
    said = _said(verdicts, place) if unread else by_kernel
    rows = []
    for (maker, device), sight in sights.items():
        if not device:
            continue
        about = info.get((maker, device), {})
        names = (device, pci_of(about.get("pci", "")))
        wrong = [verdict for name in names for verdict in said.get(name, ())]
        for name in names:
            by_kernel.pop(name, None)
        read = (UNKNOWN, unread) if unread else (sight.health, sight.why)
        there = [{"run": run, "rank": rank} for run, rank in ranks.get((maker, device), ())]
        rows.append(_row("accelerator", maker, device, about, read, wrong, age_s, there))
    if not last and not health.up and not health.absent and health.read_s:
        rows.append(_row("accelerator", vendor, "", {}, (UNKNOWN, unread), [], age_s, []))
    unlisted = by_kernel if vendor in SPOKEN_OF else {}
    rows += [_row("accelerator", vendor, device, {}, (OK, ""), wrong, age_s, [])
             for device, wrong in unlisted.items()]
    return rows


def cards(
    health: Health, last: tuple[Sample, ...], verdicts: tuple[Verdict, ...], node: str,
    boot_s: float, interval_s: float,
) -> list[dict[str, Any]]:
    """The network cards, lost ones included.  Their faults are in the verdicts, since one reading
    does not show them.  An interface on the address of an RDMA card is that card, and has a row
    only for verdicts of its own."""
    age_s, unread = _age(health, last, boot_s, interval_s)
    said = _said(verdicts, node_subject(node, "nic/"))
    found = {}
    for sample in last:
        if sample.name == "network_info":
            labels = labels_of(sample.subject)
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
        about = {"name": info.get("driver", ""), "pci": info.get("pci", "")}
        read = (UNKNOWN, unread) if unread and not wrong else (OK, "")
        kind = info.get("kind", "card")
        rows.append(_row("network", kind, device, about, read, wrong, age_s, []))
    return rows


def _said(verdicts: tuple[Verdict, ...], place: str) -> dict[str, list[Verdict]]:
    """The verdicts about each device, by its number, its name or its address."""
    said: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.subject.startswith(place):
            device = verdict.subject.removeprefix(place).partition("/")[0]
            said.setdefault(device, []).append(verdict)
    return said


def _row(
    kind: str, vendor: str, device: str, about: dict[str, str], read: tuple[str, str],
    wrong: list[Verdict], age_s: float, ranks: list[dict[str, Any]],
) -> dict[str, Any]:
    """One device.  `read` is health and reason by its reading; the worst of reading and verdicts
    counts."""
    worst_first = sorted(wrong, key=lambda one: -SEVERITIES.index(one.severity))
    whys = dict.fromkeys([*(_why(one.reason) for one in worst_first), read[1]])
    return {
        "kind": kind, "vendor": vendor, "device": device,
        "name": about.get("name", ""), "pci": about.get("pci", ""),
        "health": max(read[0], *(one.severity for one in wrong), OK, key=SEVERITIES.index),
        "why": "; ".join(one for one in whys if one), "age_s": round(age_s, 3), "ranks": ranks,
    }


def _why(reason: str) -> str:
    """A verdict's reason without the device, which the row names: `XID 79 on gpu/0000:4e:00 of a:
    it fell off` is `XID 79: it fell off`."""
    head, _, text = reason.partition(": ")
    event, on, _ = head.partition(" on ")
    return f"{event}: {text}" if on and text else text or reason


def _age(
    health: Health, last: tuple[Sample, ...], boot_s: float, interval_s: float
) -> tuple[float, str]:
    """Age of the last good reading, and why it cannot speak for now; "" when it can."""
    age_s = boot_s - max((one.boot_s for one in last), default=boot_s)
    if not last:
        return 0.0, health.error or "not read yet"
    if not health.up:
        return age_s, f"{health.error}; last read {age_s:.0f} s ago"
    stale = age_s > STALE_READINGS * interval_s
    return age_s, f"no reading for {age_s:.0f} s" if stale else ""
