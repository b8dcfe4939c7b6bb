"""What becomes of the alerts from outside that name this node: checks, evidence, exclusion, drain.

Owns the budgets of these, the incident that such an alert opens, and when an alert is settled.  An
alert becomes a request, which node.py performs as it performs a person's.  Only the node that an
alert names acts on it: it alone has the budget.  What an alert asks of a run is run/alerts.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .. import ladder
from ..actions import (
    ACTIONS,
    DRAIN,
    DRAIN_NODE,
    EXCLUDE_NODE,
    NODE,
    REMOVE_LOCK,
    RUN_CHECK,
    TAKE_EVIDENCE,
    is_persons,
)
from ..effects import drafts
from ..incidents import values
from ..incidents.book import Entry, IncidentBook
from ..model import Alert, Answer, Incident, Request, Runbook, TakeEvidence, node_subject
from ..run import members
from ..run.alerts import ACT_OFF, DETECTOR, STORM_S, is_of_run, label_missing, said, unknown_book
from ..run.case import RunCase
from ..run.incidents import evidence_rows
from ..run.state import Context
from . import exclusions
from .check_runs import CheckRuns, checks_of
from .kernel_incidents import LIVING

WAITS_S = 60.0  # for the agent of its node, or the launcher of its run, which may be coming back
OPEN_MAX = 32
IDS_MAX = 64  # alerts that hold one incident open
LOOKS_MAX = 16  # ranks that are looked at for one alert
KEPT_MAX = 256
LOST = "the agent ended before it learned the outcome"
DONE_AS = {DRAIN_NODE: DRAIN}  # a rung of the ladder -> what a person would ask for


class Alerted(Entry):
    """An open incident, and the alerts that hold it open while they fire."""

    ids: list[str]


class AlertMemory(msgspec.Struct):
    """Survives a restart of the agent."""

    book: IncidentBook[Alerted] = msgspec.field(default_factory=IncidentBook)  # by runbook
    times: dict[str, list[float]] = {}  # "runbook|action" -> wall_s
    asked: dict[str, Request] = {}  # alert -> what it became, until that is answered
    answers: dict[str, Answer] = {}  # alert -> what came of it: it may have to be said again
    looks: dict[str, str] = {}  # effect that reads a rank -> its alert


class NodeAlerts:
    """Makes requests of alerts about one node, and answers the alerts."""

    def __init__(self, name: str, memory: AlertMemory, checks: CheckRuns) -> None:
        self.name, self.memory, self.checks = name, memory, checks
        self.seen_boot_s: dict[str, float] = {}  # alert -> since when: no two clocks are one

    def step(
        self, ctx: Context, cases: Mapping[str, RunCase], wanted: Mapping[str, members.NodeDoc],
        paused: str,
    ) -> list[Request]:
        """What is to be done now.  `wanted`: the node documents that are still to be written."""
        self._looked(ctx)
        self._close(ctx)
        self.seen_boot_s = {one.id: self.seen_boot_s.get(one.id, ctx.now.boot_s)
                            for one in ctx.observed.alerts}
        made: list[Request] = []
        for alert in ctx.observed.alerts:
            if alert.id in self.memory.answers or alert.id in self.memory.asked:
                continue
            if is_of_run(alert, ctx.runbooks.get(alert.runbook)):
                continue
            answer, request = self._judge(ctx, alert, cases, wanted, paused)
            if answer:
                self._settle(Answer(alert.id, False, answer))
            if request is not None:
                made.append(request)
        return made

    def answers(self, ctx: Context) -> list[Answer]:
        """To every alert that is settled, as often as it is shown."""
        known = self.memory.answers
        return [known[one.id] for one in ctx.observed.alerts if one.id in known]

    def waited(self, ctx: Context, alert: Alert) -> bool:
        """Whether whom it concerns had the time to come back."""
        return ctx.now.boot_s - self.seen_boot_s.get(alert.id, ctx.now.boot_s) > WAITS_S

    def asked(self) -> list[Request]:
        """What is under way."""
        return list(self.memory.asked.values())

    def answered(self, ctx: Context, answer: Answer) -> None:
        """What came of a request."""
        request = self.memory.asked.pop(answer.id)
        self._settle(answer)
        item = self.memory.book.open.get(request.fault)
        if item is not None:
            said = f"{request.action}: {answer.text}" if answer.ok else (
                f"{request.action} came to nothing: {answer.text}")
            self.memory.book.note(ctx, item, said)

    def answer(self, ctx: Context, request: Request) -> Answer | None:
        """To a check or a look at ranks; None while it is under way."""
        if request.action == TAKE_EVIDENCE:
            if request.id in self.memory.looks.values():
                return None
            item = self.memory.book.open.get(request.fault)
            where = item.incident.id if item is not None else "its incident"
            return Answer(request.id, True, f"what was seen of the ranks here stands in {where}")
        made = self.checks.answers.get(request.id)
        if made is None and not self.checks.is_asked(ctx, request.id):
            return Answer(request.id, False, LOST)
        return made

    # ------------------------------------------------------------ whether, and what

    def _judge(
        self, ctx: Context, alert: Alert, cases: Mapping[str, RunCase],
        wanted: Mapping[str, members.NodeDoc], paused: str,
    ) -> tuple[str, Request | None]:
        """(why nothing is done, what is); neither where it has to wait, or is another node's."""
        if not alert.node:
            return label_missing(alert, ctx.runbooks.get(alert.runbook)), None
        if alert.node != self.name:
            return self._unheard(ctx, alert), None
        book = ctx.runbooks.get(alert.runbook)
        if book is None:
            return unknown_book(alert), None
        rung, why = self._rung(ctx, alert, book)
        if DETECTOR not in ctx.settings.act:
            return ACT_OFF + (f"; it would have: {rung}" if rung else ""), None
        action = DONE_AS.get(rung, rung)
        doc = ctx.observed.store.docs.decoded(node_subject(self.name), members.read_node)
        request = Request(
            alert.id, action, node_subject(self.name), f"alert {said(alert)}", fault=book.fault,
            by=f"alert {alert.name or alert.runbook}", checks=checks_of(book) * (
                action == RUN_CHECK))
        if doc.request == alert.id:  # an earlier life of this agent did, and forgot
            drains = DRAIN if doc.draining else EXCLUDE_NODE
            self.memory.asked[alert.id] = msgspec.structs.replace(request, action=drains)
            return "", None
        storm = self._storm(ctx, book)
        if storm or not rung:
            self._join(alert, book.fault)
            return storm or f"nothing is done: {why}", None
        refused = self._refused(ctx, request, doc, wanted)
        if refused:
            return f"nothing is done: {refused}", None
        held = f"held: paused by an operator: {paused}" if paused else ""
        held = held or self._held(ctx, request, cases)
        item = self._open(ctx, alert, book)
        if held or item is None:
            if item is not None:
                self._tell(ctx, item, f"{rung}: {held}")
            return "", None
        return "", self._ask(ctx, item, request, book, rung)

    def _rung(self, ctx: Context, alert: Alert, book: Runbook) -> tuple[str, str]:
        """(the next action of the ladder, why none).  Evidence is taken beside every other, and
        alone where the ladder has none that may be done now."""
        missing = label_missing(alert, book)
        if missing:
            return "", missing
        rung, why = ladder.next_rung(
            book, lambda action: self._spent(ctx, book, action),
            lambda action: _leave(ctx, alert, book, action))
        if rung is not None:
            return rung, ""
        if TAKE_EVIDENCE in book.ladder and (
                self._spent(ctx, book, TAKE_EVIDENCE) < book.budget_count):
            return TAKE_EVIDENCE, ""
        return "", why or (f"{book.fault} of {self.name} used up what its runbook allows: "
                           f"{book.budget_count} within {book.budget_window_h:g} h each")

    def _spent(self, ctx: Context, book: Runbook, action: str) -> int:
        since_s = ctx.now.wall_s - book.budget_window_h * 3600.0
        # A time of the future is a clock that was set back: it counts, which is the careful side.
        return sum(at_s > since_s for at_s in self.memory.times.get(f"{book.fault}|{action}", ()))

    def _storm(self, ctx: Context, book: Runbook) -> str:
        """Why nothing more is done for this runbook now: one action answers what comes with it."""
        for request in self.memory.asked.values():
            if request.fault == book.fault:
                return f"{request.action} is under way for {book.fault}: one action answers a storm"
        done = [(at_s, key.rpartition("|")[2]) for key, times in self.memory.times.items()
                for at_s in times if key.rpartition("|")[0] == book.fault]
        at_s, action = max(done, default=(0.0, ""))
        age_s = ctx.now.wall_s - at_s
        if not action or age_s >= STORM_S:
            return ""
        return (f"{action} was done for {book.fault} {age_s:.0f} s ago: one action answers a "
                "storm")

    def _refused(
        self, ctx: Context, request: Request, doc: members.NodeDoc,
        wanted: Mapping[str, members.NodeDoc],
    ) -> str:
        """Why it is not done, and will not be."""
        if request.action == TAKE_EVIDENCE:
            return "" if self._ranks(ctx, request) else f"no rank runs on {self.name}"
        if request.action == RUN_CHECK:
            return "" if request.checks else f"{RUN_CHECK}: no check is known for {request.fault}"
        if doc.excluded or self.name in wanted:
            return f"{self.name} is out of runs already: {doc.reason}"
        if ctx.settings.single_node:
            return ""
        is_open, why = exclusions.held_back(ctx, request.fault, self.name, wanted)
        return f"the breaker is open: {why}" if is_open else ""

    def _held(self, ctx: Context, request: Request, cases: Mapping[str, RunCase]) -> str:
        """What it waits for; "" when it may go."""
        going = [view.run for view in ctx.observed.runs if view.generation and view.state != "done"]
        if request.action == TAKE_EVIDENCE:
            return ""
        if request.action == RUN_CHECK:
            disturbs = going and set(request.checks) & set(ctx.settings.gate.disturbing)
            return f"waits while {going[0]} goes on" if disturbs else ""
        if ctx.observed.journal_stalled:
            return "waits for the journal"
        if not ctx.observed.store.up:
            return "waits for the store"
        if ctx.now.boot_s - ctx.since_boot_s < members.STALE_LEASES * ctx.settings.lease_s and (
                not ctx.settings.single_node):
            return "waits until the others were heard of"
        paused = [run for run in going if run in cases and _is_paused(cases[run])]
        return f"held: run {paused[0]} of this node is paused" if paused else ""

    def _unheard(self, ctx: Context, alert: Alert) -> str:
        """Why an alert about another node comes to nothing; "" while that node may still answer."""
        alone = ctx.settings.single_node
        if not alone and (not self.waited(ctx, alert) or any(
                one.node == alert.node and members.is_fresh(one, ctx.now, ctx.settings)
                for one in ctx.observed.beats)):
            return ""
        if not alone and alert.node in exclusions.fleet_nodes(self.name, ctx):
            return (f"nothing is done: the agent of node {alert.node!r} does not answer, and it "
                    "alone acts on alerts about that node")
        return (f"no node {alert.node!r} is known here: the label `node` has an agent's own name "
                "of its node")

    # ------------------------------------------------------------ doing

    def _ask(
        self, ctx: Context, item: Alerted, request: Request, book: Runbook, rung: str
    ) -> Request | None:
        """Charges it; the request, where others perform it."""
        m = self.memory
        looks = self._look(ctx, item, request) if TAKE_EVIDENCE in book.ladder else 0
        if rung == TAKE_EVIDENCE and not looks:
            return None  # somebody else looks at them just now: the next step asks again
        key = f"{book.fault}|{rung}"
        m.times[key] = [*m.times.pop(key, ()), ctx.now.wall_s][-max(8, book.budget_count):]
        m.asked[request.id] = request
        for old in list(m.times)[:-KEPT_MAX]:
            del m.times[old]
        acted = msgspec.structs.replace(item.incident, state=values.ACTED, would_have="")
        m.book.change(ctx, item, values.noted(
            acted, ctx.now, f"{request.action}: asked for by {request.reason}"))
        return request

    def _ranks(self, ctx: Context, request: Request) -> list[tuple[str, int]]:
        """(run, rank) of each that lives here, as many as are looked at."""
        return [(view.run, rank.rank) for view in sorted(ctx.observed.runs, key=lambda v: v.run)
                for rank in view.ranks
                if rank.node == self.name and rank.state in LIVING][:LOOKS_MAX]

    def _look(self, ctx: Context, item: Alerted, request: Request) -> int:
        """Has the ranks here looked at; how many are."""
        there, count = set(self._ranks(ctx, request)), 0
        for view in ctx.observed.runs:
            for rank in view.ranks:
                if (view.run, rank.rank) not in there:
                    continue
                draft = drafts.evidence(view, rank, request.reason)
                effect = ctx.emit(rank.generation, msgspec.structs.replace(
                    draft, request=request.id))
                if effect is not None:
                    self.memory.looks[effect.id] = request.id
                    changed = values.with_action(item.incident, effect.id)
                    self.memory.book.change(ctx, item, changed)
                    count += 1
        return count

    def _looked(self, ctx: Context) -> None:
        """What was seen of a rank joins the incident; a failure is a line."""
        looks = self.memory.looks
        for done in ctx.settled:
            body = done.effect.body
            if done.effect.id not in looks or not isinstance(body, TakeEvidence):
                continue
            alert = looks.pop(done.effect.id)
            item = next((one for one in self.memory.book.entries() if alert in one.ids), None)
            if item is None:
                continue
            who = f"rank {body.rank} of run {body.run}"
            rows = tuple((f"{who} {what}", value) for what, value in evidence_rows(done))
            text = f"{who} was looked at" if done.ok else f"{TAKE_EVIDENCE} of {who} failed: " + (
                done.error)
            noted = values.noted(item.incident, ctx.now, text)
            self.memory.book.change(ctx, item, values.with_evidence(noted, rows))
        for lost in [id for id in looks if id not in ctx.in_flight.pending]:
            alert = looks.pop(lost)  # asked for in an earlier life of the agent
            request = self.memory.asked.get(alert)
            if request is not None and request.action == TAKE_EVIDENCE:
                self.answered(ctx, Answer(alert, False, LOST))

    def _settle(self, answer: Answer) -> None:
        answers = self.memory.answers
        answers[answer.id] = answer
        for old in list(answers)[:-KEPT_MAX]:
            del answers[old]

    # ------------------------------------------------------------ its incident

    def _open(self, ctx: Context, alert: Alert, book: Runbook) -> Alerted | None:
        """The open incident of this runbook, with the alert among those that hold it open."""
        item, store = self._join(alert, book.fault), self.memory.book
        if item is not None or not store.room(ctx, book.severity, sorted(store.open), OPEN_MAX):
            return item
        text = f"alert {said(alert)}"
        incident = Incident(
            id=f"node-{self.name}-{book.fault}-alert-{store.number(book.fault)}", fault=book.fault,
            subject=node_subject(self.name), severity=book.severity, run="", generation=0,
            opened_wall_s=ctx.now.wall_s, opened_boot_s=ctx.now.boot_s, reason=text,
            culprit=self.name, evidence=(("alert", alert.id),),
            timeline=((ctx.now.wall_s, text),))
        return store.add(ctx, book.fault, Alerted(incident, [alert.id]))

    def _join(self, alert: Alert, fault: str) -> Alerted | None:
        item = self.memory.book.open.get(fault)
        if item is not None and alert.id not in item.ids and len(item.ids) < IDS_MAX:
            item.ids.append(alert.id)
        return item

    def _tell(self, ctx: Context, item: Alerted, would_have: str) -> None:
        if item.incident.would_have != would_have:
            changed = msgspec.structs.replace(item.incident, would_have=would_have)
            self.memory.book.change(ctx, item, changed)

    def _close(self, ctx: Context) -> None:
        """Over when none of its alerts fires, nothing is under way for it, and this node is not
        out of runs for it."""
        if not ctx.observed.store.up:
            return
        doc = ctx.observed.store.docs.decoded(node_subject(self.name), members.read_node)
        fires = set(ctx.observed.firing)
        for fault, item in sorted(self.memory.book.open.items()):
            ids = set(item.ids)
            if ids & fires or ids & self.memory.asked.keys():
                continue
            if doc.excluded and doc.request in ids:
                self._tell(ctx, item, "resolved; it is open until checks of the node pass or a "
                           "person releases it")
            else:
                self.memory.book.close(ctx, fault, "resolved, and nothing else holds it open")


def _leave(ctx: Context, alert: Alert, book: Runbook, action: str) -> ladder.Leave:
    """How an action of the ladder stands for an alert about a node."""
    if action in (TAKE_EVIDENCE, REMOVE_LOCK):
        return ladder.PASS
    row = ACTIONS[action]
    if row.alert_label == NODE and (not row.off_by_default or action in ctx.settings.allow):
        return ladder.MAY
    why = label_missing(alert, msgspec.structs.replace(book, ladder=(action,)))
    if row.alert_label == NODE or is_persons(action):
        why = row.withheld(ctx.settings.allow)
    return ladder.Leave(False, stops=True, reason=why or f"{action}: no alert has it done")


def _is_paused(case: RunCase) -> bool:
    plan = case.state.document.plan
    return case.state.held.rests or (plan is not None and plan.paused)
