"""Errors that a driver prints as several lines: what the incident keeps of them."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import FATAL, WARN
from holdfast.agent.core.nodes import kernel_incidents
from holdfast.agent.core.parse.kernel_line import OTHER

from .test_kernel import CATALOGUE, Machine, parse

replace = msgspec.structs.replace
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:86:00.0): %d, %s"
FAULT = SWITCH % (20034, "Fatal, Link 33 LTSSM Fault Up")


@pytest.mark.parametrize(("number", "said", "wanted"), [
    (26006, "SOE HALTED", (OTHER, FATAL)),  # a line without the word is fatal
    (26006, "SOE HALT data[0] = 0x               0", None),
    (99999, "Correctable, Link 03 of no catalogue", (OTHER, WARN)),
    (24007, "Severity 1 Engine instance 36 Sub-engine instance 00", None),
    (24007, "Data {0x50610002, 0x10100030, 0x00000001, 0x00000000}", None),
])
def test_what_a_switch_says_of_one_error_is_one_event(number, said, wanted):
    event = parse(CATALOGUE, SWITCH % (number, said))
    assert (event and (event.code, event.severity)) == wanted


class Switch(Machine):
    """A node whose switch goes on with what it said."""

    def more(self, *said: str, at: int = -1):
        events = list(self.events)
        events[at] = replace(events[at], more=said)
        self.events = tuple(events)
        return self.step()

    def kept(self) -> list[str]:
        (incident,) = self.open()
        return [value for what, value in incident.evidence if what == kernel_incidents.MORE]


def test_what_came_behind_is_kept_though_the_event_was_taken_before():
    machine = Switch()
    machine.say(FAULT)
    assert machine.kept() == []
    (incident,) = machine.more("Severity 1", "Data {1}").incidents
    assert machine.kept() == ["Severity 1", "Data {1}"] and incident.evidence[0][1] == FAULT
    before = machine.step().incidents
    assert machine.step().incidents == before
    machine.more("Severity 1", "Data {1}", "Data {2}")
    assert machine.kept() == ["Severity 1", "Data {1}", "Data {2}"]
    assert machine.node.kernel.book.entries()[0].count == 1  # one error, however many lines


def test_a_flood_leaves_room_in_the_incident():
    machine = Switch()
    for number in range(20):
        machine.say(FAULT)
        machine.more(*(f"Data {{{number}, {word}}}" for word in range(3)))
    assert len(machine.kept()) == kernel_incidents.MORE_MAX and machine.kept()[0] == "Data {0, 0}"


def test_what_belonged_to_a_closed_incident_does_not_go_to_the_next():
    machine = Switch()
    machine.say(FAULT)
    machine.more("Data {1}")
    machine.reboot()
    assert machine.open() == []
    machine.say(FAULT)
    old, new = replace(machine.events[-1], boot_s=1.0, more=("Data {old}",)), machine.events[-1]
    machine.events = (old, replace(new, more=("Data {new}",)))
    machine.step()
    assert machine.kept() == ["Data {new}"]
