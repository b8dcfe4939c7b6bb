"""Draining, rebooting, replacing: only what is allowed, once, within its budget, never in haste."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import (
    Doc,
    EffectOutcome,
    Gate,
    Now,
    Observed,
    RankView,
    Request,
    RunView,
    Settings,
    StoreView,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes.repair import DRAIN_S, RETRY_FOR_S, SETTLE_S
from holdfast.agent.core.run.members import NodeDoc

from .driver import Lab
from .test_kernel import BOOKS, XID, Machine, parse
from .test_kernel import CATALOGUE as KERNEL

FALLEN = XID % (79, "<unknown>")
INSTRUCTED = ("NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x0 (None) to "
              "0x%d (x)")
RUN = RunView(run="r", node="a", grade="trainer", nproc=1, state="running", generation=1)
replace = msgspec.structs.replace


class Repaired(Machine):
    """A node whose orders get the outcome that the test wants, the moment they are given."""

    def __init__(self, *allow: str, **settings) -> None:
        super().__init__(*allow)
        self.settings = Settings(allow=allow, **{"alone": True, **settings})
        self.node = Node("a", self.settings, BOOKS)
        self.runs: tuple[RunView, ...] = ()
        self.docs: tuple[Doc, ...] = ()
        self.outcome: tuple[bool, str] | None = (True, "")
        self.outcomes: list[EffectOutcome] = []
        self.orders: list = []
        self.stalled = False
        self.samples: tuple = ()
        self.silent: tuple[str, ...] = ()
        self.gate = Gate()
        self.requests: tuple[Request, ...] = ()

    def step(self, seconds: float = 0.0):
        self.boot_s += seconds
        self.wall_s += seconds
        decision = self.node.step(Now(self.boot_s, self.wall_s, self.boot_id), Observed(
            events=self.events, runs=self.runs, outcomes=tuple(self.outcomes[-16:]),
            store=StoreView(up=True, docs=self.docs), journal_stalled=self.stalled,
            requests=self.requests, samples=readings_of(self.samples, self.silent), gate=self.gate,
        ))
        for effect in decision.effects:
            if effect.outlives_node:
                self.orders.append(effect)
                self.last_s = self.boot_s
                if self.outcome is not None:
                    self.outcomes.append(EffectOutcome(effect.id, *self.outcome))
        return decision

    def verbs(self) -> list[str]:
        return [effect.body.verb for effect in self.orders]

    def only(self):
        (incident,) = [one for one in self.step().incidents if one.state != "closed"]
        return incident


def test_nothing_is_ordered_that_the_operator_did_not_allow():
    machine = Repaired()
    machine.say(FALLEN)
    machine.step(3600.0)
    assert not machine.orders
    assert machine.only().would_have.startswith("reboot_node: not done, because actions.allow")


def test_what_is_allowed_is_ordered_once_whatever_happens():
    machine = Repaired("reboot_node")
    machine.say(FALLEN)
    machine.step(SETTLE_S - 1.0)
    assert not machine.orders
    assert machine.only().would_have.startswith("reboot_node: allowed, waits")
    machine.step(1.5)
    (order,) = machine.orders
    assert (order.kind, order.body.verb, order.body.node) == ("reboot_node", "reboot", "a")
    assert order.outlives_node and order.fault == "gpu_fell_off_bus"
    incident = machine.only()
    assert incident.state == "acted" and incident.actions == (order.id,)
    assert incident.id == order.body.incident and incident.would_have == ""
    machine.step(1.0)
    assert machine.only().timeline[-1][1] == "reboot_node: the node's unit took it"
    for _ in range(5):
        machine.restart()  # the machine still runs: whoever waits for the reboot asks for no second
        machine.say(FALLEN)
        machine.step(600.0)
    assert len(machine.orders) == 1


def test_an_agent_that_dies_before_it_learns_the_outcome_asks_for_no_second():
    machine = Repaired("reboot_node")
    machine.outcome = None
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert len(machine.orders) == 1
    machine.restart()
    machine.step(3600.0)
    assert len(machine.orders) == 1


def test_a_budget_is_kept_over_reboots_and_then_the_next_rung_comes():
    machine = Repaired("reboot_node", "replace_node")
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    first = machine.orders[0].id
    machine.reboot()
    machine.restart()
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot", "replace"]  # its runbook: one a day
    assert machine.orders[1].id != first
    machine = Repaired("reboot_node")
    for _ in range(2):
        machine.say(FALLEN)
        machine.step(SETTLE_S)
        machine.reboot()
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot"]


def test_one_incident_climbs_no_ladder_by_itself():
    machine = Repaired("reboot_node", "replace_node")
    machine.say(FALLEN)
    for _ in range(3):
        machine.step(86400.0)
    assert machine.verbs() == ["reboot"]


def test_no_rung_is_climbed_over_for_want_of_leave():
    machine = Repaired("replace_node")
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert not machine.orders and machine.only().would_have.startswith("reboot_node: not done")


def test_no_node_is_replaced_for_a_gpu_that_nobody_here_can_reset():
    machine = Repaired("replace_node", "reboot_node")
    machine.say(XID % (95, 5))  # restart_ranks, reset_gpu, replace_node
    machine.step(SETTLE_S)
    assert machine.only().fault == "gpu_memory_error" and not machine.orders
    assert machine.only().would_have.startswith("reset_gpu: not done, because actions.allow")
    machine = Repaired("reboot_node")
    machine.say(XID % (119, 5))  # restart_ranks, reset_gpu, reboot_node: which resets as well
    machine.step(SETTLE_S)
    assert machine.only().fault == "gpu_needs_reset" and machine.verbs() == ["reboot"]


def test_a_warning_costs_no_node_its_place():
    machine = Repaired("reboot_node", "replace_node", "drain_node")
    machine.say("blk_update_request: I/O error, dev sda, sector 1")
    machine.step(SETTLE_S)
    assert not machine.orders


def test_the_ladder_interrupts_no_run_and_the_drivers_instruction_ends_it_first():
    machine = Repaired("reboot_node")
    machine.runs = (RUN,)
    machine.say(FALLEN)
    machine.step(3600.0)
    assert not machine.orders and "waits while r goes on" in machine.only().would_have
    assert not machine.node.cases["r"].state.held.drain
    machine.say(INSTRUCTED % 2)
    assert "reboot_node of a: XID 79" in machine.node.cases["r"].state.held.drain
    machine.step(1.0)
    assert not machine.orders and "waits until r has ended" in machine.only().would_have
    machine.runs = (replace(RUN, state="done"),)
    machine.step(1.0)
    assert machine.verbs() == ["reboot"]


def test_a_run_that_hangs_in_its_device_is_not_waited_for_without_end():
    machine = Repaired("reboot_node")
    machine.runs = (RUN,)
    machine.say(INSTRUCTED % 2)
    machine.step(SETTLE_S)
    assert not machine.orders
    machine.step(DRAIN_S + 1.0)
    assert machine.verbs() == ["reboot"]


def test_a_drain_on_instruction_ends_the_ranks_by_their_launcher():
    lab = Lab(settings=Settings(allow=("reboot_node",), alone=True))
    lab.node = Node("a", lab.settings, BOOKS)
    lab.begin()
    lab.train(3)
    lab.events = (parse(KERNEL, INSTRUCTED % 2, 1, lab.boot_s),)
    lab.step(1.0)
    for _ in range(30):
        lab.step(1.0)
    kinds = [effect.kind for effect in lab.log]
    assert "stop" in kinds and "finish" in kinds
    finish = next(effect for effect in lab.log if effect.kind == "finish")
    assert finish.body.code == 75  # the scheduler starts the job elsewhere


@pytest.mark.parametrize("held", ["breaker", "paused", "fleet", "journal"])
def test_what_holds_an_order_back(held):
    machine = Repaired("reboot_node", single_node=True)
    if held == "breaker":
        body = msgspec.json.encode(NodeDoc(True, "x", "b", "gpu_fell_off_bus"))
        machine.docs = tuple(Doc(f"node/{name}", 1, body) for name in "bcd")
    if held == "fleet":
        machine.requests = (Request("q1", "pause", "fleet", "paused everywhere"),)
        machine.step()
        machine.requests = ()
    if held == "paused":
        machine.runs = (replace(RUN, state="done"),)
        machine.step()
        machine.node.cases["r"].operator.pause(True)
    machine.stalled = held == "journal"
    machine.say(FALLEN)
    decision = machine.step(SETTLE_S)
    assert not machine.orders
    assert {"breaker": "breaker is open", "paused": "paused", "journal": "waits for the journal",
            "fleet": "paused everywhere"}[held] in machine.only().would_have
    tripped = [one for one in decision.verdicts if one.detector == "breaker"]
    assert bool(tripped) == (held == "breaker")
    machine.docs, machine.stalled = (), False
    for case in machine.node.cases.values():
        case.operator.pause(False)
    machine.requests = (Request("q2", "resume", "fleet", "done"),) if held == "fleet" else ()
    machine.step(1.0)
    assert machine.orders


def test_an_order_that_never_left_is_tried_again_and_one_that_failed_is_not():
    machine = Repaired("reboot_node")
    machine.outcome = (False, "refused: the journal is stalled")
    machine.say(FALLEN)
    begun_s = machine.boot_s + SETTLE_S
    for _ in range(2 * int(RETRY_FOR_S)):
        machine.step(0.5)
    assert RETRY_FOR_S / 16 < len(machine.orders) < RETRY_FOR_S / 16 + 10  # ever longer pauses
    assert machine.last_s - begun_s > 0.9 * RETRY_FOR_S
    assert len({order.id for order in machine.orders}) == len(machine.orders)
    for _ in range(100):
        machine.step(16.0)
    assert machine.last_s - begun_s < RETRY_FOR_S + 17.0
    incident = machine.only()
    assert incident.would_have.endswith("a person's part") and len(incident.timeline) < 8
    machine = Repaired("reboot_node")
    machine.outcome = (False, "/run/holdfast-node.sock: No such file or directory")
    machine.say(FALLEN)
    for _ in range(40):
        machine.step(SETTLE_S)
    assert len(machine.orders) == 1
    assert machine.only().would_have.endswith("a person's part")


def test_a_node_without_a_run_is_paused_as_well_and_stays_so_over_a_restart():
    machine = Repaired("reboot_node")
    machine.requests = (Request("q1", "pause", "node/a", "its fan is changed"),)
    assert machine.step().paused == "its fan is changed"
    machine.requests = ()
    machine.restart()
    machine.say(FALLEN)
    machine.step(3600.0)
    assert not machine.orders
    assert machine.only().would_have == (
        "reboot_node: allowed, held: paused by an operator: its fan is changed"
    )
    machine.runs = (replace(RUN, state="done"),)
    machine.step()
    assert machine.node.cases["r"].state.held.paused  # what comes later is born under it
    machine.requests = (Request("q2", "pause", "node/b", "another"),
                        Request("q3", "resume", "run/r", "this run alone"))
    assert machine.step().paused and not machine.orders
    assert not machine.node.cases["r"].state.held.paused
    machine.requests = (Request("q4", "resume", "node/a", "done"),)
    assert not machine.step().paused
    assert machine.verbs() == ["reboot"]


def test_a_run_that_comes_to_a_paused_node_is_watched_and_left_alone():
    lab = Lab()
    lab.requests = (Request("q1", "pause", "node/a", "look"),)
    lab.begin()
    lab.train(3)
    assert lab.plan().paused
    lab.kill(1)
    lab.park(0, 0)
    assert lab.settle() == [] and lab.view.generation == 1
    lab.requests = (Request("q2", "resume", "node/a", "done"),)
    lab.settle()
    assert lab.view.generation == 2


def test_evidence_that_cannot_be_written_for_some_seconds_costs_no_order():
    machine = Repaired("reboot_node")
    machine.outcome = (False, "refused: evidence.store: Stale file handle")
    machine.runs = (RUN,)
    machine.say(INSTRUCTED % 2)
    machine.step(SETTLE_S)
    machine.runs = ()
    for _ in range(20):
        machine.step(0.5)
    assert len(machine.orders) == 4 and machine.only().would_have.endswith("tried again soon")
    machine.outcome = (True, "")
    for _ in range(20):
        machine.step(0.5)
    assert len(machine.orders) == 5 and machine.only().state == "acted"
    assert machine.only().timeline[-1][1] == "reboot_node: the node's unit took it"


def test_no_run_is_ended_for_an_order_that_cannot_leave():
    machine = Repaired("reboot_node")
    machine.runs = (RUN,)
    machine.gate = Gate(closed="/run/holdfast-node.sock: No such file or directory")
    machine.say(INSTRUCTED % 2)
    machine.step(3600.0)
    assert not machine.orders and not machine.node.cases["r"].state.held.drain
    assert "no order can leave: /run/holdfast-node.sock" in machine.only().would_have
    machine.gate = Gate()
    machine.step(1.0)
    assert machine.node.cases["r"].state.held.drain


def process(pid, device=3):
    return ("accelerator_process", f"vendor=nvidia,device={device},pid={pid}", 1.0, 100.0)


STRANGERS = {
    "listed": {"samples": (process(4711),)},
    "listed before its driver hung": {"gate": Gate(seen=((4711, "nvidia device 3"),))},
    "another agent's": {"gate": Gate(others=("/run/user/7/holdfast/x/agent.sock",))},
}


@pytest.mark.parametrize("line", [FALLEN, INSTRUCTED % 2])
@pytest.mark.parametrize("kind", STRANGERS)
def test_what_this_agent_does_not_serve_is_waited_for_and_named(kind, line):
    machine = Repaired("reboot_node")
    vars(machine).update(STRANGERS[kind])
    claimed = RankView(rank=0, node="a", pid=4711, generation=1, state="running")
    machine.runs = (replace(RUN, ranks=(claimed,)),)  # a launcher's word makes no process ours
    machine.say(line)
    for _ in range(4):
        machine.step(DRAIN_S)
    assert not machine.orders
    said = machine.only().would_have
    assert "pid 4711 on nvidia device 3" in said or "/run/user/7/holdfast/x" in said
    assert not machine.node.cases["r"].state.held.drain  # nobody is ended to wait for somebody else
    machine.runs, machine.samples, machine.gate = (), (), Gate()
    machine.step(1.0)
    assert machine.verbs() == ["reboot"]


def test_processes_of_our_own_runs_are_no_strangers():
    ended = RankView(rank=0, node="a", pid=11, generation=1, state="ended")
    machine = Repaired("reboot_node")
    machine.runs = (replace(RUN, state="done", ranks=(ended,)),)
    machine.samples, machine.gate = (process(11),), Gate(gone=(11,))  # listed for some seconds more
    machine.say(FALLEN)
    machine.step(SETTLE_S)
    assert machine.verbs() == ["reboot"]
    machine = Repaired("reboot_node")
    machine.runs = (replace(RUN, ranks=(replace(ended, state="running"),)),)
    machine.samples = (process(11), process(12), process("junk"), process(-1), process("9" * 40))
    machine.gate = Gate(ours=(11, 12))  # a rank that is a shell, and its child
    machine.say(INSTRUCTED % 2)
    machine.step(SETTLE_S)
    assert machine.node.cases["r"].state.held.drain and not machine.orders
    machine.runs, machine.gate = (), Gate()  # its launcher is gone, they hang in their device
    machine.restart()
    machine.step(DRAIN_S + 1.0)
    assert machine.verbs() == ["reboot"]
