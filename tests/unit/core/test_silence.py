"""What nobody can look at stands: silent collectors, and an agent that was not there."""

from __future__ import annotations

import pytest

from holdfast.agent.catalog import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.detect.devices.accelerator import PROCESS
from holdfast.agent.core.model import (
    FATAL,
    Gate,
    Incident,
    Now,
    Observed,
    Reading,
    Settings,
    StoreView,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.parse.kernel_line import parse

from .driver import Lab
from .test_repair import FALLEN, SETTLE_S, Repaired, process
from .test_stale_locks import LOCK, lab, orders

GPU = "vendor=nvidia,device=3"
INFO = ("accelerator_info", f"{GPU},name=H100,uuid=GPU-1,pci=00000000:9B:00.0", 1.0, 1.0)
FAILED = ("accelerator_row_remap_failed", GPU, 1.0, 1.0)


class Life:
    """A node and what its collectors say; the time goes on by itself."""

    rows: tuple[Reading, ...]
    silent: tuple[str, ...]

    def __init__(self, *rows: Reading) -> None:
        self.node = Node("a", Settings(), load_runbooks())
        self.rows, self.silent = rows, ()
        self.boot_s = 1000.0
        self.seen: dict[str, Incident] = {}

    def begin_anew(self, after_s: float = 1.0) -> None:
        self.node = Node("a", Settings(), load_runbooks(), self.node.memory())
        self.boot_s += after_s

    def step(self, seconds: float = 15.0, times: int = 1) -> set[str]:
        """The faults that are shown."""
        for _ in range(times):
            self.boot_s += seconds
            rows = [(name, subject, value, self.boot_s) for name, subject, value, _ in self.rows]
            observed = Observed(samples=readings_of(rows, self.silent), store=StoreView(up=True))
            decision = self.node.step(Now(self.boot_s, 1e9 + self.boot_s, "b"), observed)
            self.seen |= {one.id: one for one in decision.incidents}
        return {one.fault for one in decision.verdicts}

    def states(self) -> list[str]:
        return [one.state for one in self.seen.values()]


def test_a_stop_of_the_agent_closes_nothing_that_is_still_so() -> None:
    life = Life(INFO, FAILED)
    assert life.step() == {"row_remap_failed"}
    rows, life.rows = life.rows, ()
    life.begin_anew(300.0)
    assert life.step(0.1, 3) == {"row_remap_failed"}  # before anything was read
    life.rows = rows
    assert life.step() == {"row_remap_failed"} and life.states() == ["open"]
    life.rows = ()
    life.begin_anew(300.0)
    assert life.step(15.0, 12) == {"row_remap_failed"} and life.states() == ["open"]
    assert life.step(15.0, 2) == set() and life.states() == ["closed"]


def test_a_source_that_is_silent_since_the_agent_began_closes_nothing() -> None:
    life = Life(INFO, FAILED)
    life.step()
    life.rows, life.silent = (), ("accelerator_row_remap_failed",)
    life.begin_anew()
    assert life.step(60.0, 100) == {"row_remap_failed"} and life.states() == ["open"]
    life.silent = ("host_clock_synchronized",)  # another's silence says nothing of this one
    life.step(15.0, 14)
    assert life.states() == ["closed"]


def test_a_source_that_a_detector_does_not_rest_on_holds_none_of_its_incidents() -> None:
    names = ("host_memory_total_bytes", "host_memory_available_bytes")
    life = Life(*((name, "", value, 1.0) for name, value in zip(names, (100e9, 1e9))))
    assert "host_memory_low" in life.step(15.0, 6)
    life.begin_anew()
    life.rows = tuple((name, "", value, 1.0) for name, value in zip(names, (100e9, 50e9)))
    life.silent = ("host_filesystem_size_bytes",)
    assert life.step(15.0, 60) == set() and life.states() == ["closed"]


def test_a_source_that_nobody_reads_any_more_is_said_so() -> None:
    life = Life(INFO, FAILED)
    life.step()
    life.begin_anew()
    life.rows = ()
    life.step(15.0, 20)
    (closed,) = life.seen.values()
    assert closed.timeline[-1][1] == "nobody looks at it any more"


def test_a_window_that_begins_anew_has_its_time() -> None:
    life = Life(("host_clock_synchronized", "", 0.0, 1.0))
    assert life.step(15.0, 30) == {"clock_unsynchronised"}
    life.begin_anew()
    assert life.step(15.0, 40) == {"clock_unsynchronised"} and life.states() == ["open"]


def test_new_settings_and_runbooks_begin_no_window_anew() -> None:
    life = Life(("host_clock_synchronized", "", 0.0, 1.0))
    life.step(15.0, 20)
    life.node.configure(Settings(stopped_s=2.0), load_runbooks())  # as a reload does
    assert life.step() == {"clock_unsynchronised"} and life.states() == ["open"]


def test_one_reading_of_a_collector_that_fell_silent_is_no_lasting_want() -> None:
    life = Life()
    short = (("host_memory_total_bytes", "", 1e12, 5.0),
             ("host_memory_available_bytes", "", 1e9, 5.0))
    for second in range(5, 200, 5):
        rows = (*short, ("host_zombies", "", 0.0, float(second)))
        observed = Observed(samples=readings_of(rows, ("host_memory_available_bytes",)))
        decision = life.node.step(Now(float(second), 1e9, "b"), observed)
    assert "host_memory_low" not in {one.fault for one in decision.verdicts}


def test_nothing_is_done_about_what_is_only_remembered() -> None:
    made: Lab = lab("remove_lock")
    made.silent = (LOCK[0],)
    assert orders(made) == []
    assert "compile_lock_stale" in {one.fault for one in made.decision.verdicts}
    made.silent = ()
    assert len(orders(made)) == 1


def test_processes_that_a_silent_driver_listed_count_while_they_live() -> None:
    machine = Repaired("reboot_node")
    machine.samples, machine.silent = (process(4711),), (PROCESS,)
    machine.gate = Gate(seen=((4711, "nvidia device 3"),))
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert not machine.orders
    machine.gate = Gate()
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot"]


MILD = "NVRM: Xid (PCI:0000:9b:00): 31, pid=7, name=python, Ch 00000008"
NEURON_LINE = "neuron:kernel: NEURON_HW_ERR=DMA_ERROR instance-id=i-1 nd=3"


@pytest.mark.parametrize(("line", "rows", "faults"), [
    (MILD, (INFO, FAILED), {"row_remap_failed", "gpu_application_error"}),
    (MILD.replace("31", "79"), (INFO, FAILED), {"gpu_fell_off_bus"}),
])
def test_a_mild_incident_of_a_device_hides_none_that_is_worse(
    line: str, rows: tuple[Reading, ...], faults: set[str]
) -> None:
    event = parse(load.load(), line, 1, 1.0)
    assert event is not None
    node = Node("a", Settings(), load_runbooks())
    for second in (1.0, 2.0):
        seen = Observed(samples=readings_of(rows if second > 1.0 else ()), events=(event,))
        decision = node.step(Now(second, 1e9, "b"), seen)
    assert {one.fault for one in decision.incidents} == faults


def test_a_card_that_both_the_kernel_and_its_readings_name_is_one_incident() -> None:
    line = "mlx5_core 0000:5c:00.0: device's health compromised - reached miss count"
    event = parse(load.load(), line, 1, 1.0)
    assert event is not None and event.severity == FATAL, event
    node = Node("a", Settings(), load_runbooks())
    listed = ("network_info", "device=mlx5_3,kind=infiniband,pci=0000:5c:00.0,driver=mlx5_core")
    decision = None
    for second in range(1, 8):
        at = float(second)
        rows = [(*listed, 1.0, at)] if second < 3 else []
        on_bus = "0000:5c:00.0" if second < 3 else "0000:00:1f.0"
        rows.append(("pci_bound", f"pci={on_bus}", 1.0, at))
        rows.append(("network_unread_files", "collector=network,reason=junk", 0.0, at))
        seen = Observed(samples=readings_of(rows), events=(event,))
        decision = node.step(Now(at, 1e9, "b"), seen)
    assert decision is not None
    assert "nic_lost" in {one.fault for one in decision.verdicts}
    assert {one.fault for one in decision.incidents} == {"nic_error"}
