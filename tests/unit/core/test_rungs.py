"""Who chooses a rung: the runbook; before it the driver's own instruction and repeats alone."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes.repair import SETTLE_S

from .test_kernel import BOOKS, CATALOGUE, XID, parse
from .test_repair import FALLEN, RUN, Repaired

replace = msgspec.structs.replace
NEURON = "NEURON_HW_ERR=DMA_ERROR nd-id=3 nc-id=1"
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:86:00.0): 20034, Fatal, Link 33 LTSSM Fault Up"
LINK = "NVRM: Xid (PCI:0000:b9:00): 74, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0)"
EFA = "efa 0000:a0:1a.0: Device isn't ready, abort com init"


@pytest.mark.parametrize("line", [NEURON, SWITCH, LINK, EFA, FALLEN, XID % (95, 5)])
def test_no_row_of_the_catalogue_orders_past_the_runbook(line):
    machine = Repaired("drain_node", "reboot_node", "replace_node")
    fault = parse(CATALOGUE, line).fault
    for ladder in (("ask_person",), ("drain_node",)):  # as an operator's shadow has them
        shadow = replace(BOOKS[fault], ladder=ladder)
        machine.node = Node("a", machine.settings, {**BOOKS, fault: shadow})
        machine.events = ()
        machine.say(line)
        machine.step(SETTLE_S)
        assert machine.verbs() == (["drain"] if ladder == ("drain_node",) else []), fault


def test_a_broken_neuron_device_is_replaced_when_its_runs_have_ended():
    machine = Repaired("replace_node")
    machine.runs = (RUN,)
    machine.say(NEURON)
    machine.step(3600.0)
    assert not machine.orders and not machine.node.cases["r"].state.held.drain
    assert "nothing but the runbook asks for it" in machine.only().would_have
    machine.runs = ()
    machine.step(1.0)
    assert machine.verbs() == ["replace"]


def test_an_efa_card_that_is_dead_is_a_persons_part():
    machine = Repaired("replace_node", "reboot_node", "drain_node")
    machine.say(EFA)
    machine.step(3600.0)
    assert not machine.orders
