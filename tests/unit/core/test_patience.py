"""XID 154: what the driver asks for at once, and what it lets wait until nothing works there."""

from __future__ import annotations

import msgspec

from holdfast.agent.core.model import DEGRADED, FATAL, WARN, RankView
from holdfast.agent.core.nodes.repair import SETTLE_S

from .test_kernel import XID
from .test_repair import INSTRUCTED, RUN, Repaired

REMAPPED = XID % (63, 5)  # a row of memory is to be remapped: nothing was hit
NOW, DRAINED = INSTRUCTED % 1, INSTRUCTED % 4
THERE = msgspec.structs.replace(RUN, ranks=(RankView(0, "a", 5, 1, "running"),))


def ended(machine: Repaired) -> bool:
    """Whether the run there has a cause by which its rank ends."""
    return machine.node.cases["r"].state.cause is not None


def test_drain_and_reset_lets_what_runs_there_come_to_its_end() -> None:
    machine = Repaired("reset_gpu")
    machine.runs = (THERE,)
    machine.say(DRAINED)
    machine.step(SETTLE_S)
    machine.step(3600.0)
    assert not machine.orders and not ended(machine)
    assert not machine.node.cases["r"].state.held.drain
    incident = machine.only()
    assert (incident.fault, incident.severity) == ("gpu_needs_reset", DEGRADED)
    assert incident.would_have == (
        "reset_gpu: allowed, waits while r goes on: the driver lets it come to its end"
    )
    machine.runs = ()
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu"]


def test_a_mild_fault_stays_open_until_what_was_asked_for_is_done() -> None:
    machine = Repaired()
    machine.say(REMAPPED)
    assert machine.only().severity == WARN
    machine.say(DRAINED)
    assert machine.only().severity == DEGRADED
    machine.step(1200.0)
    assert machine.only().would_have.startswith("reset_gpu: not done, because actions.allow")
    machine.say(INSTRUCTED % 0)
    assert not [one for one in machine.step().incidents if one.state != "closed"]


def test_what_is_asked_for_now_ends_the_ranks_there_whatever_was_said_before() -> None:
    for before in ((), (REMAPPED,), (DRAINED,), (REMAPPED, DRAINED)):
        machine = Repaired()
        machine.runs = (THERE,)
        for line in before:
            machine.say(line)
            machine.step(1.0)
            assert not ended(machine), before
        machine.say(NOW.replace("154,", "154, pid=5, name=python3,"))
        machine.step(1.0)
        assert machine.only().severity == FATAL, before
        assert ended(machine), before


def test_what_is_asked_for_now_does_not_wait_as_what_may_drain() -> None:
    machine = Repaired("reset_gpu")
    machine.runs = (RUN,)
    machine.say(DRAINED)
    machine.step(SETTLE_S)
    assert not machine.node.cases["r"].state.held.drain
    machine.say(NOW)
    machine.step(1.0)
    assert machine.node.cases["r"].state.held.drain.startswith("reset_gpu of a")


def test_what_a_newer_driver_asks_for_is_a_persons_and_ends_nothing() -> None:
    for value, words in ((5, "recover the IMEX domain"), (6, "reset the PCIe bus"), (9, "knows")):
        machine = Repaired("reset_gpu", "reboot_node")
        machine.runs = (THERE,)
        machine.say(INSTRUCTED % value)
        machine.step(3600.0)
        assert not machine.orders and not ended(machine)
        assert words in machine.only().reason
    machine = Repaired("reboot_node")
    machine.say(INSTRUCTED % 7)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot"]
