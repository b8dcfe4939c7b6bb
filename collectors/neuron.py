"""AWS Neuron devices (Trainium, Inferentia): sysfs, neuron-monitor and neuron-ls.

Owns joining the three into samples, and starting the tool again.  Without the tools sysfs alone
speaks, without sysfs the tools alone; with neither there is no data.  Runs in a probe child only:
a tool that asks a sick device may never return.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

from .contract import SLOW, NoData, Probed, Roots, Sample
from .sources import neuron_monitor
from .sources.accelerator import declared, plain
from .sources.files import is_count, names_in, text_of
from .sources.neuron_monitor import DEVICES_MAX, Broken, Monitor, Row, Totals, number, table

DEVICES = "devices/virtual/neuron_device"
FIRST_WAIT_S = 8.0  # for the first report of a new child: more than one period of five seconds
LIST_TIMEOUT_S = 5.0
OUTPUT_MAX_BYTES = 1 << 20
CORES_MAX = 16  # of one device
HARDWARE = ("mem_ecc_uncorrected", "mem_ecc_repairable_uncorrected", "sram_ecc_uncorrected")
STATUSES = (
    "success", "failure", "timeout", "hw_error", "exec_bad_input", "generic_error",
    "infer_completed_with_error", "infer_completed_with_num_error", "infer_failed_to_queue",
    "invalid_error", "oob_error", "resource_error", "resource_nc_error", "unsupported_neff_version",
)


def without_driver(roots: Roots) -> str:
    """"" where Neuron's driver is loaded, else why not.  Since its release 2.31 the devices stand
    elsewhere in sysfs; their files in /dev do not move."""
    here = os.path.isdir(f"{roots.sys}/{DEVICES}") or os.path.exists(f"{roots.root}/dev/neuron0")
    return "" if here else "no Neuron driver on this machine"


class NeuronCollector(Probed):
    """Samples `accelerator_*` of every Neuron device; read in a child."""

    name = "neuron"
    pace = SLOW
    metrics = declared(
        "info", "devices", "utilization_ratio", "memory_total_bytes", "memory_used_bytes",
        "ecc_errors_total", "processes", "core_utilization_ratio", "flops_per_second",
        "ecc_events_total", "power_utilization_ratio", "core_status_total", "executions_total",
        "execution_errors_total", "execution_latency_seconds", "unreadable_reports_total",
        "monitor_up", "monitor_restarts_total", "monitor_rejected_total",
    )

    def __init__(self) -> None:
        self._monitor: Monitor | None = None
        self._totals: Totals = {}
        self._pci: dict[int, str] | None = None
        self._restarts = self._rejected = 0
        self._first = True

    def here(self, roots: Roots) -> str:
        """"" when Neuron devices may be on this machine, else why not."""
        return "" if _is_tool(roots, "neuron-monitor") else without_driver(roots)

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without sysfs and tools; Broken when only the monitor could speak
        and does not."""
        devices = _listed(roots)
        has_tool = _is_tool(roots, "neuron-monitor")
        if not devices and not has_tool:
            raise NoData(self.here(roots) or "no Neuron device")
        if self._pci is None:
            self._pci = _pci_addresses(roots)
        found: dict[tuple[str, str], float] = {}
        for device in devices:
            found |= {(name, more): value for name, more, value in _sysfs(roots, device)}
        if devices:
            found["devices", ""] = len(devices)
        if has_tool:
            try:
                for name, more, value in self._watch(roots):
                    # sysfs alone knows repairable errors, so both sources' rows are kept
                    before = found.get((name, more), 0.0) if name.startswith("ecc_") else 0.0
                    found[name, more] = max(value, before)
                found["monitor_up", ""] = 1.0
            except Broken:
                if not devices:
                    raise
                found["monitor_up", ""] = 0.0
            found |= self._own_counts()
        self._first = False
        named = sorted({_device_of(more) for _, more in found} - {""}, key=int)
        for one in named:
            found["info", f"device={one},{self._identity(roots, int(one))}"] = 1.0
        return [
            Sample(f"accelerator_{name}", f"vendor=neuron,{more}".rstrip(","), float(value), boot_s)
            for (name, more), value in found.items()]

    def _watch(self, roots: Roots) -> Iterator[Row]:
        """Rows of the newest report; a tool that is broken is started again at the next reading."""
        if self._monitor is None:
            try:
                self._monitor = Monitor(f"{roots.neuron}/neuron-monitor", self._totals)
            except OSError as error:
                raise Broken(f"neuron-monitor: {error.strerror}") from error
        try:
            report = self._monitor.report(FIRST_WAIT_S if self._first else 0.0)
        except Broken as error:
            if "no report yet" not in str(error):
                self._rejected += self._monitor.rejected
                self._monitor = None
                self._restarts += 1
            raise
        yield from neuron_monitor.rows(report)

    def _own_counts(self) -> dict[tuple[str, str], float]:
        labels = {"executions": "status", "execution_errors": "error",
                  "unreadable_reports": "group"}
        found = {
            (f"{name}_total", f"{labels[name]}={which}"): float(value)
            for (name, which), value in sorted(self._totals.items())}
        rejected = self._rejected + (self._monitor.rejected if self._monitor else 0)
        return found | {("monitor_restarts_total", ""): float(self._restarts),
                        ("monitor_rejected_total", ""): float(rejected)}

    def _identity(self, roots: Roots, device: int) -> str:
        info = f"{roots.sys}/{DEVICES}/neuron{device}/info"
        values = {
            "name": _word(f"{info}/architecture/device_name"),
            "uuid": _word(f"{info}/serial_number"), "pci": (self._pci or {}).get(device, ""),
            "driver": _word(f"{roots.sys}/module/neuron/version")}
        return ",".join(f"{key}={plain(value)}" for key, value in values.items())


def _is_tool(roots: Roots, name: str) -> bool:
    return os.access(f"{roots.neuron}/{name}", os.X_OK)


def _device_of(subject: str) -> str:
    first = subject.partition(",")[0]
    return first.removeprefix("device=") if first.startswith("device=") else ""


def _listed(roots: Roots) -> list[int]:
    """Numbers of the devices in sysfs."""
    numbers = (one.removeprefix("neuron") for one in names_in(f"{roots.sys}/{DEVICES}")
               if one.startswith("neuron"))
    return sorted(int(one) for one in numbers if one.isdecimal())[:DEVICES_MAX]


def _word(path: str) -> str:
    return text_of(path, 4096).strip()


def _count(path: str) -> float | None:
    text = _word(path)
    return float(text) if is_count(text) else None


def _sysfs(roots: Roots, device: int) -> Iterator[Row]:
    """The driver's counts for one device; a missing file costs its own row."""
    root, subject = f"{roots.sys}/{DEVICES}/neuron{device}", f"device={device}"
    uncorrected = 0.0
    for event in HARDWARE:
        value = _count(f"{root}/stats/hardware/{event}")
        if value is not None:
            yield "ecc_events_total", f"{subject},event={event}", value
            uncorrected += value
            yield "ecc_errors_total", f"{subject},error=uncorrected,period=volatile", uncorrected
    fields = _word(f"{root}/stats/power/utilization").split(",")  # status, time, min, max, avg
    if len(fields) == 5 and fields[4].strip().replace(".", "", 1).isdecimal():
        yield "power_utilization_ratio", subject, float(fields[4]) / 100
    for status in STATUSES:
        values = [_count(f"{root}/neuron_core{core}/stats/status/{status}/total")
                  for core in range(_cores(root))]
        known = [value for value in values if value is not None]
        if known:
            yield "core_status_total", f"{subject},status={status}", sum(known)


def _cores(root: str) -> int:
    return min(int(_count(f"{root}/core_count") or 0), CORES_MAX)


def _pci_addresses(roots: Roots) -> dict[int, str]:
    """Where each device sits, from `neuron-ls -j`, once a child; {} without it."""
    if not _is_tool(roots, "neuron-ls"):
        return {}
    try:
        done = subprocess.run([f"{roots.neuron}/neuron-ls", "-j"], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=LIST_TIMEOUT_S, check=True)
        listed = json.loads(done.stdout[:OUTPUT_MAX_BYTES])
    except (OSError, subprocess.SubprocessError, ValueError, RecursionError):
        return {}
    found = {}
    for one in listed[:DEVICES_MAX] if isinstance(listed, list) else ():
        index = number(table(one).get("neuron_device"))
        if index is not None:
            found[int(index)] = str(table(one).get("bdf", ""))
    return found
