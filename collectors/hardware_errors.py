"""Errors that memory, processors and PCIe devices counted: EDAC, machine checks, AER.

Owns counters that the kernel keeps whether or not anybody reads its log.  Reads /sys and
/proc/interrupts only.  Not read: the processors' own error banks below machinecheck, whose files
interrupt every core when they are read (some 4,000 of them on a machine with 192 cores); their
interrupts are counted instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .contract import NODE_EXPORTER, SLOW, Metric, NoData, Roots, Sample, legible
from .sources.files import is_count, names_in, read_text, text_of, word_of

CONTROLLERS_MAX = 64
MODULES_MAX = 256
DEVICES_MAX = 1024  # of PCIe, looked at
ROWS_MAX = 512  # of PCIe, named
INTERRUPTS_MAX_BYTES = 8 << 20  # 192 columns and the rows that matter stand last
HEADS_MAX = 8  # the name of a row may stand in another row's text as well
LEAD_MAX = 16  # spaces in front of a row's name
SEVERITIES = {"correctable": "corrected", "nonfatal": "nonfatal", "fatal": "fatal"}
CHECKS = {"MCE:": "exception", "DFR:": "deferred", "THR:": "threshold", "TRM:": "thermal"}
TURNS = 4  # many files, or a long one, are looked at once in so many readings
CHECKS_TURN = 1  # an odd one: processes are looked at in each second reading, the even ones
Reading = tuple[str, str, float]  # name, subject, value


class Device(NamedTuple):
    """What a PCIe device counted when it was looked at."""

    boot_s: float
    counts: dict[str, dict[str, float]]  # by severity and error


class HardwareErrorsCollector:
    """Counters of EDAC, PCIe AER and machine checks; `collect` raises NoData where none is kept."""

    name = "hardware_errors"
    pace = SLOW
    metrics = (
        Metric("host_memory_errors_total", "counter",
               "Errors of main memory by controller and module, since the driver was loaded.",
               ("controller", "module", "error"), True, NODE_EXPORTER),
        Metric("host_machine_checks_total", "counter",
               "Interrupts by which processors told of errors, by kind.", ("kind",), True),
        Metric("host_pcie_errors_total", "counter",
               "Errors of all PCIe devices, by severity.", ("severity",), True),
        Metric("host_pcie_device_errors_total", "counter",
               "Errors of a PCIe device, by kind; only those that it ever had.",
               ("device", "severity", "error")),
    )

    def __init__(self) -> None:
        self._turn = -1
        self._pcie: dict[str, Device] = {}
        self._checks: list[Sample] = []

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData where none of the three is to be had."""
        first = self._turn < 0
        self._turn = (self._turn + 1) % TURNS
        if first or self._turn == CHECKS_TURN:
            self._checks = [Sample(*one, boot_s) for one in (*_checks(roots), *_memory(roots))]
        self._look(f"{roots.sys}/bus/pci/devices", boot_s)
        found = [*self._checks]
        found += _pcie(self._pcie, boot_s)
        if not found:
            raise NoData("no EDAC, machine-check or AER counters: a virtual machine or container")
        return found

    def _look(self, folder: str, boot_s: float) -> None:
        """Asks every fourth device, and all of them the first time: the 700 files of a machine with
        eight GPUs would be most of what the slow set costs."""
        devices = names_in(folder)[:DEVICES_MAX]
        for place, device in enumerate(devices):
            if device not in self._pcie or place % TURNS == self._turn:
                self._pcie[device] = Device(boot_s, _aer(f"{folder}/{device}"))
        for device in self._pcie.keys() - set(devices):
            del self._pcie[device]


def _aer(folder: str) -> dict[str, dict[str, float]]:
    """Counts by severity and error; nothing for a device that has no AER."""
    found: dict[str, dict[str, float]] = {}
    for file, severity in SEVERITIES.items():
        counts = _counts(f"{folder}/aer_dev_{file}")
        if counts is None:
            break
        found[severity] = counts
    return found


def _counts(path: str) -> dict[str, float] | None:
    """Counts by error from lines `RxErr 3`.  The last line is their TOTAL, which is not kept."""
    try:
        lines = read_text(path, 4096).splitlines()
    except NoData:
        return None
    if lines and lines[-1].startswith("TOTAL") and lines[-1].endswith(" 0"):
        return {}  # as nearly always
    found: dict[str, float] = {}
    for line in lines:
        error, _, count = line.strip().rpartition(" ")
        if error and not error.startswith("TOTAL") and is_count(count) and error.isascii():
            found[error.replace(",", " ")] = float(count)
    return found


def _pcie(devices: dict[str, Device], boot_s: float) -> Iterator[Sample]:
    """Sums over the node, and each count that is not zero: a healthy node has 3 series."""
    sums: dict[str, float] = {}
    rows = 0
    for name, device in devices.items():
        for severity, counts in device.counts.items():
            sums[severity] = sums.get(severity, 0.0) + sum(counts.values())
            for error, count in counts.items():
                if count > 0.0 and rows < ROWS_MAX:
                    rows += 1
                    subject = f"device={legible(name)},severity={severity},error={error}"
                    yield Sample("host_pcie_device_errors_total", subject, count, device.boot_s)
    for severity, count in sums.items():
        yield Sample("host_pcie_errors_total", f"severity={severity}", count, boot_s)


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
        # Errors that the controller could not place; without modules, all errors.
        suffix = "_noinfo" if modules else ""
        yield from _pair(f"{place}/", suffix, controller, "unknown")


def _pair(prefix: str, suffix: str, controller: str, module: str) -> Iterator[Reading]:
    for key, error in (("ce", "corrected"), ("ue", "uncorrected")):
        text = word_of(f"{prefix}{key}{suffix}_count")
        if is_count(text):
            subject = f"controller={controller},module={module},error={error}"
            yield "host_memory_errors_total", subject, float(text)


def _checks(roots: Roots) -> Iterator[Reading]:
    """Rows of /proc/interrupts, found from its end: the table may be of megabytes."""
    text = text_of(f"{roots.proc}/interrupts", INTERRUPTS_MAX_BYTES)
    for head, kind in CHECKS.items():
        counts = [float(one) for one in _row(text, head).split() if is_count(one)]
        if counts:
            yield "host_machine_checks_total", f"kind={kind}", sum(counts)


def _row(text: str, head: str) -> str:
    """The text behind `head` on the last line that begins with it; "" without one."""
    at = len(text)
    for _ in range(HEADS_MAX):
        at = text.rfind(head, 0, at)
        if at < 0:
            break
        begin = text.rfind("\n", 0, at) + 1
        if at - begin < LEAD_MAX and not text[begin:at].strip():
            return text[at + len(head) :].partition("\n")[0]
    return ""


def _listed(folder: str, prefix: str) -> list[str]:
    """Names of the form PREFIX and a number."""
    found = (one for one in names_in(folder)
             if one.startswith(prefix) and one[len(prefix) :].isdecimal())
    return sorted(found, key=lambda one: int(one[len(prefix) :]))
