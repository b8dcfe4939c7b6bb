"""AMD GPUs through amd-smi, a tool that prints one JSON document and ends.

Owns the tool's process, and which of its fields becomes which sample.  The tool is slow (it is a
Python program) and hangs with its driver, so a reading never waits long for it: a late answer is
taken by the next reading.  A document is input from outside and believed field by field.  Runs in a
probe child only.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from .contract import SLOW, NoData, Probed, Roots, Sample
from .sources.accelerator import declared, plain
from .sources.files import pids_in, text_of

TOOL = "amd-smi"
DEVICES_MAX = 64
DOCUMENT_MAX_BYTES = 8 << 20  # eight GPUs fill a quarter of a megabyte
# Between two calls of a tool that answers at once.  A judgement, not measured: each call starts a
# Python program that loads the driver's library anew, so it should not be every reading.
EVERY_S = 30.0
WAIT_S = 1.2  # for a call of this reading; the deadline of a reading is 2 s
FIRST_WAIT_S = 8.0  # of a new child, which has ten deadlines
LIMIT_S = 30.0  # a call that takes longer is killed
KILL_WAIT_S = 0.3
PROCESSES_MAX = 50_000
PR_SET_PDEATHSIG = 1
# amd-smi writes MB for 2^20 bytes.
UNITS = {"%": 0.01, "W": 1.0, "C": 1.0, "J": 1.0, "B": 1.0, "KB": 1024.0, "MB": 1024.0**2,
         "GB": 1024.0**3, "MHz": 1e6, "GHz": 1e9, "": 1.0}
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # PCIe, by GT/s
# name without `accelerator_`, more of the subject, unit where none is said, places to look at
FIELDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("utilization_ratio", "", "%", ("usage/gfx_activity",)),
    ("memory_utilization_ratio", "", "%", ("usage/umc_activity",)),
    ("memory_total_bytes", "", "MB", ("mem_usage/total_vram",)),
    ("memory_used_bytes", "", "MB", ("mem_usage/used_vram",)),
    ("memory_free_bytes", "", "MB", ("mem_usage/free_vram",)),
    ("power_watts", "", "W", ("power/socket_power", "power/current_socket_power",
                              "power/average_socket_power")),
    ("energy_joules_total", "", "J", ("energy/total_energy_consumption",)),
    ("temperature_celsius", "sensor=edge", "C", ("temperature/edge",)),
    ("temperature_celsius", "sensor=hotspot", "C", ("temperature/hotspot",)),
    ("temperature_celsius", "sensor=memory", "C", ("temperature/mem",)),
    ("clock_hertz", "domain=sm", "MHz", ("clock/gfx_0/clk", "clock/GFX_0/clk")),
    ("clock_hertz", "domain=memory", "MHz", ("clock/mem_0/clk", "clock/MEM_0/clk")),
    ("clock_max_hertz", "domain=sm", "MHz", ("clock/gfx_0/max_clk", "clock/GFX_0/max_clk")),
    ("clock_max_hertz", "domain=memory", "MHz", ("clock/mem_0/max_clk", "clock/MEM_0/max_clk")),
    ("ecc_errors_total", "error=corrected,period=volatile", "", ("ecc/total_correctable_count",)),
    ("ecc_errors_total", "error=uncorrected,period=volatile", "",
     ("ecc/total_uncorrectable_count",)),
    ("ecc_errors_total", "error=deferred,period=volatile", "", ("ecc/total_deferred_count",)),
    ("pcie_width", "", "", ("pcie/width",)),
    ("pcie_replays_total", "", "", ("pcie/replay_count",)),
)
POWER_LIMIT = ("limit/ppt0/socket_power_limit", "limit/socket_power", "limit/max_power")
VBIOS = ("ifwi/version", "vbios/version")  # newer releases call it integrated firmware
NAMED = {"name": "asic/market_name", "uuid": "asic/asic_serial", "pci": "bus/bdf",
         "driver": "driver/version"}
# Before its document the tool prints that its user is not in all groups of the driver, and goes on.
BEGIN = re.compile(rb"^[\[{]", re.MULTILINE)
NEVER_ZERO = {"energy_joules_total", "clock_max_hertz"}  # said by cards that do not know it
Row = tuple[str, str, float]


class Broken(OSError):
    """The tool does not say what is needed; the message says why."""


class Call:
    """One run of the tool.  Its output goes into memory that the kernel keeps bounded."""

    def __init__(self, roots: Roots, verb: str, boot_s: float) -> None:
        import ctypes  # here, for the agent imports this module to know the metrics

        self._libc = ctypes.CDLL(None)
        self.boot_s = boot_s
        self._since_s = time.monotonic()
        self._output = os.memfd_create(TOOL, os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [f"{roots.rocm}/{TOOL}", verb, "--json"], stdin=subprocess.DEVNULL,
                stdout=self._output, stderr=subprocess.DEVNULL, preexec_fn=self._limits)
        except OSError as error:
            os.close(self._output)
            raise Broken(f"{TOOL}: {error.strerror}") from error

    def _limits(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (DOCUMENT_MAX_BYTES, DOCUMENT_MAX_BYTES))

    def wait(self, wait_s: float) -> bool:
        """Whether the tool has ended, after at most so long.  Raises Broken when it is beyond its
        limit."""
        until_s = time.monotonic() + wait_s
        while self._process.poll() is None:
            now_s = time.monotonic()
            if now_s - self._since_s > LIMIT_S:
                self.kill()
                raise Broken(f"{TOOL}: no answer within {LIMIT_S:g} s")
            if now_s >= until_s:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """Ends the tool.  Raises Broken when the kernel holds it: the process stays behind, and the
        next child finds it before it starts another."""
        os.close(self._output)
        self._process.kill()
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"{TOOL} (pid {self._process.pid}) cannot be ended") from error

    def devices(self) -> dict[int, dict[str, Any]]:
        """The tables of all GPUs that the tool printed, once it has ended."""
        try:
            size = os.fstat(self._output).st_size
            text = os.pread(self._output, min(size, DOCUMENT_MAX_BYTES), 0)
        finally:
            os.close(self._output)
        try:
            begin = BEGIN.search(text)
            return by_device(json.loads(text[begin.start() if begin else 0 :]))
        except (ValueError, RecursionError) as error:
            code = self._process.returncode
            raise Broken(f"{TOOL} ended with {code} and printed no JSON: {error}") from error


class AmdCollector(Probed):
    """Samples `accelerator_*` of every AMD GPU; read in a child, since amd-smi hangs with its
    driver."""

    name = "amd"
    pace = SLOW
    metrics = declared(
        "info", "firmware_info", "devices", "lost", "utilization_ratio",
        "memory_utilization_ratio", "memory_total_bytes", "memory_used_bytes",
        "memory_free_bytes", "power_watts", "power_limit_watts", "energy_joules_total",
        "temperature_celsius", "clock_hertz", "clock_max_hertz", "ecc_errors_total",
        "pcie_generation", "pcie_width", "pcie_replays_total",
    )

    def __init__(self) -> None:
        self._call: Call | None = None
        self._due_s = 0.0  # CLOCK_MONOTONIC
        self._known: dict[int, dict[str, Any]] | None = None  # what never changes, by device
        self._samples: list[Sample] = []

    def here(self, roots: Roots) -> str:
        """"" when there may be an AMD GPU and its tool, else why not; two cheap looks."""
        if not os.path.isdir(f"{roots.sys}/module/amdgpu"):
            return "no AMD driver on this machine"
        if not os.access(f"{roots.rocm}/{TOOL}", os.X_OK):
            return f"no {TOOL} in {roots.rocm}"
        return ""

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """The newest document.  NoData without driver or tool; Broken when it is of no use."""
        if why := self.here(roots):
            raise NoData(why)
        first = self._known is None
        if first:
            _refuse_beside_a_stuck_one(roots)
            self._known = self._static(roots, boot_s)
        if self._call is None and time.monotonic() >= self._due_s:
            self._begin(roots, boot_s)
        call = self._call
        if call is None:
            return self._samples
        late = call.boot_s != boot_s
        if call.wait(FIRST_WAIT_S if first else WAIT_S):
            self._call = None
            self._samples = self._read(call.devices(), call.boot_s)
            if late:  # a slow one is asked again at once, or its readings would grow too old
                self._begin(roots, boot_s)
        if not self._samples:
            raise Broken(f"{TOOL}: no answer yet")
        return self._samples

    def _begin(self, roots: Roots, boot_s: float) -> None:
        self._call = Call(roots, "metric", boot_s)
        self._due_s = time.monotonic() + EVERY_S

    def _static(self, roots: Roots, boot_s: float) -> dict[int, dict[str, Any]]:
        """Names, addresses and limits, once a child; {} when the tool does not tell them."""
        call = Call(roots, "static", boot_s)
        if not call.wait(FIRST_WAIT_S):
            call.kill()
            return {}
        try:
            return call.devices()
        except Broken:
            return {}

    def _read(self, devices: dict[int, dict[str, Any]], boot_s: float) -> list[Sample]:
        found: list[Sample] = []
        answering = 0
        for index in sorted(devices):
            static = (self._known or {}).get(index, {})
            measured = list(rows(devices[index]))
            more = ",".join(f"{key}={plain(word(static, path))}" for key, path in NAMED.items())
            said = [("info", more, 1.0), *measured]
            if vbios := word(static, VBIOS[0]) or word(static, VBIOS[1]):
                said.append(("firmware_info", f"component=vbios,version={plain(vbios)}", 1.0))
            if measured:  # a GPU whose every field is N/A does not answer
                answering += 1
                said.append(("lost", "", 0.0))
                limit = first_of(static, POWER_LIMIT, "W")
                said += [("power_limit_watts", "", limit)] if limit is not None else []
            for name, rest, value in said:
                subject = f"vendor=amd,device={index},{rest}".rstrip(",")
                found.append(Sample(f"accelerator_{name}", subject, value, boot_s))
        found.append(Sample("accelerator_devices", "vendor=amd", float(answering), boot_s))
        return found


# ------------------------------------------------------------- what a document says


def by_device(document: Any) -> dict[int, dict[str, Any]]:
    """Each GPU's table by its index; older releases print the bare list."""
    listed = document.get("gpu_data") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise ValueError("no list of GPUs")
    found = {}
    for one in listed[:DEVICES_MAX]:
        index = one.get("gpu") if isinstance(one, dict) else None
        if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < DEVICES_MAX:
            found[index] = one
    return found


def at(device: dict[str, Any], path: str) -> Any:
    """The value at the path `a/b/c` of a table; None when there is none."""
    value: Any = device
    for key in path.split("/"):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def word(device: dict[str, Any], path: str) -> str:
    value = at(device, path)
    return value if isinstance(value, str) and value != "N/A" else ""


def measure(value: Any, unit: str) -> float | None:
    """A number, bare or as {"value": 41, "unit": "W"}, in base units; None for "N/A" and anything
    else, a unit that is not known included."""
    if isinstance(value, dict):
        said = value.get("unit")
        unit = said if isinstance(said, str) and said else unit
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or unit not in UNITS:
        return None
    try:
        found = float(value) * UNITS[unit]
    except OverflowError:
        return None
    return round(found, 9) if math.isfinite(found) and found >= 0 else None


def first_of(device: dict[str, Any], paths: tuple[str, ...], unit: str) -> float | None:
    known = (measure(at(device, path), unit) for path in paths)
    return next((value for value in known if value is not None), None)


def rows(device: dict[str, Any]) -> Iterator[Row]:
    """Everything measured of one GPU."""
    for name, more, unit, paths in FIELDS:
        value = first_of(device, paths, unit)
        if value is not None and (value or name not in NEVER_ZERO):
            yield name, more, value
    speed = at(device, "pcie/speed")
    speed = speed.get("value") if isinstance(speed, dict) else speed
    if isinstance(speed, (int, float)) and speed in GENERATIONS:
        yield "pcie_generation", "", float(GENERATIONS[speed])


def _refuse_beside_a_stuck_one(roots: Roots) -> None:
    """Raises while the kernel holds an earlier tool: another one each reading would fill the
    machine with processes that nobody can kill."""
    for pid in pids_in(roots.proc, PROCESSES_MAX):
        state = text_of(f"{roots.proc}/{pid}/stat", 512).rpartition(")")[2].split()[:1]
        # Only those in state D are asked for more: it costs a walk through their memory.
        words = text_of(f"{roots.proc}/{pid}/cmdline", 4096) if state == ["D"] else ""
        if TOOL in (os.path.basename(one) for one in words.split("\0")[:3]):
            raise Broken(f"{TOOL} (pid {pid}) hangs in the kernel: none is started beside it")
