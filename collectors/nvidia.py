"""NVIDIA GPUs through NVML: load, memory, power, clocks, errors, links, fabric and processes.

Owns which NVML call becomes which sample.  Runs in a probe child only, because a call on a sick
GPU may never return; pynvml is imported there and nowhere else.  A call that this driver or this
GPU does not offer costs its own readings; a GPU that is lost costs its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from .contract import SLOW, NoData, Probed, Roots, Sample
from .sources.accelerator import declared, plain

LIBRARY = "libnvidia-ml.so.1"
DEVICES_MAX = 64
LINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS
PROCESSES_MAX = 64  # of one device
GONE = (15, 16, 28)  # GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND: the device answers no more
NO_DRIVER = (9, 12)  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND
# Busy at idle power: some kernel is resident and nothing computes, as when a collective spins for
# a peer that never comes.  A quarter of the limit is this project's judgement: training H100s draw
# well over half of it, spinning ones little more than idle.
BUSY_RATIO, IDLE_POWER_RATIO = 0.99, 0.25

# Bits of the clocks event mask, from nvml.h.
THROTTLE = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8,
    "sync_boost": 0x10, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80, "display_clock_setting": 0x100,
}
VIOLATIONS = ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data")  # NVML_NVLINK_ERROR_DL_*
# Fields of NVLink 5, which has no such counters any more; the scope is the link.
LINK5_ERRORS = {"receive": 208, "link_integrity": 211}
FABRIC_FAULTS = {"degraded_bandwidth": 0, "route_recovery": 2, "route_unhealthy": 4,
                 "access_timeout_recovery": 6}  # shift of two bits; 1 says there is a fault
MISCONFIGURED_SHIFT = 8  # four bits; 0 not supported, 1 none, 2 and more say what is wrong
RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
RECOVERY = ("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset",
            "recover_imex_domain", "bus_reset", "system_reboot")
MEMORY_TEMPERATURE_FIELD = 82
Row = tuple[str, str, float]  # name without `accelerator_`, more of the subject, value
Topic = Callable[[Any, Any], list[Row]]  # of pynvml and a device's handle


class NvidiaCollector(Probed):
    """Samples `accelerator_*` of every NVIDIA GPU; read in a child, since NVML may never return."""

    name = "nvidia"
    pace = SLOW
    metrics = declared(
        "info", "devices", "lost", "utilization_ratio", "memory_utilization_ratio",
        "busy_at_idle_power", "memory_total_bytes", "memory_used_bytes", "memory_free_bytes",
        "power_watts", "power_limit_watts", "energy_joules_total", "temperature_celsius",
        "temperature_limit_celsius", "clock_hertz", "clock_max_hertz", "throttled",
        "violation_seconds_total", "ecc_errors_total", "remapped_rows", "row_remap_pending",
        "row_remap_failed", "row_remap_banks", "retired_pages", "retired_pages_pending",
        "link_up", "link_errors_total", "pcie_generation", "pcie_generation_max", "pcie_width",
        "pcie_width_max", "pcie_replays_total", "fabric_state", "fabric_fault",
        "recovery_action", "processes", "firmware_info",
    )

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._driver = ""
        # index -> metric -> labels, kept for when the device is lost
        self._identity: dict[int, dict[str, str]] = {}

    def here(self, roots: Roots) -> str:
        """"" when an NVIDIA driver may be on this machine, else why not; a few cheap looks."""
        places = (f"{roots.proc}/driver/nvidia", f"{roots.sys}/module/nvidia")
        if roots.nvml or any(os.path.exists(place) for place in places):
            return ""
        return "no NVIDIA driver on this machine"

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without library or driver; OSError when NVML itself fails."""
        nvml = self._load(roots)
        try:
            count = min(nvml.nvmlDeviceGetCount(), DEVICES_MAX)
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        found: list[Sample] = []
        answering = 0
        for index in range(count):
            rows = self._device(nvml, index)
            subject = f"vendor=nvidia,device={index}"
            answering += len(rows) > 1
            for name, labels in self._identity.get(index, {}).items():
                found.append(Sample(f"accelerator_{name}", f"{subject},{labels}", 1.0, boot_s))
            for name, more, value in rows:
                whole = f"{subject},{more}" if more else subject
                found.append(Sample(f"accelerator_{name}", whole, float(value), boot_s))
        found.append(Sample("accelerator_devices", "vendor=nvidia", float(answering), boot_s))
        return found

    def _load(self, roots: Roots) -> ModuleType:
        if self._nvml is not None:
            return self._nvml
        if roots.nvml:  # pynvml asks by name alone, and is given what is loaded under that name
            with suppress(OSError):
                ctypes.CDLL(os.path.join(roots.nvml, LIBRARY))
        try:
            import pynvml as nvml
        except ImportError as error:
            raise NoData("nvidia-ml-py is not installed") from error
        try:
            nvml.nvmlInit()
            self._driver = str(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError as error:
            if error.value in NO_DRIVER:
                raise NoData(f"NVML: {error}") from error
            raise OSError(f"NVML: {error}") from error
        self._nvml = nvml
        return self._nvml

    def _device(self, nvml: ModuleType, index: int) -> list[Row]:
        """Rows of one device.  Whenever a call shows that the device is lost, the row `lost` alone;
        none when it does not answer for another reason."""
        rows: list[Row] = [("lost", "", 0.0)]
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._identify(nvml, handle, index)
        except nvml.NVMLError as error:
            return [("lost", "", 1.0)] if error.value in GONE else []
        except ValueError:
            pass  # a name that is no text: the device answers all the same
        for reading in READINGS:
            try:
                rows += reading(nvml, handle)
            except nvml.NVMLError as error:
                if error.value in GONE:
                    return [("lost", "", 1.0)]
            except (ValueError, OverflowError):
                continue  # nonsense, as not-a-number where a count is due
        return [*rows, *_hang_signature(rows)]

    def _identify(self, nvml: ModuleType, handle: Any, index: int) -> None:
        if index in self._identity:
            return
        values = {
            "name": nvml.nvmlDeviceGetName(handle), "uuid": nvml.nvmlDeviceGetUUID(handle),
            "pci": nvml.nvmlDeviceGetPciInfo_v3(handle).busId, "driver": self._driver}
        more = ",".join(f"{key}={plain(value)}" for key, value in values.items())
        self._identity[index] = {"info": more}
        try:
            vbios = plain(nvml.nvmlDeviceGetVbiosVersion(handle))
        except nvml.NVMLError as error:
            if error.value in GONE:
                raise
            return  # a guest cannot see it
        self._identity[index]["firmware_info"] = f"component=vbios,version={vbios}"


def _hang_signature(rows: list[Row]) -> Iterator[Row]:
    """One row when utilisation, power and limit are known."""
    known = {name: value for name, more, value in rows if not more}
    busy, power = known.get("utilization_ratio"), known.get("power_watts")
    limit = known.get("power_limit_watts", 0.0)
    if busy is not None and power is not None and limit > 0:
        idle = busy >= BUSY_RATIO and power < IDLE_POWER_RATIO * limit
        yield "busy_at_idle_power", "", float(idle)


# Each reading is one topic: a driver without its call loses that topic and no other.  Only calls
# with a version in their name where there are several: pynvml refuses the others on old drivers.


def _utilization(nvml: Any, handle: Any) -> list[Row]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return [("utilization_ratio", "", rates.gpu / 100),
            ("memory_utilization_ratio", "", rates.memory / 100)]


def _memory(nvml: Any, handle: Any) -> list[Row]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return [(f"memory_{kind}_bytes", "", getattr(memory, kind))
            for kind in ("total", "used", "free")]


def _call(name: str, call: str, *more: Any, subject: str = "", divisor: float = 1.0) -> Topic:
    """The topic that is one number of one call."""
    def read(nvml: Any, handle: Any) -> list[Row]:
        return [(name, subject, getattr(nvml, call)(handle, *more) / divisor)]
    return read


def _memory_temperature(nvml: Any, handle: Any) -> list[Row]:
    value = _field(nvml, handle, MEMORY_TEMPERATURE_FIELD)
    return [("temperature_celsius", "sensor=memory", value)] if value else []


def _some(nvml: Any, calls: Iterable[tuple[str, str, Callable[[], float]]]) -> list[Row]:
    """Rows of those calls that this GPU answers: some GPUs offer half of a topic."""
    rows = []
    for name, more, call in calls:
        try:
            rows.append((name, more, call()))
        except nvml.NVMLError as error:
            if error.value in GONE:
                raise
    return rows


def _temperature_limits(nvml: Any, handle: Any) -> list[Row]:
    call = nvml.nvmlDeviceGetTemperatureThreshold
    return _some(nvml, (
        ("temperature_limit_celsius", f"limit={name}", partial(call, handle, number))
        for number, name in enumerate(("shutdown", "slowdown"))))


def _clocks(nvml: Any, handle: Any) -> list[Row]:
    calls = {"clock_hertz": nvml.nvmlDeviceGetClockInfo,
             "clock_max_hertz": nvml.nvmlDeviceGetMaxClockInfo}
    rows = _some(nvml, (
        (name, f"domain={domain}", partial(call, handle, number))
        for number, domain in ((1, "sm"), (2, "memory")) for name, call in calls.items()))
    return [(name, more, mhz * 1e6) for name, more, mhz in rows]


def _throttle(nvml: Any, handle: Any) -> list[Row]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value in GONE:
            raise
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # drivers before 535
    return [("throttled", f"reason={name}", float(bool(mask & bit)))
            for name, bit in THROTTLE.items()]


def _violations(nvml: Any, handle: Any) -> list[Row]:
    def held_s(policy: int) -> float:
        return float(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime) / 1e9

    return _some(nvml, (("violation_seconds_total", f"policy={name}", partial(held_s, number))
                        for number, name in enumerate(VIOLATIONS)))


def _ecc(nvml: Any, handle: Any) -> list[Row]:
    call = nvml.nvmlDeviceGetTotalEccErrors
    return _some(nvml, (
        ("ecc_errors_total", f"error={error},period={period}",
         partial(call, handle, error_number, period_number))
        for error_number, error in enumerate(("corrected", "uncorrected"))
        for period_number, period in enumerate(("volatile", "aggregate"))
    ))


def _remapped(nvml: Any, handle: Any) -> list[Row]:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return [("remapped_rows", "cause=corrected", corrected),
            ("remapped_rows", "cause=uncorrected", uncorrected),
            ("row_remap_pending", "", float(bool(pending))),
            ("row_remap_failed", "", float(bool(failed)))]


def _remap_banks(nvml: Any, handle: Any) -> list[Row]:
    banks = nvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return [("row_remap_banks", f"availability={name}", getattr(banks, name))
            for name in ("max", "high", "partial", "low", "none")]


def _retired(nvml: Any, handle: Any) -> list[Row]:
    rows: list[Row] = [
        ("retired_pages", f"cause={name}", len(nvml.nvmlDeviceGetRetiredPages(handle, number)))
        for number, name in enumerate(("corrected", "uncorrected"))]
    pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)
    return [*rows, ("retired_pages_pending", "", float(bool(pending)))]


def _links(nvml: Any, handle: Any) -> list[Row]:
    rows: list[Row] = []
    kinds = dict(enumerate(LINK_ERRORS))
    for link in range(LINKS_MAX):
        try:
            up = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError as error:
            if error.value in GONE:
                raise
            break  # no such link: that was the last
        rows.append(("link_up", f"link={link}", float(bool(up))))
        for number, kind in list(kinds.items()):
            try:
                errors = nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number)
            except nvml.NVMLError as error:
                if error.value in GONE:
                    raise
                del kinds[number]  # not on this GPU: do not ask for each link
                continue
            rows.append(("link_errors_total", f"link={link},kind={kind}", errors))
    return rows


def _links5(nvml: Any, handle: Any) -> list[Row]:
    rows: list[Row] = []
    for link in range(LINKS_MAX):
        wanted = [(number, link) for number in LINK5_ERRORS.values()]
        answers = nvml.nvmlDeviceGetFieldValues(handle, wanted)
        values = {kind: _value(answer) for kind, answer in zip(LINK5_ERRORS, answers, strict=True)}
        if all(value is None for value in values.values()):
            break  # no such counters, or no such link
        rows += [("link_errors_total", f"link={link},kind={kind}", value)
                 for kind, value in values.items() if value is not None]
    return rows


def _pcie(nvml: Any, handle: Any) -> list[Row]:
    calls = {"pcie_generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration,
             "pcie_generation_max": nvml.nvmlDeviceGetMaxPcieLinkGeneration,
             "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
             "pcie_width_max": nvml.nvmlDeviceGetMaxPcieLinkWidth}
    return _some(nvml, ((name, "", partial(call, handle)) for name, call in calls.items()))


def _fabric(nvml: Any, handle: Any) -> list[Row]:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(info))
    rows: list[Row] = [("fabric_state", "", info.state)]
    if info.state:  # else not supported; until it completed, CUDA says "not initialized" (802)
        bad = {"not_started": info.state == 1, "in_progress": info.state == 2,
               "failed": info.state == 3 and info.status != 0}
        rows += [("fabric_fault", f"fault={name}", float(is_so)) for name, is_so in bad.items()]
    # The mask is no count of faults: 0x80 is healthy.  Each part has a value for "not supported".
    for name, shift in FABRIC_FAULTS.items():
        if value := info.healthMask >> shift & 0x3:
            rows.append(("fabric_fault", f"fault={name}", float(value == 1)))
    if value := info.healthMask >> MISCONFIGURED_SHIFT & 0xF:
        rows.append(("fabric_fault", "fault=incorrect_configuration", float(value >= 2)))
    return rows


def _recovery(nvml: Any, handle: Any) -> list[Row]:
    number = getattr(nvml, RECOVERY_FIELD, None)
    value = _field(nvml, handle, number) if number is not None else None
    if value is None or value < 0:
        return []
    names = RECOVERY if value < len(RECOVERY) else (*RECOVERY, f"unknown_{value:.0f}")
    wanted = names[min(int(value), len(names) - 1)]
    return [("recovery_action", f"action={name}", float(name == wanted)) for name in names]


def _processes(nvml: Any, handle: Any) -> list[Row]:
    """The count for the page; one undeclared sample a process, from which ranks are found."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError as error:
        if error.value in GONE:
            raise
        running = nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)  # drivers before 510
    running = running[:PROCESSES_MAX]
    return [("processes", "", len(running)),
            *(("process", f"pid={one.pid}", 1.0) for one in running)]


def _field(nvml: Any, handle: Any, number: int) -> float | None:
    return _value(nvml.nvmlDeviceGetFieldValues(handle, [number])[0])


def _value(answer: Any) -> float | None:
    """A field's value by its type; None when this GPU does not have it."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if answer.nvmlReturn != 0 or not 0 <= answer.valueType < len(names):
        return None
    return float(getattr(answer.value, names[answer.valueType]))


READINGS: tuple[Topic, ...] = (
    _utilization, _memory, _call("power_watts", "nvmlDeviceGetPowerUsage", divisor=1e3),
    _call("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", divisor=1e3),
    _call("energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption", divisor=1e3),
    _call("temperature_celsius", "nvmlDeviceGetTemperature", 0, subject="sensor=gpu"),
    _memory_temperature, _temperature_limits, _clocks, _throttle, _violations, _ecc, _remapped,
    _remap_banks, _retired, _links, _links5, _pcie,
    _call("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"), _fabric, _recovery, _processes,
)
