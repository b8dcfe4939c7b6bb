"""Accelerators as people see them: health and why, and whose ranks compute there.

Owns joining the collectors' samples, their age and the runs' ranks.  Pure: values in, plain JSON
values out; what a reading means is in core/detect/accelerator.py.
"""

from __future__ import annotations

from typing import Any

from holdfast.collectors.sample import Sample

from .core.detect import accelerator
from .core.model import UNKNOWN, RunView
from .runner import Health

STALE_READINGS = 3.0  # a device is unknown when this many intervals brought no reading
COLLECTORS = ("nvidia", "neuron")


def devices(
    health: Health, last: tuple[Sample, ...], runs: tuple[RunView, ...],
    boot_s: float, interval_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """The devices of one collector.  `last`: its last good reading, whose age decides."""
    sights = accelerator.look(last)
    ranks = accelerator.ranks_of(last, runs)
    age_s = boot_s - max((one.boot_s for one in last), default=boot_s)
    stale = age_s > STALE_READINGS * interval_s
    unread = f"no reading for {age_s:.0f} s" if stale else ""
    if not health.up:
        unread = f"{health.error}; last read {age_s:.0f} s ago"
    info = {}
    for sample in last:
        if sample.name == "accelerator_info":
            labels = accelerator.labels_of(sample.subject)
            info[labels.get("vendor", ""), labels.get("device", "")] = labels
    return [
        {
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
