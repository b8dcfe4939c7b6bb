"""What memory, processors, PCIe devices and drives count and say about themselves.

Owns which counts are a fault by being there (data that is lost), and which by their rate (what was
corrected).  The kernel's log tells the same events one by one; counters also tell those
whose lines were lost or never written.  Shown, never acted on.  Pure.
"""

from __future__ import annotations

import math

from ...model import DEGRADED, FATAL, SEVERITIES, WARN, Verdict, labels_of
from ...series.window import CounterWindow
from ..detector import Detector, NodeView

# Corrected errors of one memory module or device within an hour.  A judgement: a healthy module
# has a few in a day, one that fails has thousands.
CORRECTED_AN_HOUR = 100.0
HOUR_S = 3600.0
KEYS_MAX = 2048
NEW_S = 1.0  # before the first reading of a device that was not listed
WARNINGS = {
    "spare_low": (DEGRADED, "its spare blocks run out"),
    "temperature": (WARN, "its temperature is out of range"),
    "reliability": (DEGRADED, "its media or controller have become unreliable"),
    "media_readonly": (FATAL, "it takes no writes any more"),
    "backup_failed": (DEGRADED, "its cache is not safe against loss of power"),
    "memory_region": (DEGRADED, "its persistent memory region is read-only or unreliable"),
}
NAMES = frozenset((
    "host_memory_errors_total", "host_machine_checks_total", "host_pcie_device_errors_total",
    "host_pcie_errors_total", "host_nvme_critical_warning", "host_nvme_live",
    "host_nvme_used_ratio", "host_nvme_media_errors_total", "host_nvme_temperature_alarm",
))
Finding = tuple[str, str, str, str]  # fault, thing, severity, why


class Hardware(Detector):
    """The verdicts on this node's memory, processors, PCIe devices and drives."""

    name = "hardware"
    reads = tuple(sorted(NAMES))
    warm_s = HOUR_S

    def __init__(self, node: str) -> None:
        super().__init__(node)
        # From one to two hours: it moves on by whole hours.
        self._growth = CounterWindow(HOUR_S, HOUR_S, KEYS_MAX, slack=math.inf)
        self._pcie_s = -1.0  # when PCIe was read first

    def look(self, view: NodeView) -> list[Verdict]:
        """Faults now, one for each thing and fault, with everything that speaks for it."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for name, subject, value, boot_s in view.rows:
            if name == "host_pcie_errors_total":
                self._pcie_s = boot_s if self._pcie_s < 0.0 else self._pcie_s
                continue  # a sum, for people
            if name not in NAMES:
                continue
            labels = labels_of(subject)
            grown = 0.0
            if name.endswith("_total"):
                # A device is listed with its first error: before that it had none.
                late = name == "host_pcie_device_errors_total" and 0.0 <= self._pcie_s < boot_s
                if late and self._growth.newest_s(name + subject) < 0.0:
                    self._growth.add(name + subject, boot_s - NEW_S, 0.0)
                self._growth.add(name + subject, boot_s, value)
                grown = self._growth.grown(name + subject).amount
            for fault, thing, severity, why in _look(name, labels, value, grown):
                found.setdefault((fault, thing), []).append((severity, why))
        return [self._verdict(*key, findings) for key, findings in found.items()]

    def _verdict(self, fault: str, thing: str, findings: list[tuple[str, str]]) -> Verdict:
        severity = max((one for one, _ in findings), key=SEVERITIES.index)
        whys = "; ".join(why for _, why in findings)
        return self.node_verdict(fault, thing, severity, f"{thing.partition('/')[2]}: {whys}")


def _look(name: str, labels: dict[str, str], value: float, grown: float) -> list[Finding]:
    if name.startswith("host_nvme_"):
        return _drive(name, labels, value, grown)
    if name == "host_memory_errors_total":
        thing = f"memory/{labels.get('controller', '')}/{labels.get('module', '')}"
        return _memory(thing, labels.get("error", ""), value, grown)
    if name == "host_machine_checks_total":
        kind = labels.get("kind", "")
        # A machine that had an exception and lives kept going by luck or by killing a process.
        if kind in ("exception", "deferred") and grown > 0.0:
            why = f"{grown:.0f} machine checks ({kind}) in the last hours"
            return [("cpu_machine_check", "processor/machine check", DEGRADED, why)]
        return []
    return _pcie(labels, grown)


def _memory(thing: str, error: str, value: float, grown: float) -> list[Finding]:
    if error == "uncorrected":
        if value <= 0.0:
            return []
        why = f"{value:.0f} uncorrected errors since the driver was loaded"
        return [("cpu_machine_check", thing, FATAL, why)]
    if grown < CORRECTED_AN_HOUR:
        return []
    return [("cpu_machine_check", thing, WARN, f"{grown:.0f} corrected errors in the last hours")]


def _pcie(labels: dict[str, str], grown: float) -> list[Finding]:
    severity, device = labels.get("severity", ""), labels.get("device", "")
    least = CORRECTED_AN_HOUR if severity == "corrected" else 1.0
    if grown < least:
        return []  # what is there since the boot was counted while devices were found
    worst = {"fatal": FATAL, "nonfatal": DEGRADED}.get(severity, WARN)
    why = f"{grown:.0f} {severity} errors ({labels.get('error', '')}) in the last hours"
    return [("pcie_error", f"pcie/{device}", worst, why)]


def _drive(name: str, labels: dict[str, str], value: float, grown: float) -> list[Finding]:
    severity, why = "", ""
    if name == "host_nvme_critical_warning" and value > 0.0:
        severity, why = WARNINGS.get(labels.get("warning", ""), ("", ""))
    elif name == "host_nvme_temperature_alarm" and value > 0.0:
        severity, why = WARNINGS["temperature"]
    elif name == "host_nvme_live" and value <= 0.0:
        state = labels.get("state", "")
        severity = FATAL if state == "dead" else DEGRADED
        why = f"its controller is {state}"
    elif name == "host_nvme_used_ratio" and value >= 1.0:
        severity, why = WARN, f"{value:.0%} of its rated life is used"
    elif name == "host_nvme_media_errors_total" and grown > 0.0:
        severity, why = DEGRADED, f"{grown:.0f} new media errors in the last hours"
    if not severity:
        return []
    return [("nvme_failing", f"drive/{labels.get('device', '')}", severity, why)]
