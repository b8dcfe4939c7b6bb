"""The time of each core by mode, and when the machine booted, from /proc/stat.

Owns that file.  The kernel sums every interrupt of every core for each reader, and a node of 192
cores makes 1,536 samples of it.  A core is judged over a minute, so a reading every fifth second
tells as much as one every second.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from itertools import repeat

from .contract import NODE_EXPORTER, Metric, Pace, Roots, Sample
from .sources.files import read_text

CPUS_MAX = 1024
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CORE = re.compile(r"^cpu(\d.*)", re.MULTILINE)


class CpuCollector:
    """Seconds of every core by mode, and the time of boot."""

    name = "cpu"
    pace = Pace(fast=True, least_s=5.0)
    metrics = (
        Metric("host_cpu_seconds_total", "counter", "Processor time by core and mode.",
               ("cpu", "mode"), False, NODE_EXPORTER),
        Metric("host_boot_time_seconds", "gauge", "When the machine booted, Unix time.",
               (), True, NODE_EXPORTER),
    )

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData when there is no /proc/stat at this root."""
        stat = read_text(f"{roots.proc}/stat")
        return _cores(stat, boot_s) + _boot_time(stat, boot_s)


@lru_cache(maxsize=CPUS_MAX)
def _subjects(core: str) -> tuple[str, ...]:
    """The subject of each mode of a core.  Kept, because they are the same each time."""
    return tuple(f"cpu={int(core)},mode={mode}" for mode in MODES)


def _cores(stat: str, boot_s: float) -> list[Sample]:
    """Every core by mode; a line that is not understood costs its core alone.  Only the wanted
    lines are taken apart (`intr` has a number for every interrupt), and the samples are made
    together: a large node has 1,500."""
    subjects: list[str] = []
    ticks: list[int] = []
    for line in CORE.findall(stat)[:CPUS_MAX]:
        core, *spent = line.split()
        try:
            modes, numbers = _subjects(core), list(map(int, spent[: len(MODES)]))
        except ValueError:
            continue
        subjects += modes[: len(numbers)]
        ticks += numbers
    values = [spent / TICKS_PER_S for spent in ticks]
    rows = zip(repeat("host_cpu_seconds_total"), subjects, values, repeat(boot_s))
    return list(map(Sample._make, rows))


def _boot_time(stat: str, boot_s: float) -> list[Sample]:
    _, found, rest = stat.partition("\nbtime ")
    word = rest.split(None, 1)[0] if found and rest.strip() else ""
    return [Sample("host_boot_time_seconds", "", float(word), boot_s)] if word.isdecimal() else []
