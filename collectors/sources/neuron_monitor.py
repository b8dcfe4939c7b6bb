"""neuron-monitor: a tool that prints one JSON report every few seconds, kept alive and read.

Owns that tool's process, the pieces of its stream, and what a report's groups mean.  It may die,
stall or print half a line; a report is input from outside and believed field by field.  Counts of
a period are summed here, because a page of metrics wants totals.  Runs in a probe child only.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

REPORT_MAX_BYTES = 4 << 20
STALE_S = 20.0  # four periods of five seconds
DEVICES_MAX, CORES_MAX, RUNTIMES_MAX = 64, 512, 256
PR_SET_PDEATHSIG = 1
ECC = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")
STATUSES = ("completed", "completed_with_err", "completed_with_num_err", "timed_out",
            "incorrect_input", "failed_to_queue")
# The text of AWS's page says "numeric" where its JSON says "numerical".
ERRORS = {"generic": "generic", "numerical": "numerical", "numeric": "numerical",
          "transient": "transient", "model": "model", "runtime": "runtime",
          "hardware": "hardware"}
PERCENTILES = ("p50", "p99", "p100")
Json = dict[str, Any]
Row = tuple[str, str, float]  # name without `accelerator_`, the subject after the vendor, value
Totals = dict[tuple[str, str], float]  # (executions or execution_errors, which)


class Broken(OSError):
    """The tool does not say what is needed; the message says why."""


class Monitor:
    """One process of neuron-monitor and the newest of its reports."""

    def __init__(self, tool: str, totals: Totals) -> None:
        import ctypes  # here, for the agent imports this module to know the metrics

        self._libc = ctypes.CDLL(None)
        self._totals = totals
        self._lock = threading.Lock()
        self._report: Json = {}
        self._read_s = self._started_s = time.monotonic()
        self.rejected = 0  # pieces of the stream that were no report
        self._process = subprocess.Popen(
            [tool], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            preexec_fn=self._die_with_parent, bufsize=0)
        self._thread = threading.Thread(target=self._follow, name="neuron-monitor", daemon=True)
        self._thread.start()

    def _die_with_parent(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def report(self, wait_s: float) -> Json:
        """The newest report, waited for at most so long while there is none.  Broken when the
        tool has ended or says nothing any more; it is ended then."""
        until_s = time.monotonic() + wait_s
        while True:
            with self._lock:
                report, age_s = self._report, time.monotonic() - self._read_s
            ended = not self._thread.is_alive()
            if report and not ended and age_s <= STALE_S:
                return report
            if ended or age_s > STALE_S:
                code = self.close()
                what = f"ended with {code}" if ended else f"has said nothing for {age_s:.0f} s"
                raise Broken(f"neuron-monitor {what}")
            if time.monotonic() >= until_s:
                raise Broken("neuron-monitor: no report yet")
            time.sleep(0.05)

    def close(self) -> int:
        """Ends the tool; its exit status."""
        self._process.kill()
        code = self._process.wait()
        self._thread.join(1.0)
        if self._process.stdout is not None and not self._thread.is_alive():
            self._process.stdout.close()
        return code

    def _follow(self) -> None:
        """The thread: whole lines become reports, a line beyond all bounds is skipped."""
        assert self._process.stdout is not None
        stream, piece, skipping = self._process.stdout.fileno(), b"", False
        while data := os.read(stream, 65536):
            *lines, piece = (piece + data).split(b"\n")
            for line in lines:
                self._take(b"" if skipping else line)
                skipping = False
            if len(piece) > REPORT_MAX_BYTES:
                piece, skipping = b"", True

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):  # the latter: nested beyond reason
            report = None
        if not isinstance(report, dict):
            self.rejected += 1
            return
        with self._lock:
            count(report, self._totals)
            self._report, self._read_s = report, time.monotonic()


# ------------------------------------------------------------- what a report says


def table(value: Any, *path: str) -> Json:
    """The table at this path; {} when there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A count or measure; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None


def runtimes(report: Json) -> Iterator[Json]:
    found = report.get("neuron_runtime_data")
    for one in found[:RUNTIMES_MAX] if isinstance(found, list) else ():
        if isinstance(one, dict):
            yield one


def count(report: Json, totals: Totals) -> None:
    """Adds what a report says of its own period."""
    found: list[tuple[tuple[str, str], float]] = []
    for runtime in runtimes(report):
        stats = table(runtime, "report", "execution_stats")
        summary, errors = table(stats, "execution_summary"), table(stats, "error_summary")
        found += [(("executions", key), number(summary.get(key)) or 0.0) for key in STATUSES]
        found += [(("execution_errors", error), number(errors.get(key)) or 0.0)
                  for key, error in ERRORS.items()]
    found += [(("unreadable_reports", group), 1.0) for group in unreadable(report)]
    for key, value in found:
        totals[key] = totals.get(key, 0.0) + value


def unreadable(report: Json) -> list[str]:
    """Groups of a report that could not be read: unknown, which is not healthy."""
    groups = {"neuron_hw_counters": table(report, "system_data", "neuron_hw_counters"),
              "neuron_hardware_info": table(report, "neuron_hardware_info")}
    found = [name for name, group in groups.items() if group.get("error")]
    for runtime in runtimes(report):
        if runtime.get("error"):
            found.append("neuron_runtime_data")
        found += [name for name in ("neuroncore_counters", "execution_stats", "memory_used")
                  if table(runtime, "report", name).get("error")]
    return found


def rows(report: Json) -> Iterator[Row]:
    """Everything about devices.  Broken when the report's hardware groups are unreadable."""
    hardware = table(report, "neuron_hardware_info")
    counters = table(report, "system_data", "neuron_hw_counters")
    for name, group in (("neuron_hardware_info", hardware), ("neuron_hw_counters", counters)):
        if group.get("error"):
            raise Broken(f"neuron-monitor: {name}: {str(group['error'])[:200]}")
    devices = counters.get("neuron_devices")
    seen = 0
    for one in devices[:DEVICES_MAX] if isinstance(devices, list) else ():
        index = number(table(one).get("neuron_device_index"))
        if index is None:
            continue
        seen += 1
        yield from _errors(f"device={index:.0f}", one)
        size = number(hardware.get("neuron_device_memory_size"))
        if size:
            yield "memory_total_bytes", f"device={index:.0f}", size
    if counters:
        yield from [("devices", "", seen)] if seen else []
    elif counted := number(hardware.get("neuron_device_count")):
        yield "devices", "", counted  # a report may lack the whole group
    yield from _cores(report, int(number(hardware.get("neuroncore_per_device_count")) or 0))
    yield from _latencies(report)


def _errors(device: str, counters: Json) -> Iterator[Row]:
    values = {key: number(counters.get(key)) for key in ECC}
    for key, value in values.items():
        if value is not None:
            yield "ecc_events_total", f"{device},event={key}", value
    for error in ("corrected", "uncorrected"):
        known = [value for key, value in values.items()
                 if key.endswith(f"_{error}") and value is not None]
        if known:
            yield "ecc_errors_total", f"{device},error={error},period=volatile", sum(known)


def _cores(report: Json, per_device: int) -> Iterator[Row]:
    """Load, memory and processes.  A core that is not listed is not in use, which is not zero."""
    if per_device < 1:
        return
    busy: dict[int, float] = {}  # by core; a runtime lists cores of other processes too, as idle
    flops: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    processes: dict[int, set[int]] = {}
    for runtime in runtimes(report):
        said = table(runtime, "report", "neuroncore_counters", "neuroncores_in_use")
        for core, counters in _indexed(said):
            device = core // per_device
            utilisation = number(counters.get("neuroncore_utilization"))
            if utilisation is not None:
                busy[core] = busy.get(core, 0.0) + utilisation / 100
            done = number(counters.get("effective_flops", counters.get("flops")))
            if done is not None:  # releases of 2023 tell none
                flops[device] += int(done)
        used = table(runtime, "report", "memory_used", "neuron_runtime_used_bytes",
                     "usage_breakdown", "neuroncore_memory_usage")
        for core, parts in _indexed(used):
            memory[core // per_device] += _held(parts)
        if pid := int(number(runtime.get("pid")) or 0):
            for core in _own(said, used):
                processes.setdefault(core // per_device, set()).add(pid)
    cores: dict[int, list[float]] = {}
    for core, ratio in sorted(busy.items()):
        yield "core_utilization_ratio", f"device={core // per_device},core={core}", ratio
        cores.setdefault(core // per_device, []).append(ratio)
    for device, values in sorted(cores.items()):
        yield "utilization_ratio", f"device={device}", round(sum(values) / len(values), 6)
    for device, per_second in sorted(flops.items()):
        yield "flops_per_second", f"device={device}", float(per_second)
    for device, used_bytes in sorted(memory.items()):
        yield "memory_used_bytes", f"device={device}", float(used_bytes)
    for device, pids in sorted(processes.items()):
        yield "processes", f"device={device}", len(pids)
        for one in sorted(pids):
            yield "process", f"device={device},pid={one}", 1.0


def _held(parts: Json) -> int:
    """Bytes of a core's memory."""
    return sum(int(number(value) or 0) for value in parts.values())


def _own(said: Json, used: Json) -> set[int]:
    """The cores that a runtime is on: those that it loads or holds memory of, since it may list all
    cores of the node; all that it lists where there is neither load nor memory."""
    busy = {core for core, one in _indexed(said) if number(one.get("neuroncore_utilization"))}
    held = {core for core, parts in _indexed(used) if _held(parts)}
    return busy | held or {core for core, _ in _indexed(said)}


def _indexed(cores: Json) -> Iterator[tuple[int, Json]]:
    for core, value in list(cores.items())[:CORES_MAX]:
        if core.isdecimal() and int(core) < CORES_MAX and isinstance(value, dict):
            yield int(core), value


def _latencies(report: Json) -> Iterator[Row]:
    """Of the slowest runtime; nothing when nothing ran."""
    for percentile in PERCENTILES:
        known = [
            value for runtime in runtimes(report)
            if (value := number(table(runtime, "report", "execution_stats", "latency_stats",
                                      "total_latency").get(percentile))) is not None]
        if known:
            yield "execution_latency_seconds", f"percentile={percentile}", max(known)
