"""Resetting a GPU: only where it is known, once a boot, and what comes when it did not help."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.actions import ACTIONS
from holdfast.agent.core.model import EffectOutcome, Gate, Incident, Request
from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes.repair import DRAIN_S, RAN, SETTLE_S

from .test_kernel import BOOKS, XID
from .test_repair import INSTRUCTED, RUN, Repaired, process
from .test_rungs import LINK, SWITCH

replace = msgspec.structs.replace
# Two numbers whose repeats ask for nothing more.
STOPPED = XID % (109, 5)  # gpu_needs_reset: restart_ranks, reset_gpu, reboot_node
BROKEN = LINK.replace("b9:00", "4e:00")  # gpu_nvlink_error: restart_ranks, reset_gpu, replace_node
RAN_IN_VAIN = (False, f"{RAN} /usr/bin/nvidia-smi ended with 255")


def left(machine: Repaired) -> list[Incident]:
    return [one for one in machine.step().incidents if one.state != "closed"]


def close(machine: Repaired) -> None:
    """A person closes the one incident that is open."""
    about = f"incident/{machine.only().id}"
    machine.requests = (Request("q", "close_incident", about, "looked"),)
    machine.step(1.0)
    machine.requests = ()


def failed(*allow: str, line: str = STOPPED) -> Repaired:
    """A node whose GPU was asked to be reset, in vain; a second later."""
    machine = Repaired(*allow)
    machine.outcome = RAN_IN_VAIN
    machine.say(line)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reset_gpu"]
    machine.outcome = (True, "")
    machine.step(1.0)
    return machine


def test_a_gpu_is_reset_by_its_address_and_is_well_then() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.say(STOPPED)
    machine.say(BROKEN)  # of the same GPU
    machine.say(STOPPED.replace("4e", "5e"))
    machine.outcome = None
    machine.step(SETTLE_S)
    (order,) = machine.orders
    assert (order.kind, order.body.verb, order.body.device) == (
        "reset_gpu", "reset_gpu", "0000:4e:00.0")
    assert order.outlives_node and order.deadline_s == ACTIONS["reset_gpu"].deadline_s > 70.0
    machine.step(30.0)
    assert len(machine.orders) == 1, "the other GPU waits for it"
    machine.outcomes.append(EffectOutcome(order.id, True, ""))
    closed = machine.step(1.0).incidents
    over = [one for one in closed if one.state == "closed"]
    assert sorted(one.fault for one in over) == ["gpu_needs_reset", "gpu_nvlink_error"]
    assert all(one.subject.endswith("/gpu/0000:4e:00") for one in over)
    assert all(one.timeline[-1][1] == "the GPU was reset" for one in over)
    assert [one.body.device for one in machine.orders] == ["0000:4e:00.0", "0000:5e:00.0"]


def test_a_second_fault_in_one_boot_has_the_next_rung() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    for verbs in (["reset_gpu"], ["reset_gpu", "reboot"]):
        machine.say(STOPPED)
        machine.step(SETTLE_S)
        machine.step(1.0)
        assert machine.verbs() == verbs
        machine.restart()
    machine = Repaired("reset_gpu", "reboot_node")
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    machine.step(1.0)
    machine.reboot()
    machine.restart()
    machine.say(STOPPED)  # in another boot it is reset again, as long as its budget is not spent
    machine.step(SETTLE_S)
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu", "reset_gpu"]
    machine.reboot()
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reset_gpu", "reset_gpu", "reboot"]


def test_a_reset_that_failed_leads_on_only_where_that_is_allowed() -> None:
    assert failed("reset_gpu", "reboot_node").verbs() == ["reset_gpu", "reboot"]
    assert failed("reset_gpu", "replace_node", line=BROKEN).verbs() == ["reset_gpu", "replace"]
    machine = failed("reset_gpu", "replace_node")  # its runbook says reboot, never replace
    machine.step(3600.0)
    assert machine.verbs() == ["reset_gpu"]
    assert machine.only().would_have == (
        "reboot_node: not done, because actions.allow does not name it; its GPU was reset in this "
        "boot, or that was tried"
    )
    machine = failed("reset_gpu", "reboot_node")
    machine.restart()
    machine.step(3600.0)
    assert machine.verbs() == ["reset_gpu", "reboot"], "and no further"


@pytest.mark.parametrize("error", [
    "no outcome in time", "the agent ended before it learned the outcome",
    "/run/holdfast-node.sock: no answer within 62 s",
    "reset_gpu of 0000:4e:00.0 was carried out in this boot, for 1/x/1",
    "/etc/holdfast/node.d/reset_gpu: No such file or directory: put the program there",
])
def test_what_is_not_known_to_have_failed_leads_nowhere(error: str) -> None:
    machine = Repaired("reset_gpu", "reboot_node", "replace_node")
    for line in (STOPPED, BROKEN):
        machine.outcome = (False, error)
        machine.say(line)
        machine.step(SETTLE_S)
        machine.outcome = (True, "")
        machine.step(86400.0)
    assert set(machine.verbs()) == {"reset_gpu"}
    assert {one.would_have[-15:] for one in left(machine)} == {"a person's part"}


def test_no_node_is_replaced_for_a_gpu_whose_reset_was_refused_however_often() -> None:
    machine = Repaired("reset_gpu", "replace_node")
    machine.outcome = (False, "put the program for reset_gpu there")
    for _ in range(4):
        machine.say(BROKEN)
        machine.step(SETTLE_S)
        machine.step(1.0)
        close(machine)
        assert not left(machine)
    assert machine.verbs() == ["reset_gpu", "reset_gpu"], "its budget, and nothing behind it"


def test_a_reset_that_never_left_is_tried_again() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.outcome = (False, "refused: evidence.store: Stale file handle")
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    machine.step(1.0)
    machine.outcome = (True, "")
    machine.step(20.0)
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu", "reset_gpu", "reset_gpu"][: len(machine.orders)]
    assert len(machine.orders) >= 2 and not left(machine)


@pytest.mark.parametrize("line", [
    SWITCH, STOPPED.replace("0000:4e:00", "4e:00"), STOPPED.replace("0000:4e:00", "0000:4e"),
])
def test_what_has_no_address_of_a_gpu_is_never_reset(line: str) -> None:
    machine = Repaired("reset_gpu", "replace_node")
    machine.say(line)
    machine.step(3600.0)
    assert not machine.orders
    assert machine.only().would_have == (
        "reset_gpu: a person's part: no address on PCI is known of what failed"
    )


def test_what_has_no_address_is_rebooted_where_that_is_allowed_and_stands_behind() -> None:
    """Leave for a reset takes away no leave that was there without it."""
    for allow in (("reboot_node",), ("reset_gpu", "reboot_node")):
        machine = Repaired(*allow)
        machine.say(STOPPED.replace("0000:4e:00", "4e:00"))
        machine.step(3600.0)
        assert machine.verbs() == ["reboot"], allow


def test_the_drivers_instruction_ends_runs_and_what_follows_a_failure_does_not() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.runs = (RUN,)
    machine.say(INSTRUCTED % 1)
    machine.step(SETTLE_S)
    assert not machine.orders and machine.node.cases["r"].state.held.drain
    machine.outcome, machine.runs = RAN_IN_VAIN, ()
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu"]
    machine.runs = (replace(RUN, run="next"),)
    machine.outcome = (True, "")
    machine.step(DRAIN_S + 1.0)
    assert machine.verbs() == ["reset_gpu"] and not machine.node.cases["next"].state.held.drain
    assert "nothing but the runbook asks for it" in machine.only().would_have
    machine.runs = ()
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu", "reboot"]


def test_a_run_that_hangs_in_its_device_does_not_keep_the_reboot_from_coming() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.runs = (RUN,)  # it was ended, and does not go
    machine.say(INSTRUCTED % 1)
    machine.step(SETTLE_S)
    machine.outcome = RAN_IN_VAIN  # "in use by another client"
    machine.step(DRAIN_S + 1.0)
    assert machine.verbs() == ["reset_gpu"]
    machine.runs = (RUN, replace(RUN, run="next"))
    machine.outcome = (True, "")
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu"], "another run does go on"
    machine.runs = (RUN,)
    machine.restart()
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu", "reboot"]


def test_an_instruction_that_the_runbook_does_not_know_leads_on_to_its_own_rungs() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.say(XID % (79, 5))  # its ladder has no reset
    machine.say(INSTRUCTED % 1)
    machine.outcome = RAN_IN_VAIN
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reset_gpu"]
    machine.step(1.0)
    assert machine.verbs() == ["reset_gpu", "reboot"]


def test_a_driver_that_asks_again_after_its_reset_is_not_given_a_second() -> None:
    machine = Repaired("reset_gpu")
    machine.say(INSTRUCTED % 1)
    machine.step(SETTLE_S)
    machine.step(1.0)
    assert not left(machine)
    machine.say(INSTRUCTED % 4)
    machine.step(3600.0)
    assert machine.verbs() == ["reset_gpu"]
    assert machine.only().would_have.startswith("reboot_node: not done, because actions.allow")


@pytest.mark.parametrize("held", ["paused", "journal", "gate", "stranger", "another agent"])
def test_what_holds_every_order_back_holds_a_reset(held: str) -> None:
    machine = Repaired("reset_gpu")
    machine.stalled = held == "journal"
    machine.gate = {"gate": Gate(closed="no socket"), "another agent": Gate(others=("/x/agent",))
                    }.get(held, Gate())
    machine.samples = (process(4711),) if held == "stranger" else ()
    if held == "paused":
        machine.requests = (Request("q1", "pause", "node/a", "look"),)
    machine.say(INSTRUCTED % 1)
    machine.step(3600.0)
    assert not machine.orders and machine.only().would_have.startswith("reset_gpu: allowed, ")


def test_a_person_who_shadows_the_runbook_decides_what_comes_behind() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    book = BOOKS["gpu_needs_reset"]
    shadow = replace(book, ladder=("reset_gpu", "ask_person", "reboot_node"))
    machine.node = Node("a", machine.settings, {**BOOKS, book.fault: shadow})
    machine.outcome = RAN_IN_VAIN
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    machine.step(3600.0)
    assert machine.verbs() == ["reset_gpu"]
    assert machine.only().would_have.startswith("the rest is a person's part; its GPU was reset")


def test_a_reset_of_long_ago_opens_no_way_to_a_replacement() -> None:
    for allow in (("replace_node",), ("reset_gpu", "replace_node")):
        machine = Repaired("reset_gpu", "replace_node")
        machine.say(BROKEN)
        machine.step(SETTLE_S)
        machine.step(1.0)
        machine.reboot()
        machine.step(100 * 86400.0)
        machine.settings = replace(machine.settings, allow=allow)
        machine.restart()
        machine.outcome = (False, "put the program for reset_gpu there")
        for _ in range(3):  # its budget, where a reset is allowed at all
            machine.say(BROKEN)
            machine.step(SETTLE_S)
            machine.step(1.0)
            close(machine)
        assert set(machine.verbs()) == {"reset_gpu"}


def test_a_node_that_is_rebooted_is_not_replaced_as_well() -> None:
    machine = Repaired("reset_gpu", "reboot_node", "replace_node")
    machine.outcome = RAN_IN_VAIN
    machine.say(STOPPED)  # behind its reset comes a reboot,
    machine.say(BROKEN)  # ... behind that of the same GPU a replacement
    machine.say(STOPPED.replace("4e", "5e"))
    machine.step(SETTLE_S)
    machine.outcome = (True, "")
    for _ in range(5):
        machine.step(30.0)
        machine.restart()
    assert machine.verbs() == ["reset_gpu", "reboot"]
    waits = {one.would_have for one in left(machine) if one.state != "acted"}
    text = "allowed, held: reboot_node was ordered in this boot, and is not known to have failed"
    assert waits == {f"{one}: {text}" for one in ("reset_gpu", "replace_node")}
    machine.reboot()
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    assert machine.verbs()[-1] == "reset_gpu", "another boot"


def test_a_reboot_that_failed_holds_nothing_back() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.outcome = (False, "/etc/holdfast/node.d/reboot ended with 1")
    machine.say(XID % (79, 5))
    machine.step(SETTLE_S)
    machine.outcome = (True, "")
    machine.say(STOPPED.replace("4e", "5e"))
    machine.step(SETTLE_S)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot", "reset_gpu"]


def test_what_the_kernel_says_while_a_gpu_is_reset_stays_open() -> None:
    machine = Repaired("reset_gpu", "reboot_node")
    machine.outcome = None
    machine.say(STOPPED)
    machine.step(SETTLE_S)
    machine.say(STOPPED)  # again: the same fault, which the reset ends
    machine.say(XID % (79, 5))
    machine.step(5.0)
    (order,) = machine.orders
    machine.outcomes.append(EffectOutcome(order.id, True, ""))
    machine.step(1.0)
    assert machine.only().fault == "gpu_fell_off_bus", "its program said well, the driver did not"
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reset_gpu", "reboot"]


def test_no_reset_is_promised_for_what_is_not_fatal() -> None:
    machine = Repaired("reset_gpu")
    machine.say("NVRM: Xid (PCI:0000:4e:00): 63, pid=1, name=x, Row Remapper: New row (0x1) "
                "marked for remapping, reset gpu to activate.")
    machine.step(1.0)
    assert machine.only().severity == "warn"
    text = "reset_gpu: a person's part: the fault is not fatal"
    assert machine.only().would_have == text
    machine.step(SETTLE_S)
    assert machine.only().would_have == text and not machine.orders
    machine.stalled = True  # nothing can be ordered now
    machine.say("NVRM: Xid (PCI:0000:4e:00): 64, pid=1, name=x, Row Remapper: remapping failed")
    machine.step(1.0)
    assert machine.only().severity == "fatal"
    assert machine.only().would_have == "reset_gpu: allowed, waits for the journal"
