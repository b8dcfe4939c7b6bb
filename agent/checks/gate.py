"""Checks of what is known already: nothing is loaded, nothing is computed, ranks are not disturbed.

Owns the functions that the table's rows name, each called in a child with the Facts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from ..core.checks.verdict import Answer, amount
from ..core.detect.devices import accelerator, fabric
from ..core.model import DEGRADED, FATAL, WARN, labels_of, subject_of
from .facts import Facts
from .paths import written_and_read
from .readings import Reading, detected, read

VENDORS = ("nvidia", "neuron", "amd")
NVIDIA_PCI, DISPLAY = "0x10de", ("0x0302", "0x0300")  # 3D controller, VGA
MEMORY_LOW_SHARE = 0.05
DRIFT_MOST = 8


def incidents(facts: Facts) -> Answer:
    """Open incidents of the node and its devices, by the agent's own severity."""
    if facts.status is None:
        return Answer(said="", unknown=(facts.no_agent or "no agent runs here",))
    found = [one for one in facts.status.get("incidents", ()) if isinstance(one, dict)
             and one.get("state") not in ("closed", "taken_back")
             and subject_of(str(one.get("subject"))).node == facts.status.get("node")]

    def of(*severities: str) -> tuple[str, ...]:
        return tuple(f"{one['fault']}: {one['reason']}" for one in found
                     if one.get("severity") in severities)

    faults = dict.fromkeys(str(one.get("fault")) for one in found)
    return Answer(said="the agent knows of nothing", critical=of(FATAL),
                  warning=of(DEGRADED, WARN),
                  todo="; ".join(f"`holdfast explain {one}`" for one in faults))


def drift(facts: Facts) -> Answer:
    """Where most nodes agree, and this one has something else.  A roll-out begins like that, so it
    only warns."""
    if facts.drift is None:
        return Answer(unknown=(facts.no_agent or "no agent runs here",))
    node, unlike = str(facts.drift.get("node")), []
    for one in facts.drift.get("differences", ()):
        own = dict(one["nodes"]).get(node)
        if own is not None and one["most"]:
            unlike.append(f"{one['key']} is {own or 'not there'}, and {one['agree']} of "
                          f"{one['of']} nodes have {one['most']}")
    others = len(facts.drift.get("identities", {})) - 1
    said = f"as {others} others have it" if others > 0 else "no other node is known"
    return Answer(said, warning=tuple(unlike[:DRIFT_MOST]))


def peers(facts: Facts) -> Answer:
    """Made by several nodes together (agent/peers), which leave it with each of them."""
    return Answer(unknown=("it takes several nodes",))


def devices(facts: Facts) -> Answer:
    """The vendors' drivers against the bus, and both against the profile."""
    reading = read(facts, VENDORS)
    lost = _lost(reading)
    models = _models(reading, lost)
    broken = [f"the driver of {name} does not answer: {why}"
              for name, why in reading.failed.items()]
    on_bus, named = _nvidia_on_bus(facts.roots.sys), len(models.get("nvidia", ()))
    if on_bus > named and "nvidia" not in reading.failed:
        broken.append(f"{on_bus} NVIDIA GPUs are on the PCI bus, and the driver knows {named}"
                      + (f" ({reading.absent['nvidia']})" if not named else ""))
    profile = facts.profile
    if profile is not None:
        there = models.get(profile.vendor, [])
        if len(there) != profile.devices:
            broken.append(f"{len(there)} {profile.vendor} devices, and {profile.name} has "
                          f"{profile.devices} ({profile.source}, {profile.date})")
        others = sorted({one for one in there if profile.model not in one})
        broken += [f"a device is {one}, and {profile.name} has {profile.model}" for one in others]
    count = "; ".join(f"{len(names)} x {' and '.join(sorted(set(names)))}"
                      for names in models.values()) or "no accelerator"
    against = f", as {profile.name} has them" if profile is not None else ", no profile known"
    broken += [f"the driver says that {vendor}/{device} is lost" for vendor, device in sorted(lost)
               if profile is None or profile.vendor != vendor]
    missing = profile.devices - len(models.get(profile.vendor, ())) if profile is not None else 0
    one_by_one = len(broken) == len(lost) or len(broken) == 1 and len(lost) == missing
    return Answer(said=count + against, critical=tuple(broken),
                  devices=_of(lost) if one_by_one else ())


def _lost(reading: Reading) -> set[tuple[str, str]]:
    return {(labels["vendor"], labels.get("device", "")) for one in reading.samples
            if one.name == accelerator.LOST and one.value > 0
            for labels in (labels_of(one.subject),)}


def _of(keys: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """These devices, as subjects name them."""
    return tuple(f"{accelerator.SCOPE.get(vendor, 'gpu')}/{device}"
                 for vendor, device in sorted(keys))


def _models(reading: Reading, lost: set[tuple[str, str]]) -> dict[str, list[str]]:
    """Vendor -> names of its devices that are not lost."""
    found: dict[str, list[str]] = {}
    for one in reading.samples:
        labels = labels_of(one.subject) if one.name == "accelerator_info" else {}
        if labels and (labels["vendor"], labels.get("device", "")) not in lost:
            name = labels.get("name") or labels.get("instance_type") or labels["vendor"]
            found.setdefault(labels["vendor"], []).append(name)
    return found


def _nvidia_on_bus(sys: str) -> int:
    count = 0
    for device in Path(sys, "bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue  # it left the bus meanwhile
        # A virtual function belongs to a guest.
        count += vendor == NVIDIA_PCI and kind[:6] in DISPLAY and not (device / "physfn").exists()
    return count


def accelerators(facts: Facts) -> Answer:
    """What each device's driver says of it, and lanes of PCIe that it does not use."""
    reading = read(facts, VENDORS)
    found = accelerator.sights(reading.samples)
    critical = tuple(f"{'/'.join(key)}: {sight.why}" for key, sight in found.items()
                     if sight.health == FATAL)
    warning = [f"{'/'.join(key)}: {sight.why}" for key, sight in found.items()
               if sight.health in (DEGRADED, WARN)]
    width = {one.subject: one.value for one in reading.samples
             if one.name == "accelerator_pcie_width"}
    for one in reading.samples:
        now = width.get(one.subject, one.value)
        if one.name == "accelerator_pcie_width_max" and now < one.value:
            labels = labels_of(one.subject)
            warning.append(f"{labels.get('vendor')}/{labels.get('device')} uses {now:.0f} of "
                           f"{one.value:.0f} PCIe lanes")
    return Answer(said=f"{len(found)} devices are well" if found else "no accelerator",
                  critical=critical, warning=tuple(warning),
                  unknown=tuple(f"{name}: {why}" for name, why in reading.failed.items()),
                  devices=_of(key for key, sight in found.items() if sight.health == FATAL))


def fabric_state(facts: Facts) -> Answer:
    """NVLink's fabric as the GPUs see it now.  For how long is the agent's to say."""
    reading = read(facts, ("nvidia",))
    able = sum(one.name == fabric.STATE and one.value > 0 for one in reading.samples)
    outside = [labels for one in reading.samples
               if one.name == fabric.OUTSIDE and one.value > 0
               for labels in (labels_of(one.subject),) if labels.get("fault") in fabric.STATES]
    said = f"{able} GPUs are in the fabric" if able else "no NVLink fabric"
    return Answer(said=said, warning=tuple(
        f"GPU {one.get('device')} is not in the NVLink fabric ({one['fault']})"
        for one in outside))


def network(facts: Facts) -> Answer:
    return detected(facts, ("network",), ("network", "rdma"), "every card with a link is well")


def hardware(facts: Facts) -> Answer:
    return detected(facts, ("hardware",), ("hardware_errors", "pci", "nvme", "nvme_smart"),
                    "nothing reports a failure")


def memory(facts: Facts) -> Answer:
    """The host's limits as the agent sees them, and what is to be had now."""
    answer = detected(facts, ("host",), ("host", "tasks", "shared_memory"), "")
    of = {one.name: one.value for one in read(facts, ("host",)).samples}
    total = of.get("host_memory_total_bytes", 0.0)
    left = of.get("host_memory_available_bytes", 0.0)
    words = f"{amount(left, 'B')} of {amount(total, 'B')} to be had"
    if total and left < MEMORY_LOW_SHARE * total:
        return Answer(warning=(*answer.warning, words), unknown=answer.unknown)
    return Answer(words, answer.critical, answer.warning, answer.unknown, todo=answer.todo)


def disk(facts: Facts) -> Answer:
    return detected(facts, ("storage",), ("disk",), "every file system has room")


def clock(facts: Facts) -> Answer:
    """Whether nobody keeps it for good, one look does not tell: that is the agent's to warn of."""
    of = {one.name: one.value for one in read(facts, ("clock",)).samples}
    kept = of.get("host_clock_synchronized", 1.0) > 0.0
    return detected(facts, ("clock",), ("clock",), "the clock is kept" if kept else (
        "no time service keeps it now: after a boot that takes minutes, and later the agent warns"))


def paths(facts: Facts) -> Answer:
    """Each path in turn; which one hangs is on standard output when the deadline comes."""
    broken, took = [], []
    for path in facts.paths:
        print(path, flush=True)
        begin_s = time.monotonic()
        why = written_and_read(path)
        took.append(f"{path} in {time.monotonic() - begin_s:.2f} s")
        broken += [f"{path}: {why}"] if why else []
    return Answer(said=f"1 MB written and read back: {', '.join(took)}", critical=tuple(broken))
