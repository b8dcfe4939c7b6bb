"""Errors that memory, processors and PCIe devices counted: EDAC, machine checks, AER.

Owns counters that the kernel keeps whether or not anybody reads its log.  Reads /sys and
/proc/interrupts only.  Not read: the processors' own error banks below machinecheck, whose files
interrupt every core when they are read (some 4,000 of them on a machine with 192 cores); their
interrupts are counted instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .nvme import word_of
from .roots import Roots, read_text
from .sample import Metric, NoData, Sample

CONTROLLERS_MAX = 64
MODULES_MAX = 256
DEVICES_MAX = 1024  # of PCIe, looked at
ROWS_MAX = 512  # of PCIe, named
INTERRUPTS_MAX_BYTES = 8 << 20  # 192 columns and the rows that matter stand last
SEVERITIES = {"correctable": "corrected", "nonfatal": "nonfatal", "fatal": "fatal"}
CHECKS = {"MCE:": "exception", "DFR:": "deferred", "THR:": "threshold", "TRM:": "thermal"}
Reading = tuple[str, str, float]  # name, subject, value


class HardwareErrorsCollector:
    """See the module."""

    name = "hardware_errors"
    fast = False
    metrics = (
        Metric("host_memory_errors_total", "counter",
               "Errors of main memory by controller and module, since the driver was loaded.",
               ("controller", "module", "error"), True),
        Metric("host_machine_checks_total", "counter",
               "Interrupts by which processors told of errors, by kind.", ("kind",), True),
        Metric("host_pcie_errors_total", "counter",
               "Errors of all PCIe devices, by severity.", ("severity",), True),
        Metric("host_pcie_device_errors_total", "counter",
               "Errors of a PCIe device, by kind; only those that it ever had.",
               ("device", "severity", "error")),
    )  # fmt: skip

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData where none of the three is to be had."""
        found = [*_memory(roots), *_checks(roots), *_pcie(roots)]
        if not found:
            raise NoData("no EDAC, machine-check or AER counters: a virtual machine or container")
        return [Sample(name, subject, value, boot_s) for name, subject, value in found]


def _pcie(roots: Roots) -> Iterator[Reading]:
    """Sums over the node, and each count that is not zero: a healthy node has 3 series."""
    folder = f"{roots.sys}/bus/pci/devices"
    try:
        devices = sorted(os.listdir(folder))[:DEVICES_MAX]
    except OSError:
        return
    sums: dict[str, float] = {}
    rows = 0
    for device in devices:
        for file, severity in SEVERITIES.items():
            counts = _counts(f"{folder}/{device}/aer_dev_{file}")
            if counts is None:
                break  # it has no AER at all
            sums[severity] = sums.get(severity, 0.0) + sum(counts.values())
            for error, count in counts.items():
                if count > 0.0 and rows < ROWS_MAX:
                    rows += 1
                    subject = f"device={device},severity={severity},error={error}"
                    yield "host_pcie_device_errors_total", subject, count
    for severity, count in sums.items():
        yield "host_pcie_errors_total", f"severity={severity}", count


def _counts(path: str) -> dict[str, float] | None:
    """`RxErr 3` a line, with a TOTAL last, which the sum of the others is."""
    try:
        text = read_text(path, 4096)
    except NoData:
        return None
    found: dict[str, float] = {}
    for line in text.splitlines():
        error, _, count = line.strip().rpartition(" ")
        if error and not error.startswith("TOTAL") and _is_count(count) and error.isascii():
            found[error.replace(",", " ")] = float(count)
    return found


def _memory(roots: Roots) -> Iterator[Reading]:
    folder = f"{roots.sys}/devices/system/edac/mc"
    for controller in _listed(folder, "mc")[:CONTROLLERS_MAX]:
        place = f"{folder}/{controller}"
        modules = [(one, "dimm_") for one in _listed(place, "dimm") + _listed(place, "rank")]
        if not modules:
            modules = [(one, "") for one in _listed(place, "csrow")]
        labels: set[str] = set()
        for module, prefix in modules[:MODULES_MAX]:
            label = word_of(f"{place}/{module}/dimm_label") or module
            label = module if label in labels else label
            labels.add(label)
            yield from _pair(f"{place}/{module}/{prefix}", "", controller, label)
        # Those that the controller could not place; without modules, all of them.
        suffix = "_noinfo" if modules else ""
        yield from _pair(f"{place}/", suffix, controller, "unknown")


def _pair(prefix: str, suffix: str, controller: str, module: str) -> Iterator[Reading]:
    for key, error in (("ce", "corrected"), ("ue", "uncorrected")):
        text = word_of(f"{prefix}{key}{suffix}_count")
        if _is_count(text):
            subject = f"controller={controller},module={module},error={error}"
            yield "host_memory_errors_total", subject, float(text)


def _checks(roots: Roots) -> Iterator[Reading]:
    try:
        text = read_text(f"{roots.proc}/interrupts", INTERRUPTS_MAX_BYTES)
    except NoData:
        return
    for line in text.splitlines():
        head = line.lstrip()[:4]
        if head in CHECKS:
            counts = [float(one) for one in line.split()[1:] if _is_count(one)]
            if counts:
                yield "host_machine_checks_total", f"kind={CHECKS[head]}", sum(counts)


def _listed(folder: str, prefix: str) -> list[str]:
    """Names of the form PREFIX and a number."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(
        (one for one in names if one.startswith(prefix) and one[len(prefix) :].isdecimal()),
        key=lambda one: int(one[len(prefix) :]),
    )


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20
