"""When this node is drained, rebooted or replaced, or its GPU reset, for a fault of its own.

Owns the way from an open incident of the kernel's to one order: what the operator allowed, what is
left of the budget, the breaker, and everything that goes on here, whoever's it is.  Among many
nodes this one is taken out of service first, in its own document, and its runs go elsewhere.  An
order leaves through the node's root unit (agent/actions/root_helper.py); none that may have left is
asked for twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .. import ladder
from ..actions import (
    ACTIONS,
    DRAIN_NODE,
    REBOOT_NODE,
    REPLACE_NODE,
    RESET_GPU,
    RUN_CHECK,
    is_persons,
    is_root_verb,
)
from ..detect.devices import accelerator
from ..detect.ranks.ended import Cause
from ..effects.in_flight import EffectResult
from ..incidents import values
from ..model import (
    FATAL,
    WARN,
    Effect,
    Incident,
    NodeOrder,
    Now,
    Runbook,
    Verdict,
    node_subject,
    subject_of,
)
from ..run import members, policy
from ..run.case import RunCase
from ..run.state import Context
from . import breaker, exclusions
from .check_runs import CheckRuns
from .kernel_incidents import KernelIncidents, Watched

GPU = re.compile(r"gpu/([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})")  # of a line's subject
SETTLE_S = 15.0  # after an incident opened: the driver's own instruction follows its fault
JUDGED_S = 3.0  # an exclusion that is not written by then is judged anew
# Longer than that and a slow write: who did not see this node's document wrote its own.
SEEN_S = 10.0
DRAIN_S = 120.0  # in which runs end by themselves; a rank that hangs in its device never does
REFUSED = "refused:"  # how the error of an order begins that never left the agent
RAN = "carried out:"  # and of one whose program was run, and did not do it
RETRY_FOR_S = 600.0  # of such: runs were ended for it, and a file system that blinks comes back
PIDS_MAX = 256  # kept of the ranks that are ended for an incident
NAMED_MAX = 4  # of those that are waited for
KEPT_MAX = 128
REST = "the rest is a person's part"
NOWHERE = "a person's part: no address on PCI is known of what failed"
UNKNOWN_BOOK = Runbook("", FATAL, "node", budget_count=1)


class Reset(msgspec.Struct):
    """A GPU was reset, or its program failed to."""

    boot_id: str
    wall_s: float


class RepairMemory(msgspec.Struct):
    """Survives a restart of the agent, and the reboot that it asked for."""

    times: dict[str, list[float]] = {}  # "action|fault|subject" -> wall_s of the orders
    asked: dict[str, list[str]] = {}  # incident -> actions that were ordered for it
    refused: dict[str, float] = {}  # incident -> boot_s since which its order cannot leave
    drains: dict[str, float] = {}  # incident -> boot_s since which runs are to end
    ending: dict[str, list[int]] = {}  # incident -> processes of those runs
    resets: dict[str, Reset] = {}  # device -> the newest of it
    leaves: tuple[str, str] = ("", "")  # boot in which its end was ordered, and by which action


class Repairs:
    """Decides, step by step, on one order for the whole node, and says why there is none."""

    def __init__(
        self, name: str, memory: RepairMemory, kernel: KernelIncidents, checks: CheckRuns
    ) -> None:
        self.name, self.memory, self.kernel, self.checks = name, memory, kernel, checks
        self.stands: tuple[int, float] = (0, 0.0)  # version of this node's document, seen since

    def step(
        self, ctx: Context, cases: Mapping[str, RunCase], paused: str,
        wanted: dict[str, members.NodeDoc],
    ) -> None:
        """At most one order a step, and none while this node is `paused`, for that reason.
        `wanted`: the documents of nodes that this one is about to write, its own among them."""
        for done in ctx.settled:
            if isinstance(done.effect.body, NodeOrder):
                self._settle(ctx, done, done.effect.body)
        for item in self.kernel.book.entries():
            action, why = self._next(ctx, item)
            if why:
                self.kernel.tell(ctx, item, why)
            if not action:
                continue
            held = f"held: paused by an operator: {paused}" if paused else ""
            held = held or self._held(ctx, item, action, cases, wanted)
            if held:
                self.kernel.tell(ctx, item, f"{action}: allowed, {held}")
            elif self._order(ctx, item, action):
                return

    # ------------------------------------------------------------ which action

    def _next(self, ctx: Context, item: Watched) -> tuple[str, str]:
        """What is to be done for this incident now: the driver's instruction, else the ladder's
        first action with budget that is this node's; "" where a person comes first, and why, where
        that is not said already.  One that may not or cannot be done is not climbed over: no node
        is replaced for want of leave to reboot, nor for a GPU that was not reset."""
        incident, was_reset = item.incident, self._was_reset(ctx, item)
        asked = self.memory.asked.get(incident.id, [])
        book = ctx.runbooks.get(incident.fault, UNKNOWN_BOOK)
        wanted = _wanted(item.action, book, was_reset)
        # One incident climbs no ladder, but over a reset that did not help.
        climbed = [one for one in asked if one != RESET_GPU or not was_reset]
        asks = incident.severity == FATAL or item.patient
        if not asks or (climbed and wanted != (item.action,)):
            return "", ""
        book = msgspec.structs.replace(book, ladder=wanted)
        action, why = ladder.next_rung(
            book, lambda action: self._spent(ctx, item, action, book),
            lambda action: self._leave(ctx, item, action, book))
        return action or "", "" if action else why or _was_done(REST, was_reset)

    def _leave(self, ctx: Context, item: Watched, action: str, book: Runbook) -> ladder.Leave:
        """Whether the unit may be asked for this one, and for what stands behind it."""
        if not (is_root_verb(action) or is_persons(action) or action == RUN_CHECK):
            return ladder.PASS
        allowed, was_reset = action in ctx.settings.allow, self._was_reset(ctx, item)
        if is_persons(action) or (
            action == REPLACE_NODE and self._unreset(ctx, item, book, was_reset)
        ):
            return ladder.STOP
        if action == RUN_CHECK:
            first = self.checks.comes_first(ctx, item.incident.fault, item.incident.subject)
            return ladder.STOP if first else ladder.PASS
        if action == RESET_GPU and allowed and not was_reset and not _address(item):
            return ladder.Leave(False, reason=f"{RESET_GPU}: {NOWHERE}")
        if action == RESET_GPU and (was_reset or not allowed):
            return ladder.PASS
        why = _withheld(ctx, action)
        if why:
            return ladder.Leave(False, stops=True, reason=why if allowed
                                else _was_done(why, was_reset))
        known = self.memory.asked.get(item.incident.id, ())
        return ladder.PASS if action in known else ladder.MAY

    def _unreset(self, ctx: Context, item: Watched, book: Runbook, was_reset: bool) -> bool:
        """Whether a reset stands before the replacement that was passed over, with no reboot
        after it that would have brought it."""
        before = ladder.before(book, REPLACE_NODE, since=REBOOT_NODE)
        done = bool(_address(item)) and self._reset_lately(ctx, item, book)
        return RESET_GPU in before and not was_reset and not done

    def _was_reset(self, ctx: Context, item: Watched) -> bool:
        """Whether the unit reset this GPU in this boot, or failed to: a second is of no use."""
        known = self.memory.resets.get(item.incident.subject)
        return known is not None and known.boot_id == ctx.now.boot_id

    def _reset_lately(self, ctx: Context, item: Watched, book: Runbook) -> bool:
        """Whether a reset spent the budget of another boot: the fault came again all the same.  One
        of long ago, perhaps of another card in that slot, says nothing of this fault."""
        known = self.memory.resets.get(item.incident.subject)
        since_s = ctx.now.wall_s - book.budget_window_h * 3600.0
        return RESET_GPU in ctx.settings.allow and known is not None and known.wall_s > since_s

    def _spent(self, ctx: Context, item: Watched, action: str, book: Runbook) -> int:
        since_s = ctx.now.wall_s - book.budget_window_h * 3600.0
        # A time of the future is a clock that was set back: it counts, which is the careful side.
        return sum(at_s > since_s for at_s in self.memory.times.get(_key(item, action), ()))

    # ------------------------------------------------------------ for a run that climbs

    def rung(self, ctx: Context, cause: Cause, action: str) -> tuple[int, ladder.Leave]:
        """(how often it was ordered within its budget's window, whether it may be) of an action
        beyond the run, for a cause of a run on this node."""
        book = ctx.runbooks.get(cause.fault, UNKNOWN_BOOK)
        item = self.kernel.of_cause(ctx, cause)
        leave = ladder.PASS
        if is_root_verb(action) and not ctx.settings.single_node:
            # Who leads speaks for the run: the node's own agent orders it, for what it has seen.
            leave = ladder.Leave(False, reason=f"{action}: for faults that the node itself sees")
        elif action == RESET_GPU and action not in ctx.settings.allow:
            leave = ladder.Leave(False, reason=ACTIONS[action].withheld(ctx.settings.allow))
        elif is_root_verb(action):
            leave = self._leave(ctx, item, action, book)
            if not leave.may and not leave.reason:
                leave = leave._replace(reason=_withheld(ctx, action))
        elif is_persons(action):
            leave = ladder.Leave(False, stops=True, reason=ACTIONS[action].withheld(()))
        return self._spent(ctx, item, action, book), leave

    def outlook(self, ctx: Context, cause: Cause) -> tuple[str, str]:
        """(which action this node would take for such a fault of its own now, why none)."""
        item = self.kernel.of_cause(ctx, cause)
        if item.incident.severity != FATAL:
            return "", "shown: it is not fatal"
        return self._next(ctx, item)

    # ------------------------------------------------------------ whether it may be

    def _held(
        self, ctx: Context, item: Watched, action: str, cases: Mapping[str, RunCase],
        wanted: dict[str, members.NodeDoc],
    ) -> str:
        """What it waits for; "" when it may go."""
        if ctx.observed.journal_stalled:
            return "waits for the journal"
        if ctx.in_flight.busy(self._subject()):
            return "waits for the order before it"
        boot_id, leaves = self.memory.leaves
        if boot_id == ctx.now.boot_id and action != DRAIN_NODE:
            return f"held: {leaves} was ordered in this boot, and is not known to have failed"
        if ctx.now.boot_s - item.incident.opened_boot_s < SETTLE_S:
            return f"waits {SETTLE_S:g} s for what else the kernel says"
        here = (cases.get(view.run) for view in ctx.observed.runs)
        paused = sorted(one.state.run for one in here if one is not None and one.state.held.paused)
        if paused:
            return f"held: {_some(paused)} of this node is paused"
        tripped = self._breaker(ctx, item)
        if tripped:
            return f"held: the breaker is open: {tripped}"
        if ctx.observed.gate.closed:
            return f"waits, for no order can leave: {ctx.observed.gate.closed}"
        if not ctx.settings.single_node:
            return (self._foreign_words(ctx, item)
                    or self._out_of_service(ctx, item, action, wanted)
                    or self._left(ctx, item, action, cases))
        return self._running(ctx, item, action, cases)

    def _breaker(self, ctx: Context, item: Watched) -> str:
        fault = item.incident.fault
        faults = exclusions.faults_of(ctx)
        faults[fault] = (*faults.get(fault, ()), self.name)
        count = len(exclusions.fleet_nodes(self.name, ctx))
        is_open, why = breaker.is_open(faults, fault, count, ctx.settings)
        if is_open:
            ctx.verdicts.append(Verdict(
                fault=fault, subject="fleet", severity=WARN, confidence=1.0, detector="breaker",
                reason=f"the breaker is open: {why}"))
        return why if is_open else ""

    def _running(
        self, ctx: Context, item: Watched, action: str, cases: Mapping[str, RunCase]
    ) -> str:
        """Runs end before the node goes.  An action of the ladder alone interrupts none that goes
        on: only what the driver instructs, or repeats ask for, does, and our own runs alone."""
        foreign = self._foreign_words(ctx, item)
        if foreign:
            return foreign
        views = [view for view in ctx.observed.runs if view.state != "done"]
        going = sorted(view.run for view in views)
        if not going:
            return ""
        waits = _spared(item, action, going)
        if waits and self._hangs(ctx, item, [cases.get(run) for run in going]):
            return ""  # a reset fails for it, and no other end of it is to be had
        if waits:
            return waits
        late = self._is_late(ctx, item)
        for run in going:
            case = cases.get(run)
            if case is not None and not case.state.held.drain:
                case.operator.drain(self._drained(item))
        return "" if late else f"waits until {_some(going)} has ended"

    def _is_late(self, ctx: Context, item: Watched) -> bool:
        """Whether the runs here had their time to end; it begins when this is asked first."""
        m, incident = self.memory, item.incident
        since_s = m.drains.setdefault(incident.id, ctx.now.boot_s)
        pids = {*m.ending.get(incident.id, ()), *ctx.observed.gate.ours}
        m.ending[incident.id] = sorted(pids)[-PIDS_MAX:]
        _bound(m.drains)
        _bound(m.ending)
        return not since_s <= ctx.now.boot_s <= since_s + DRAIN_S

    def _out_of_service(
        self, ctx: Context, item: Watched, action: str, wanted: dict[str, members.NodeDoc]
    ) -> str:
        """Among many nodes the document of this one grants the order: it is taken out of service
        first, behind the breaker of the fleet, by who leads its runs or by itself."""
        store, fault = ctx.observed.store, item.incident.fault
        if not store.up:
            return "waits for the store, in which this node is taken out of service first"
        doc = store.docs.decoded(self._subject(), members.read_node)
        if doc.excluded:
            return "waits until this node is drained" if doc.draining else self._granted(ctx, doc)
        works = sorted(view.run for view in ctx.observed.runs
                       if exclusions.works_on(self.name, view, ctx))
        waits = _spared(item, action, works)
        if waits:
            return waits
        mine = wanted.get(self.name)
        if mine is not None and mine.fault and ctx.now.wall_s - mine.since_wall_s > JUDGED_S:
            del wanted[self.name]
        if self.name not in wanted:
            is_open, why = exclusions.held_back(ctx, fault, self.name, wanted)
            if is_open:
                return f"held: {why}"
            wanted[self.name] = exclusions.struck(
                ctx, self.name, fault, item.incident.reason, self.name)
        return "waits until this node is out of service"

    def _granted(self, ctx: Context, doc: members.NodeDoc) -> str:
        """Of nodes that were excluded in one moment none saw the others in time.  An exclusion can
        be taken back and a reboot cannot: so they are counted once more, when all are seen."""
        version = ctx.observed.store.docs.get(self._subject()).version
        if self.stands[0] != version:
            self.stands = (version, ctx.now.boot_s)
        if not doc.fault:
            return ""
        if ctx.now.boot_s - self.stands[1] < SEEN_S:
            return "waits for the documents of other nodes"
        why = exclusions.surplus(ctx, self.name)
        return f"held: {why}: a person releases it" if why else ""

    def _left(
        self, ctx: Context, item: Watched, action: str, cases: Mapping[str, RunCase]
    ) -> str:
        """Ranks move to other nodes, for this one is out of service; a launcher that has none left
        here leaves, and its run goes on without it."""
        views = [view for view in ctx.observed.runs if view.state != "done"]
        if not views:
            return ""
        late = self._is_late(ctx, item)
        works = sorted(view.run for view in views if exclusions.works_on(self.name, view, ctx))
        if works:
            # The ranks that are in the way of a reset are in that of the reboot behind it as well.
            failed = item.action == RESET_GPU and self._was_reset(ctx, item)
            hangs = late and (action == item.action or failed) and not item.patient
            return "" if hangs else f"waits until the ranks of {_some(works)} are elsewhere"
        for view in views:
            case = cases.get(view.run)
            if case is not None:
                why = f"{action} of {self.name}: {item.incident.reason}"
                case.ending.decide(policy.INFRASTRUCTURE, why, alone=True)
        named = _some(sorted(view.run for view in views))
        return "" if late else f"waits until the launcher of {named} has left"

    def _hangs(self, ctx: Context, item: Watched, going: list[RunCase | None]) -> bool:
        """Whether all of these were ended for this incident, as long ago as an end may take."""
        since_s = self.memory.drains.get(item.incident.id)
        return since_s is not None and ctx.now.boot_s > since_s + DRAIN_S and all(
            case is not None and case.state.held.drain == self._drained(item) for case in going)

    def _drained(self, item: Watched) -> str:
        """Why a run is ended for this incident."""
        return f"{item.action} of {self.name}: {item.incident.reason}"

    def _foreign_words(self, ctx: Context, item: Watched) -> str:
        """First of all: our runs are not ended for an order that then waits for somebody else."""
        foreign = self._foreign(ctx, item.incident.id)
        return f"waits while {_some(foreign)} goes on: this agent may not end it" * bool(foreign)

    def _foreign(self, ctx: Context, incident: str) -> list[str]:
        """Who works here and is served by no agent of ours: processes that a driver lists on any
        device of the node, and the runs of other agents.  Whose a process is was looked up
        (agent/actions/preconditions.py): a launcher's word alone would open the way over somebody
        else's job.  One of a run that was ended for this incident is ours though its launcher is
        gone: it hangs in its device."""
        gate = ctx.observed.gate
        ours = {*gate.ours, *gate.gone, *self.memory.ending.get(incident, ())}
        there: dict[int, str] = {}
        # Of what a driver that hangs said last, the gate knows who of it still lives.
        samples = ctx.observed.samples
        fresh = () if accelerator.PROCESS in samples.silent else samples.of(accelerator.PROCESS)
        listed = accelerator.processes(fresh)
        for pid, device in (*listed, *gate.seen):
            there.setdefault(pid, device)
        found = [f"pid {pid} on {device}" for pid, device in there.items() if pid not in ours]
        return found + [f"the run of the agent at {path}" for path in gate.others]

    # ------------------------------------------------------------ ordering

    def _subject(self, part: str = "") -> str:
        return node_subject(self.name, part)

    def _order(self, ctx: Context, item: Watched, action: str) -> bool:
        """Whether it was given: after one that could not leave the next has to wait a little."""
        incident, now_s = item.incident, ctx.now.wall_s
        device = _address(item) if action == RESET_GPU else ""
        # What the kernel says of it from now on may be of the reset, or of what it left behind.
        cures = tuple(one.incident.id for one in self.kernel.book.entries()
                      if device and one.incident.subject == incident.subject)
        draft = Effect(
            id="", kind=action, subject=self._subject(), reason=incident.reason,
            deadline_s=ACTIONS[action].deadline_s, outlives_node=True, fault=incident.fault,
            body=NodeOrder(ACTIONS[action].verb, self.name, incident.id, incident.reason, device,
                           cures),
        )
        # Ids must not come again in another boot, whose incidents are others; and the same number
        # for each try of one incident, so that the pauses between them grow.
        effect = ctx.emit(int(incident.opened_wall_s), draft)
        if effect is None:
            return False
        m = self.memory
        m.times[_key(item, action)] = [*m.times.get(_key(item, action), ()), now_s][-8:]
        m.asked[incident.id] = [*m.asked.get(incident.id, ()), action]
        if ACTIONS[action].ends_boot:  # until it is known to have failed
            m.leaves = (ctx.now.boot_id, action)
        _bound(m.times)
        _bound(m.asked)
        acted = msgspec.structs.replace(incident, state=values.ACTED, would_have="")
        acted = _noted_once(acted, ctx.now, f"{action} is ordered from the node's unit")
        self.kernel.book.change(ctx, item, values.with_action(acted, effect.id))
        return True

    def _settle(self, ctx: Context, done: EffectResult, order: NodeOrder) -> None:
        """The outcome is a line of its incident.  An order that never left is tried again for
        minutes; every other one is over, whatever the unit made of it.  A GPU that was reset has
        no fault of before."""
        action, m = done.effect.kind, self.memory
        if not done.ok and m.leaves[1] == action:
            m.leaves = ("", "")
        if order.device and (done.ok or done.error.startswith(RAN)):
            m.resets.pop(self._gpu(order), None)  # the newest goes to the end
            m.resets[self._gpu(order)] = Reset(ctx.now.boot_id, ctx.now.wall_s)
            _bound(m.resets)
        opened = self.kernel.book.entries()
        item = next((one for one in opened if one.incident.id == order.incident), None)
        if item is None:
            return
        text = "the node's unit took it" if done.ok else f"failed: {done.error}"
        noted = _noted_once(item.incident, ctx.now, f"{action}: {text}")
        again = False
        if not done.ok and done.error.startswith(REFUSED):
            since_s = m.refused.setdefault(order.incident, ctx.now.boot_s)
            again = since_s <= ctx.now.boot_s < since_s + RETRY_FOR_S
            _bound(m.refused)
        if not done.ok:
            then = "tried again soon" if again else "a person's part"
            noted = msgspec.structs.replace(noted, would_have=f"{action}: {text}; {then}")
        if again:
            asked = m.asked.get(order.incident, [])
            m.asked[order.incident] = [one for one in asked if one != action]
            m.times[_key(item, action)] = m.times.get(_key(item, action), [])[:-1]
        self.kernel.book.change(ctx, item, noted)
        if order.device and done.ok:
            self.kernel.well(ctx, order.cures, "the GPU was reset")

    def _gpu(self, order: NodeOrder) -> str:
        """The subject of what is reset, as incidents have it."""
        return self._subject(f"gpu/{order.device.removesuffix('.0')}")


def _wanted(instructed: str, book: Runbook, was_reset: bool) -> tuple[str, ...]:
    """The instruction alone, else the ladder.  A reset that did not help is followed by what the
    runbook has behind it."""
    if not instructed:
        return book.ladder
    if instructed != RESET_GPU or not was_reset:
        return (instructed,)
    return ladder.behind(book, RESET_GPU)


def _spared(item: Watched, action: str, going: list[str]) -> str:
    """Why these runs are waited for; "" where the driver's instruction ends them, or none is."""
    if not going or (action == item.action and not item.patient):
        return ""
    why = ("the driver lets it come to its end" if action == item.action
           else "nothing but the runbook asks for it")
    return f"waits while {_some(going)} goes on: {why}"


def _address(item: Watched) -> str:
    """Where on PCI the GPU of this incident is, as 0000:4e:00.0; "" when it is about no such."""
    found = GPU.fullmatch(subject_of(item.incident.subject).part)
    return f"{found[1]}.0" if found else ""


def _was_done(text: str, was_reset: bool) -> str:
    """Said where a reset came before; else the incident says already what is not done."""
    return f"{text}; its GPU was reset in this boot, or that was tried" if was_reset else ""


def _key(item: Watched, action: str) -> str:
    return f"{action}|{item.incident.fault}|{item.incident.subject}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _noted_once(incident: Incident, now: Now, text: str) -> Incident:
    """Tries of one order follow each other for minutes: each line of theirs is said once."""
    if any(line == text for _, line in incident.timeline):
        return incident
    return values.noted(incident, now, text)


def _withheld(ctx: Context, action: str) -> str:
    allow, alone = ctx.settings.allow, ctx.settings.alone
    return ACTIONS[action].withheld(allow, alone or exclusions.sees_fleet(ctx.view.node, ctx))


def _bound(kept: dict[str, Any]) -> None:
    """The oldest go first."""
    while len(kept) > KEPT_MAX:
        del kept[next(iter(kept))]
