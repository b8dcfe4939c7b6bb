"""Incidents of what stands: opened once, said again when worse, closed when gone."""

from __future__ import annotations

import pytest

from holdfast.agent.catalog import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Incident, Now, Observed, Settings, Verdict, readings_of
from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes.condition_incidents import OPEN_MAX
from holdfast.agent.core.parse.kernel_line import parse

from .host_machine import Machine, leaking


class Life:
    """A node with the shipped runbooks, stepped over a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.node = Node("a", Settings(), load_runbooks())

    def step(self, looks: int = 1, boot_id: str = "b1") -> dict[str, Incident]:
        for _ in range(looks):
            observed = self.machine.look()
            now = Now(self.machine.boot_s, 1e9 + self.machine.boot_s, boot_id)
            self.decision = self.node.step(now, observed)
        again = self.node.step(now, observed)
        assert again.incidents == tuple(
            one for one in self.decision.incidents if one.state == "open")
        return {one.id: one for one in self.decision.incidents}


def test_an_incident_opens_once_grows_and_closes() -> None:
    life = Life(Machine(slow={("host_open_files", ""): 80.0, ("host_open_files_max", ""): 100.0}))
    (opened,) = life.step().values()
    assert opened.culprit == "limit open-files of a" and opened.run == ""
    assert opened.would_have == "ask_person: a person's part"
    life.machine.slow["host_open_files", ""] = 81.0
    assert life.step(3) == {opened.id: opened}
    life.machine.slow["host_open_files", ""] = 95.0
    (grown,) = life.step(3).values()
    assert grown.severity == "degraded" and grown.timeline[-1][1].startswith("now: 95 of 100")
    life.machine.slow["host_open_files", ""] = 10.0
    assert life.step(12)[opened.id].state == "open"
    closed = [one for _ in range(6) for one in life.step().values() if one.state == "closed"]
    assert [one.id for one in closed] == [opened.id]
    assert life.step() == {}


def test_the_chain_takes_the_incidents_of_its_links_over() -> None:
    life = Life(Machine(kernel={3: 0.98}))
    life.machine.slow["host_memory_cgroups", "state=dying"] = 30_000.0
    first = life.step(15)
    assert {one.fault for one in first.values()} == {"host_cgroup_leak", "host_core_pinned"}
    closed, host = {}, life.node.watch.seats["host"].detector
    for _ in range(12):
        leaking(life.machine, host, 1)
        closed |= {i: one for i, one in life.step().items() if one.state == "closed"}
    assert set(closed) == set(first)
    assert all("ecs.service" in one.timeline[-1][1] for one in closed.values())
    (left,) = life.step().values()
    assert left.culprit == "unit ecs.service of a" and left.fault == "unit_crash_loop"


def test_memory_survives_the_agent_and_ends_with_the_boot() -> None:
    life = Life(Machine(slow={("host_open_files", ""): 80.0, ("host_open_files_max", ""): 100.0}))
    (opened,) = life.step().values()
    life.node = Node("a", Settings(), load_runbooks(), life.node.memory())
    assert life.step() == {opened.id: opened}
    found = life.step(boot_id="b2")
    assert found[opened.id].state == "closed" and "rebooted" in found[opened.id].timeline[-1][1]


def verdict(fault: str, number: int, severity: str) -> Verdict:
    return Verdict(fault, f"node/a/mount/{number:02}", severity, 1.0, f"{fault} {number}")


def standing(life: Life, verdicts: list[Verdict]) -> dict[str, Incident]:
    """One step of the standing incidents alone; those that changed."""
    now = Now(life.machine.boot_s, 1e9, "b1")
    ctx = life.node._any(now, Observed(), [], [], [], {})
    life.node.conditions.step(ctx, verdicts)
    return ctx.changed


def test_what_is_worse_finds_room_among_many_that_are_mild() -> None:
    life = Life(Machine())
    mild = [verdict("filesystem_full", number, "warn") for number in range(40)]
    assert len(standing(life, mild)) == OPEN_MAX
    worse = verdict("filesystem_readonly", 99, "degraded")
    changed = standing(life, [*mild, worse])
    (closed,) = [one for one in changed.values() if one.state == "closed"]
    (opened,) = [one for one in changed.values() if one.state == "open"]
    assert opened.fault == "filesystem_readonly" and closed.fault == "filesystem_full"
    assert closed.timeline[-1][1] == "made room for something worse"
    assert len(life.node.conditions.book.open) == OPEN_MAX
    assert standing(life, [*mild, worse]) == {}  # nobody takes turns
    many = [verdict("filesystem_readonly", number, "degraded") for number in range(50)]
    standing(life, [*mild, *many])
    assert {one.severity for one in life.node.conditions.book.incidents().values()} == {"degraded"}
    assert standing(life, [*mild, *many, verdict("filesystem_readonly", 98, "degraded")]) == {}
    fresh = Life(Machine())
    opened_at_once = standing(fresh, [*mild, *many])
    assert {one.state for one in opened_at_once.values()} == {"open"}


def test_a_second_cgroup_at_its_limit_is_news_to_the_incident_of_the_first() -> None:
    life = Life(Machine(slow={("cgroup_tasks_ratio", "cgroup=/slurm/job_1"): 0.95}))
    (opened,) = life.step().values()
    assert opened.subject == "node/a/limit/cgroup-tasks" and "job_1 has 95%" in opened.reason
    life.machine.slow["cgroup_tasks_ratio", "cgroup=/slurm/job_2"] = 0.97
    (grown,) = life.step(3).values()
    assert grown.id == opened.id and "job_2 has 97%" in grown.reason
    assert [what for what, _ in grown.evidence] == ["cgroup /slurm/job_1", "cgroup /slurm/job_2"]


GPU = "vendor=nvidia,device=3"
REMAP = (("accelerator_info", f"{GPU},name=H100,uuid=GPU-1,pci=00000000:9B:00.0", 1.0, 1.0),
         ("accelerator_row_remap_pending", GPU, 1.0, 1.0))
XID = "NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(("bus", "faults"), [
    ("", {"row_remap_pending"}),
    ("1a", {"row_remap_pending"}),  # another device's line
    ("9b", set()),
])
def test_what_a_driver_says_of_a_device_is_an_incident_unless_the_kernel_said_it(
    bus: str, faults: set[str]
) -> None:
    line = parse(load.load(), XID.format(bus=bus), 1, 1.0) if bus else None
    events = (line,) if line else ()
    node = Node("a", Settings(), load_runbooks())
    found: dict[str, Incident] = {}
    for second in (1.0, 2.0):
        seen = Observed(samples=readings_of(REMAP if second > 1.0 else ()), events=events)
        found |= {one.id: one for one in node.step(Now(second, 1e9, "b"), seen).incidents}
    standing = {one.fault for one in found.values() if one.subject == "node/a/gpu/3"}
    assert standing == faults
    assert len(found) == (2 if bus == "1a" else 1), found
