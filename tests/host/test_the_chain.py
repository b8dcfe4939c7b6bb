"""The chain that took three months to find, from recorded files to the incident that is read:
a unit crashes again and again and leaves memory cgroups behind, one core walks them in the kernel,
and the network card that it serves is reset.  HOLDFAST_GOLDEN=write makes the texts anew."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pages import page, same_as_golden

from holdfast.agent.catalog.load import load
from holdfast.agent.cli import report
from holdfast.agent.cli.text import WIDTH, plain
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import (
    Ended,
    Now,
    Observed,
    RankView,
    RunView,
    Settings,
    StoreView,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.parse.kernel_line import parse
from holdfast.collectors.cgroups import CgroupsCollector
from holdfast.collectors.contract import Roots, Sample
from holdfast.collectors.cpu import CpuCollector
from holdfast.collectors.host import HostCollector
from holdfast.collectors.tasks import TasksCollector
from holdfast.collectors.units import UnitsCollector

GOLDEN = Path(__file__).resolve().parent / "golden"
CORES, BURNING = 16, 11
RESET = "NETDEV WATCHDOG: eth0 (ena): transmit queue 11 timed out"
COLLECTORS = (CpuCollector, HostCollector, TasksCollector, CgroupsCollector, UnitsCollector)
STAT = "812 (ecs-agent) S 1 1 1 0 -1 64 0 0 0 0 5 {kernel} 0 0 20 0 1 0 100 0 0 " \
       "18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 11 0 0 0 0 0\n"


class Recorded:
    """The files of such a node, fifteen seconds further at each step."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.base = folder / "proc", folder / "sys/fs/cgroup/memory"
        for place in (self.proc / "812", self.proc / "pressure", folder / "bin",
                      self.base / "system.slice/ecs.service", self.base / "job/run1"):
            place.mkdir(parents=True)
        (self.base / "release_agent").touch()
        (self.proc / "meminfo").write_text("MemTotal: 1056779116 kB\nMemAvailable: 512000000 kB\n")
        (self.proc / "loadavg").write_text("9.10 8.70 8.02 18/5321 70412\n")
        self.tool = folder / "bin/systemctl"
        self.tool.write_text('#!/bin/sh\ncat "$0.answer"\n')
        self.tool.chmod(0o755)
        self.roots = Roots(proc=str(self.proc), sys=str(folder / "sys"))
        self.steps = 0

    def go_on(self) -> None:
        self.steps += 1
        n = self.steps
        rows = []
        for core in range(CORES):
            user, system, idle = (15, 1440, 15) if core == BURNING else (600, 30, 840)
            rows.append(f"cpu{core} {user * n} 0 {system * n} {idle * n} 0 0 {30 * n} 0 0 0")
        (self.proc / "stat").write_text("\n".join(["cpu  1 1 1 1", *rows, "btime 1763000000"]))
        (self.proc / "cgroups").write_text(f"#subsys_name\nmemory\t4\t{68_000 + n}\t1\n")
        (self.proc / "812/stat").write_text(STAT.format(kernel=1410 * n))
        (self.proc / "pressure/cpu").write_text(
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={n * 1000}\n")
        Path(f"{self.tool}.answer").write_text(
            f"Id=ecs.service\nNRestarts={400 + n}\nActiveState=activating\n\n"
            "Id=sshd.service\nNRestarts=0\nActiveState=active\n")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    one = Recorded(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{one.tool.parent}:{os.environ['PATH']}")
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield one
    time.tzset()


def run_with_a_stalled_rank() -> RunView:
    """Its rank ends with an error of the network, as every rank of that node did."""
    ended = Ended(1, outcome="exception", error="NCCL timeout", boot_s=1500.0)
    return RunView("m5", "node-17", "trainer", 1, generation=1, state="running",
                   ranks=(RankView(12, "node-17", 4711, 1, "ended", ended=ended),))


def test_the_incident_names_the_unit_and_not_the_job(recorded: Recorded) -> None:
    collectors = [make() for make in COLLECTORS]
    node, catalogue = Node("node-17", Settings(), load_runbooks()), load()
    events, samples = [], tuple[Sample, ...]()
    for step in range(1, 42):
        recorded.go_on()
        boot_s = 1000.0 + 15.0 * step
        samples = tuple(one for made in collectors for one in made.collect(recorded.roots, boot_s))
        if step in (30, 36):
            event = parse(catalogue, RESET, step, boot_s)
            assert event is not None and event.subject == "nic/eth0"
            events.append(event)
        observed = Observed(
            samples=readings_of(samples), runs=(run_with_a_stalled_rank(),),
            store=StoreView(up=True),
            events=tuple(one for one in events if boot_s - one.boot_s <= 60.0),
        )
        decision = node.step(Now(boot_s, 1.7637e9 + boot_s, "b"), observed)
    mine = [one for one in decision.incidents if one.fault.startswith(("unit_", "host_"))]
    (incident,) = mine
    assert incident.subject == "node/node-17/unit/ecs.service" and incident.run == ""
    assert "no run is to blame" in incident.reason
    text = plain(report.incident(msgspec.to_builtins(incident)))
    assert max(len(row) for row in text.splitlines()) <= WIDTH
    same_as_golden(GOLDEN / "chain_incident.txt", text)
    same_as_golden(GOLDEN / "chain_metrics.txt", shown(samples))


def shown(samples: tuple[Sample, ...]) -> str:
    other = [f"cpu={core}," for core in range(CORES) if core != BURNING]
    fewer = [one for one in samples if not one.subject.startswith(tuple(other))]
    read = {one.name for one in fewer}
    declared = [metric for make in COLLECTORS for metric in make.metrics]
    return page(fewer, [metric for metric in declared if metric.name in read])


def test_no_process_and_no_single_cgroup_is_on_the_page() -> None:
    text = (GOLDEN / "chain_metrics.txt").read_text()
    assert not re.search(r"pid=|task_|cgroup_dying", text)
