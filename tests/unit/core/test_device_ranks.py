"""Which rank lived on the device that the kernel names, also when its driver has hung already."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import Ended, Observed, RankView, RunView, readings_of
from holdfast.agent.core.nodes.device_ranks import PIDS_MAX, PLACES_MAX, Places
from holdfast.agent.core.parse.kernel_line import parse

from .driver import Lab
from .test_kernel import BOOKS, CATALOGUE, XID, Machine

DEVICE = "vendor=nvidia,device=3"
UNKNOWN = "<unknown>"


def trained() -> Lab:
    """A run of two ranks whose rank 1 computes on GPU 3 and on Neuron device 3."""
    lab = Lab()
    lab.node.runbooks = lab.runbooks = BOOKS
    lab.settle()
    lab.all(state="running", step=5)
    lab.step(1.0)
    pid = lab.view.ranks[1].pid
    lab.samples = tuple((name, subject, 1.0, lab.boot_s) for name, subject in (
        ("accelerator_info", f"{DEVICE},name=H100,pci=00000000:4E:00.0"),
        ("accelerator_process", f"{DEVICE},pid={pid}"),
        ("accelerator_info", "vendor=neuron,device=3,name=Trainium2,pci=0000:a0:1c.0"),
        ("accelerator_process", f"vendor=neuron,device=3,pid={pid}"),
    ))
    lab.step(0.1)
    return lab


def say(lab: Lab, line: str) -> dict:
    """The incidents by run, once the kernel has said it."""
    lab.events = (parse(CATALOGUE, line, 1, lab.boot_s),)
    lab.step(0.1)
    return {one.run: one for one in lab.decision.incidents}


def test_a_gpu_is_named_with_its_rank_where_its_driver_listed_them():
    found = say(trained(), XID % (79, UNKNOWN))
    assert found[""].culprit == "GPU 3 (0000:4e:00) of a; rank 1 of run r lived there"
    assert found[""].reason.startswith("XID 79 on GPU 3 (0000:4e:00) of a: GPU has fallen off")
    assert found[""].reason.endswith("; training must stop")
    assert found["r"].subject == "run/r/rank/1" and found["r"].fault == "gpu_fell_off_bus"


@pytest.mark.parametrize("line", [
    XID % (79, 555), XID % (95, 555),
    "NVRM: Xid (PCI:0000:4e:00): 119, pid=555, name=nvidia-smi, Timeout after 6s of waiting for "
    "RPC response from GPU4 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2081 0x4).",
])
def test_a_line_that_names_a_bystander_stops_the_rank_on_that_gpu(line):
    found = say(trained(), line)
    assert found["r"].subject == "run/r/rank/1"


def test_a_line_that_names_a_rank_stops_that_one_alone():
    lab = trained()
    found = say(lab, XID % (95, lab.rank(0).pid))
    assert found["r"].subject == "run/r/rank/0"


def test_what_a_driver_listed_before_it_hung_is_not_forgotten():
    lab = trained()
    lab.samples = ()  # its child was killed
    lab.step(5.0)
    lab.restart_agent()
    found = say(lab, XID % (119, 555))
    assert found[""].culprit == "GPU 3 (0000:4e:00) of a; rank 1 of run r lived there"
    assert found["r"].subject == "run/r/rank/1"


def test_a_lost_gpu_lists_no_process_and_its_rank_is_named_all_the_same():
    lab = trained()
    lab.samples = lab.samples[:1]
    lab.step(5.0)
    assert "rank 1 of run r" in say(lab, XID % (79, UNKNOWN))[""].culprit


def test_a_gpu_that_is_well_and_idle_has_nobodys_rank():
    lab = trained()
    pid = lab.view.ranks[1].pid
    lab.samples = tuple((name, subject, 1.0, lab.boot_s) for name, subject in (
        ("accelerator_info", f"{DEVICE},name=H100,pci=00000000:4E:00.0"),
        ("accelerator_temperature_celsius", DEVICE),
        ("accelerator_info", "vendor=nvidia,device=4,name=H100,pci=00000000:5E:00.0"),
        ("accelerator_process", f"vendor=nvidia,device=4,pid={pid}"),
    ))
    lab.step(5.0)
    found = say(lab, XID % (79, UNKNOWN))
    assert "r" not in found and "lived there" not in found[""].culprit


def test_a_neuron_device_is_named_with_its_rank_and_its_runbook_ends_no_run():
    found = say(trained(), "NEURON_HW_ERR=DMA_ERROR nd-id=3 nc-id=1")
    assert found[""].culprit == (
        "Neuron device 3 (0000:a0:1c) of a; rank 1 of run r lived there"
    )
    assert found[""].reason.endswith("; training must stop") and "r" not in found


def test_a_fault_without_a_restart_in_its_runbook_ends_no_run():
    lab = trained()
    found = say(lab, XID % (54, lab.rank(1).pid))
    assert found[""].fault == "gpu_needs_inspection" and "r" not in found
    assert not [effect for effect in lab.log if effect.kind in ("stop", "finish")]


def test_a_rank_that_has_ended_did_not_live_there():
    lab = trained()
    lab.end(1, Ended(0, 0, boot_s=lab.boot_s))
    assert "rank" not in say(lab, XID % (79, UNKNOWN))[""].culprit


def test_a_kill_for_memory_names_the_rank_and_its_cgroup():
    """In a container the cgroup may not be visible, and the line's own words are any user's."""
    lab = trained()
    for rank in (1, 0):
        lab.change(rank, cgroup=f"/job/{rank}")
    line = "Memory cgroup out of memory: Killed process %d (python3) total-vm:1kB"
    lab.end(1, Ended(137, 9, boot_s=lab.boot_s))
    lab.events = (parse(CATALOGUE, line % lab.rank(1).pid, 1, lab.boot_s),)
    lab.step(0.1)
    (incident,) = [one for one in lab.decision.incidents if not one.run]
    assert incident.culprit == "a; the process was rank 1 of run r"
    assert ("cgroup", "/job/1") in incident.evidence
    more = parse(CATALOGUE, line % lab.rank(0).pid, 2, lab.boot_s)
    lab.events = (*lab.events, more, msgspec.structs.replace(more, cursor=3))
    lab.step(0.1)
    (incident,) = [one for one in lab.decision.incidents if not one.run]
    assert incident.culprit == (
        "a; the process was rank 1 of run r; the process was rank 0 of run r"
    )


def test_the_number_joins_an_incident_that_was_there_before_the_driver_was_asked():
    machine = Machine()
    machine.say(XID % (79, UNKNOWN))
    (before,) = machine.open()
    assert before.culprit == "GPU 0000:4e:00 of a"
    machine.samples = (("accelerator_info", f"{DEVICE},pci=0000:4e:00.0", 1.0, machine.boot_s),)
    (after,) = machine.open()
    assert after.id == before.id and after.culprit == "GPU 3 (0000:4e:00) of a"
    machine.samples = ()
    machine.reboot()  # numbers may be others now
    assert not machine.node.kernel.memory.places


def test_the_table_is_bounded_and_takes_junk():
    places = Places({})
    rows = [("accelerator_info", f"vendor=nvidia,device={n},pci=0000:{n:04x}:00.0", 1.0, 1.0)
            for n in range(2 * PLACES_MAX)]
    rows += [("accelerator_process", f"vendor=nvidia,device={PLACES_MAX},pid={pid}", 1.0, 1.0)
             for pid in (*range(1000), "junk", "-1", "9" * 40, "")]
    observed = Observed(samples=readings_of(rows))
    assert places.look(observed) and not places.look(observed)
    assert len(places.known) == PLACES_MAX
    assert {len(place.pids) for place in places.known.values()} == {0, PIDS_MAX}
    rank = RankView(rank=0, node="a", pid=0, generation=1, state="running")
    run = RunView(run="r", node="a", grade="trainer", nproc=1, ranks=(rank,))
    observed = Observed(samples=readings_of(rows), runs=(run,))
    event = parse(CATALOGUE, f"NVRM: Xid (PCI:0000:{PLACES_MAX:04x}:00): 79, x")
    assert places.ranks(event, observed) == ()


@pytest.mark.parametrize("pid", [UNKNOWN, None])
def test_a_line_from_before_a_rank_began_is_no_cause_of_its(pid):
    """A private agent of the same name reads on where the last one stopped, days later."""
    lab = trained()
    lab.change(1, start_boot_s=lab.boot_s - 5.0)
    line = XID % (95, lab.rank(1).pid if pid is None else pid)
    lab.events = (parse(CATALOGUE, line, 1, lab.boot_s - 50.0),)
    lab.step(0.1)
    (incident,) = lab.decision.incidents
    assert incident.run == "" and incident.culprit == "GPU 3 (0000:4e:00) of a"
    assert incident.opened_wall_s == pytest.approx(1e9 + lab.boot_s - 50.1)
    lab.events = (parse(CATALOGUE, line, 2, lab.boot_s),)
    lab.step(0.1)
    assert {one.run for one in lab.decision.incidents} == {"", "r"}


def test_lines_that_are_read_late_count_by_when_they_were_said():
    """Two page faults ten hours apart, read together after a stop of the agent."""
    machine = Machine()
    machine.boot_s = 100_000.0
    machine.events = tuple(
        parse(CATALOGUE, XID % (31, 5), number, machine.boot_s - age_s)
        for number, age_s in enumerate((36_100.0, 100.0))
    )
    (incident,) = machine.open()
    assert incident.would_have == ""  # its rung, run_check, is the agent's own
    machine.step(510.0)  # ten minutes after the second was said
    assert not machine.open()
