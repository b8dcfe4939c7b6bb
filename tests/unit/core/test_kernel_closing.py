"""What closes an incident of the kernel's: silence a mild one, a boot or a person a fatal one."""

from __future__ import annotations

from holdfast.agent.core.actions import CLOSE_INCIDENT
from holdfast.agent.core.model import Request

from .test_kernel import BOOKS, XID
from .test_repair import Repaired

CABLE = "mlx5_core 0000:5c:00.0: poll_health:812:(pid 0): device's health compromised - reached " \
        "miss count"


def ask(identity: str, request: str = "q1") -> tuple[Request, ...]:
    subject = f"incident/{identity}"
    return (Request(request, CLOSE_INCIDENT, subject, "card changed", by="eva"),)


def test_a_fatal_one_is_not_well_because_it_is_silent_and_a_person_may_close_it():
    machine = Repaired("reboot_node")
    machine.say(CABLE)
    machine.step(86400.0)
    incident = machine.only()
    assert BOOKS[incident.fault].clears == "quiet_10m" and incident.severity == "fatal"
    machine.requests = ask("node-a-another")
    assert machine.only() == incident
    machine.requests = ask(incident.id)
    closed = machine.step().incidents
    assert [(one.id, one.state, one.timeline[-1][1]) for one in closed] == [
        (incident.id, "closed", "closed by eva: card changed")
    ]
    assert not machine.step().verdicts
    machine.say(CABLE)  # the same request, still there, does not close what came behind it
    assert machine.only().id != incident.id


def test_nothing_is_ordered_for_what_a_person_closed():
    machine = Repaired("reboot_node")
    machine.say(XID % (79, "<unknown>"))
    machine.requests = ask(machine.only().id)
    machine.step(3600.0)
    assert not machine.orders
