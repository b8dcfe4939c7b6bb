"""A node whose readings change as a test says, and whatever its detector tells of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.agent.core.detect.detector import NodeView
from holdfast.agent.core.detect.host.host import Host
from holdfast.agent.core.model import (
    Ended,
    Event,
    Observed,
    RankView,
    RunView,
    StoreView,
    Verdict,
    readings_of,
)

CORES = 8


@dataclass
class Machine:
    """A node whose readings change as the test says; five seconds a look, slow ones each third."""

    boot_s: float = 1000.0
    kernel: dict[int, float] = field(default_factory=dict)  # core -> share in the kernel
    busy: dict[int, dict[str, float]] = field(default_factory=dict)
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    runs: tuple[RunView, ...] = ()
    _slow_rows: tuple[tuple[str, str, float, float], ...] = ()
    looks: int = 0

    def look(self) -> Observed:
        self.boot_s += 5.0
        rows = []
        for core in range(CORES):
            modes = self.busy.setdefault(core, dict.fromkeys(("user", "system", "idle"), 0.0))
            share = self.kernel.get(core, 0.02)
            modes["system"] += 5.0 * share
            modes["idle"] += 5.0 * (1.0 - share)
            rows += [("host_cpu_seconds_total", f"cpu={core},mode={mode}", value, self.boot_s)
                     for mode, value in modes.items()]
        if self.looks % 3 == 0:
            self._slow_rows = tuple(
                (name, subject, value, self.boot_s) for (name, subject), value in self.slow.items()
            )
        self.looks += 1
        return Observed(samples=readings_of((*rows, *self._slow_rows)), events=self.events,
                        runs=self.runs, store=StoreView(up=True))


def told(host: Host, machine: Machine, looks: int = 1) -> dict[str, Verdict]:
    verdicts: list[Verdict] = []
    for _ in range(looks):
        verdicts = host.look(NodeView((), machine.look()))
    return {f"{one.fault} {one.subject}": one for one in verdicts}


def leaking(machine: Machine, host: Host, minutes: int, unit: str = "ecs.service",
            each: int = 4) -> dict[str, Verdict]:
    """A unit that restarts four times a minute and leaves `each` cgroups behind each minute."""
    found: dict[str, Verdict] = {}
    machine.slow.setdefault(("host_units", ""), 120.0)
    machine.slow.setdefault(("host_memory_cgroups", "state=in_use"), 240.0)
    for _ in range(minutes * 4):
        key = ("host_unit_restarts_total", f"unit={unit}")
        machine.slow[key] = machine.slow.get(key, 0.0) + 1.0
        held = ("host_memory_cgroups", "state=dying")
        machine.slow[held] = machine.slow.get(held, 68_000.0) + each / 4
        found = told(host, machine, 3)
    return found


def ranks(*cgroups: str, state: str = "running", ended: Ended | None = None) -> RunView:
    return RunView("m5", "a", "trainer", len(cgroups), ranks=tuple(
        RankView(rank, "a", 100 + rank, 1, state, cgroup=cgroup, ended=ended)
        for rank, cgroup in enumerate(cgroups)))
