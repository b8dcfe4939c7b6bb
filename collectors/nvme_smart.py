"""SMART of NVMe drives: wear, spare blocks, media errors and the drive's own warnings.

Owns running `smartctl` or `nvme` and reading their JSON. Both need CAP_SYS_ADMIN, which the shipped
unit does not give: without it this source is absent, and says so.  Runs in a probe child, one
thread a drive.  A tool that hangs is killed; a tool that cannot be killed is named by its drive.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .nvme import WAITING, Reading, drives, samples_of
from .sources.files import text_of
from .sources.questions import Questions

EVERY_S = 300.0  # wear moves in months; each look costs a process and a command to the drive
TOOL_S = 8.0
OUTPUT_MAX_BYTES = 1 << 18
FOLDERS = ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin", "/sbin")
CAP_SYS_ADMIN = 21
WARNINGS = ("spare_low", "temperature", "reliability", "media_readonly", "backup_failed",
            "memory_region")  # bits 0 to 5 of critical_warning
# The values to keep: (metric, factor, its key at smartctl, its key at nvme-cli)
FIELDS = (
    ("host_nvme_spare_ratio", 0.01, "available_spare", "avail_spare"),
    ("host_nvme_spare_threshold_ratio", 0.01, "available_spare_threshold", "spare_thresh"),
    ("host_nvme_used_ratio", 0.01, "percentage_used", "percent_used"),
    ("host_nvme_media_errors_total", 1.0, "media_errors", "media_errors"),
    ("host_nvme_error_log_entries_total", 1.0, "num_err_log_entries", "num_err_log_entries"),
    ("host_nvme_unsafe_shutdowns_total", 1.0, "unsafe_shutdowns", "unsafe_shutdowns"),
)


class NvmeSmartCollector(Probed):
    """SMART values of every NVMe drive, at most every five minutes; read in a child."""

    name = "nvme_smart"
    pace = SLOW
    metrics = (
        Metric("host_nvme_critical_warning", "gauge", "1 when the drive gives this warning.",
               ("device", "warning"), True),
        Metric("host_nvme_spare_ratio", "gauge", "Spare blocks left.", ("device",)),
        Metric("host_nvme_spare_threshold_ratio", "gauge",
               "Spare blocks below which the drive warns.", ("device",)),
        Metric("host_nvme_used_ratio", "gauge",
               "Share of the drive's rated life that is used; may pass 1.", ("device",)),
        Metric("host_nvme_media_errors_total", "counter",
               "Data that the drive could not bring back.", ("device",), True),
        Metric("host_nvme_error_log_entries_total", "counter",
               "Entries that the drive's error log ever had.", ("device",)),
        Metric("host_nvme_unsafe_shutdowns_total", "counter",
               "Times that the drive lost power unprepared.", ("device",)),
        WAITING,
    )

    def __init__(self) -> None:
        self._questions: Questions[bytes] = Questions()

    def here(self, roots: Roots) -> str:
        """"" when there is a drive, a tool and the permission, else which of them is missing."""
        if not drives(roots):
            return "no NVMe drive on this machine"
        if not _tool(roots):
            return "neither smartctl nor nvme is installed (smartmontools, nvme-cli)"
        if not _holds(roots, CAP_SYS_ADMIN):
            return "SMART needs CAP_SYS_ADMIN, which is not held here"
        return ""

    def environ(self, roots: Roots) -> dict[str, str]:
        """Numbers and words as the tools write them in no language."""
        return {"LC_ALL": "C"}

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading, of each drive its last answer.  Raises NoData when no drive answers."""
        why_not = self.here(roots)
        if why_not:
            raise NoData(why_not)
        tool = _tool(roots)
        calls = {name: partial(run_tool, command(tool, f"/dev/{name}")) for name in drives(roots)}
        found: list[Sample] = []
        errors: list[str] = []
        for name, waited_s, answer in self._questions.round(calls, boot_s, EVERY_S):
            waiting = f"device={name},question=smart"
            found.append(Sample(WAITING.name, waiting, waited_s, boot_s))
            if answer is not None:
                readings, error = parse(answer.value or b"")
                errors.append(f"{name}: {answer.error or error}" if not readings else "")
                found += samples_of(name, readings, answer.boot_s)
        if errors and all(errors):
            raise NoData(f"{os.path.basename(tool)}: {errors[0]}")
        return found


def command(tool: str, device: str) -> tuple[str, ...]:
    """How to ask for the SMART log as JSON."""
    if os.path.basename(tool) == "smartctl":
        return (tool, "-j", "-A", device)
    return (tool, "smart-log", device, "-o", "json")


def parse(output: bytes) -> tuple[list[Reading], str]:
    """(readings, why there are none) of either tool's answer.  A field that is missing, or is no
    number >= 0, costs itself alone."""
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        return [], "no JSON"
    if not isinstance(answer, dict):
        return [], "no object"
    log = answer.get("nvme_smart_health_information_log", answer)
    if not isinstance(log, dict) or not {"critical_warning", "temperature"} & log.keys():
        return [], _message(answer)
    found: list[Reading] = []
    bits = log.get("critical_warning")
    bits = _number(bits.get("value") if isinstance(bits, dict) else bits)
    if bits is not None and bits < 256:
        found += [
            ("host_nvme_critical_warning", f"warning={warning}", float(int(bits) >> bit & 1))
            for bit, warning in enumerate(WARNINGS)]
    for metric, factor, *keys in FIELDS:
        value = next((one for key in keys if (one := _number(log.get(key))) is not None), None)
        if value is not None:
            found.append((metric, "", value * factor))
    return found, "" if found else "no reading in it"


def _message(answer: dict[str, Any]) -> str:
    """The tool's own complaint."""
    inner = answer.get("smartctl")
    said = inner.get("messages") if isinstance(inner, dict) else None
    first = said[0] if isinstance(said, list) and said else None
    text = first.get("string") if isinstance(first, dict) else answer.get("error")
    return text[:200] if isinstance(text, str) and text else "no SMART log in it"


def _number(value: object) -> float | None:
    """A number, or its digits as text: counters of 128 bits are written so."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 40:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0.0 else None


def run_tool(words: Sequence[str], timeout_s: float = TOOL_S) -> bytes:
    """The output of a command, whatever its status: smartctl's is a set of bits.  OSError when it
    does not start, is late, or says too much."""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        fd, size = child.stdout.fileno(), 0
        parts: list[bytes] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0 or not select.select([fd], [], [], left_s)[0]:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                part = os.read(fd, 65536)
                if not part:
                    return b"".join(parts)
                parts.append(part)
                size += len(part)
                if size > OUTPUT_MAX_BYTES:
                    raise OSError(f"output longer than {OUTPUT_MAX_BYTES} bytes")
        finally:
            child.kill()


def _tool(roots: Roots) -> str:
    """Path of the tool: smartctl before nvme; "" without either."""
    folders = (roots.tools,) if roots.tools else FOLDERS
    paths = (f"{folder}/{name}" for name in ("smartctl", "nvme") for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), "")


def _holds(roots: Roots, capability: int) -> bool:
    for line in text_of(f"{roots.proc}/self/status", 65536).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False
