"""The host's load, memory, pressure, open files and this agent's cgroup, from /proc and /sys.

Owns the host metrics that need no device, but for the processors' (cpu.py).  Reads only; a file
that is missing costs its own metrics alone, and a machine without any of them is NoData.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .contract import FAST, NODE_EXPORTER, Metric, NoData, Roots, Sample
from .sources.files import read_text, text_of

MEMORY = {
    "MemTotal": "host_memory_total_bytes", "MemAvailable": "host_memory_available_bytes",
    "Dirty": "host_memory_dirty_bytes", "Shmem": "host_memory_shared_bytes",
    "SwapTotal": "host_swap_total_bytes", "SwapFree": "host_swap_free_bytes",
}
Reading = tuple[str, str, float]  # name, subject, value


class HostCollector:
    """Samples `host_*` of the node; each missing file costs its own metrics alone."""

    name = "host"
    pace = FAST
    metrics = (
        Metric("host_load_average", "gauge", "Runnable and uninterruptible tasks, averaged.",
               ("window",), False, NODE_EXPORTER),
        Metric("host_memory_total_bytes", "gauge", "Memory of the machine.",
               (), True, NODE_EXPORTER),
        Metric("host_memory_available_bytes", "gauge", "Memory to be had without swapping.",
               (), True, NODE_EXPORTER),
        Metric("host_memory_dirty_bytes", "gauge", "Memory that waits to be written to disk.",
               (), False, NODE_EXPORTER),
        Metric("host_memory_shared_bytes", "gauge", "Shared memory, /dev/shm and tmpfs included.",
               (), False, NODE_EXPORTER),
        Metric("host_swap_total_bytes", "gauge", "Swap space.", (), False, NODE_EXPORTER),
        Metric("host_swap_free_bytes", "gauge", "Unused swap space.", (), False, NODE_EXPORTER),
        Metric("host_pressure_seconds_total", "counter",
               "Time in which some or all tasks waited for a resource.", ("resource", "kind"),
               True, NODE_EXPORTER),
        Metric("host_oom_kills_total", "counter", "Processes that the kernel killed for memory.",
               (), True, NODE_EXPORTER),
        Metric("host_open_files", "gauge", "File handles in use.", (), False, NODE_EXPORTER),
        Metric("host_open_files_max", "gauge", "File handles that the kernel allows.",
               (), False, NODE_EXPORTER),
        Metric("host_processes", "gauge", "Tasks of the machine, threads included."),
        Metric("host_processes_max", "gauge", "Largest process number plus one."),
        Metric("host_cgroup_memory_bytes", "gauge", "Memory of the agent's own cgroup."),
        Metric("host_cgroup_memory_max_bytes", "gauge", "Limit of the agent's own cgroup."),
    )

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData when none of it is at this root."""
        found: list[Sample] = []
        parts: tuple[Callable[[Roots], Iterator[Reading]], ...] = (
            _load, _memory, _pressure, _oom_kills, _limits, _cgroup)
        for part in parts:
            try:
                for name, subject, value in part(roots):
                    found.append(Sample(name, subject, value, boot_s))
            except (NoData, ValueError, IndexError):
                continue  # this kernel lacks it or writes it otherwise: the others still count
        if not found:
            raise NoData(f"{roots.proc} tells nothing of a host")
        return found


def _load(roots: Roots) -> Iterator[Reading]:
    fields = read_text(f"{roots.proc}/loadavg").split()
    for window, value in zip(("1m", "5m", "15m"), fields):
        yield "host_load_average", f"window={window}", float(value)
    yield "host_processes", "", float(fields[3].split("/")[1])


def _memory(roots: Roots) -> Iterator[Reading]:
    for line in read_text(f"{roots.proc}/meminfo").splitlines():
        key, _, rest = line.partition(":")
        if key in MEMORY:
            yield MEMORY[key], "", float(int(rest.split()[0]) * 1024)


def _pressure(roots: Roots) -> Iterator[Reading]:
    for resource in ("cpu", "io", "irq", "memory"):
        for line in text_of(f"{roots.proc}/pressure/{resource}").splitlines():
            fields = line.split()
            total_us = int(fields[-1].partition("=")[2])
            subject = f"resource={resource},kind={fields[0]}"
            yield "host_pressure_seconds_total", subject, total_us / 1e6


def _oom_kills(roots: Roots) -> Iterator[Reading]:
    for line in read_text(f"{roots.proc}/vmstat").splitlines():
        if line.startswith("oom_kill "):
            yield "host_oom_kills_total", "", float(line.split()[1])


def _limits(roots: Roots) -> Iterator[Reading]:
    used, _, most = read_text(f"{roots.proc}/sys/fs/file-nr").split()
    yield "host_open_files", "", float(used)
    if float(most) < 1e15:  # recent kernels say "no limit" by the largest 63-bit number
        yield "host_open_files_max", "", float(most)
    yield "host_processes_max", "", float(read_text(f"{roots.proc}/sys/kernel/pid_max"))


def _cgroup(roots: Roots) -> Iterator[Reading]:
    """Version 2 or, on older machines, version 1; the limit only where one is set."""
    memory_path = ""
    for line in read_text(f"{roots.proc}/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not memory_path:
            memory_path = f"{roots.sys}/fs/cgroup{path}/memory.current"
            limit_path = f"{roots.sys}/fs/cgroup{path}/memory.max"
        elif "memory" in controllers.split(","):
            memory_path = f"{roots.sys}/fs/cgroup/memory{path}/memory.usage_in_bytes"
            limit_path = f"{roots.sys}/fs/cgroup/memory{path}/memory.limit_in_bytes"
            break
    if not memory_path:
        return
    yield "host_cgroup_memory_bytes", "", float(read_text(memory_path))
    limit = read_text(limit_path).strip()
    if limit != "max" and float(limit) < 1 << 60:
        yield "host_cgroup_memory_max_bytes", "", float(limit)
