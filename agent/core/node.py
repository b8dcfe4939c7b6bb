"""One node's state machine: what is observed goes in, effects and the view for people come out.

Owns the step and the memory; the runs' lives are in agent/core/run/case.py.  No I/O, no clock, no
randomness, no globals: the same code runs on a node and in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from . import actions, ladder
from .detect import registry
from .detect.cloud import ec2
from .detect.ranks import ended as ends
from .detect.ranks import known_causes
from .effects.in_flight import EffectResult, InFlight
from .incidents.book import Entry, IncidentBook
from .ledger import Ledger
from .model import (
    DEGRADED,
    FLEET,
    STORE,
    UNREADABLE,
    WARN,
    Answer,
    Beat,
    Condition,
    Decision,
    Effect,
    Incident,
    Now,
    Observed,
    Request,
    Runbook,
    RunView,
    Settings,
    Value,
    Verdict,
    node_subject,
    rank_subject,
    run_subject,
    subject_of,
)
from .nodes import check_reports, exclusions, fleet_baseline, kernel_incidents, stale_locks
from .nodes.alert_actions import LOST, AlertMemory, NodeAlerts
from .nodes.check_runs import CheckMemory, CheckRuns
from .nodes.condition_incidents import ConditionIncidents, ConditionMemory
from .nodes.exclusions import Exclusions, OwnDoc
from .nodes.fleet_pause import FleetPause, PauseMemory
from .nodes.identity import Identities
from .nodes.kernel_incidents import KernelIncidents, KernelMemory
from .nodes.repair import RepairMemory, Repairs
from .run import members, outgoing, plan, start_gate
from .run.alerts import is_of_run
from .run.case import RunCase
from .run.operator import born
from .run.stage import Stage
from .run.state import Context, RunState, Suspension
from .series.gradient_pace import GradientPace

TICK_S = 1.0
FROZEN_S = 3.0  # between two steps: this agent stood still itself
THAW_S = 1.5  # after that, until pages prove anything again
RUNS_MAX = 32
ABSENT_S = 60.0  # a launcher that waits for a restarted agent is back within seconds
HANDLED_MAX = 256
NOBODY_NAMED = "shown: where the kernel's line names no rank's process, nobody is looked at"
OWN_CODE = "; or with the script's own code, where it ended with one"
PAUSED = "paused by an operator: shown, and nothing done"
ASKED = "asked for by an operator"
NOT_DONE = "the agent ended before it was carried out: ask again"


class NodeMemory(msgspec.Struct):
    """What a restart of the agent remembers.  Authority stays in the store's documents."""

    runs: dict[str, RunState] = {}
    in_flight: InFlight = msgspec.field(name="outbox", default_factory=InFlight)
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    counts: dict[str, int] = {}
    handled: list[str] = []  # request ids
    exclusions: dict[str, members.NodeDoc] = msgspec.field(  # node -> document still to be written
        name="wishes", default_factory=dict)
    fleet: IncidentBook[Entry] = msgspec.field(default_factory=IncidentBook)  # fault ->
    kernel: KernelMemory = msgspec.field(default_factory=KernelMemory)
    checks: CheckMemory = msgspec.field(default_factory=CheckMemory)
    alerts: AlertMemory = msgspec.field(default_factory=AlertMemory)
    repairs: RepairMemory = msgspec.field(default_factory=RepairMemory)
    boot_id: str = ""
    detectors: registry.Memories = {}
    unlocked: dict[str, list[float]] = msgspec.field(  # lock file -> wall_s of the orders
        name="removals", default_factory=dict)
    conditions: ConditionMemory = msgspec.field(default_factory=ConditionMemory)
    paused_until_wall_s: float = 0.0  # when that ends by itself; 0 = a person ends it
    paused: str = ""  # why an operator paused this node, whatever runs here; "" = not paused
    fleet_pause: PauseMemory = msgspec.field(default_factory=PauseMemory)
    own: OwnDoc = msgspec.field(default_factory=OwnDoc)
    left_for: str = ""  # the announced end of this node for which it drained itself last


class Outlook(Value, frozen=True):
    """What would be done about a fault of one subject."""

    subject: str
    action: str = msgspec.field(name="rung")  # of the runbook; "" = none would be taken
    reason: str
    code: int = -1  # that the run would end with; -1 = it goes on


class Node:
    """The agent's mind on one node.

    memory: what `memory()` returned before a restart; b"" or anything unreadable starts fresh,
    which costs history (windows, open incidents) and no decision.
    """

    def __init__(
        self, name: str, settings: Settings, runbooks: Mapping[str, Runbook], memory: bytes = b""
    ) -> None:
        self.name, self.settings, self.runbooks = name, settings, runbooks
        self.kept, self.watch = _read_memory(name, memory)
        # An intent without an outcome is never replayed: what is still wanted gets a new id.
        self.kept.in_flight.pending = {}
        self.cases = {run: RunCase(state) for run, state in sorted(self.kept.runs.items())}
        self.exclusions = Exclusions(name, self.kept.own)
        self.fleet_pause = FleetPause(self.kept.fleet_pause)
        self.kernel = KernelIncidents(name, self.kept.kernel)
        self.conditions = ConditionIncidents(name, self.kept.conditions)
        self.checks = CheckRuns(name, self.kept.checks, self.kernel, self.conditions)
        self.repairs = Repairs(name, self.kept.repairs, self.kernel, self.checks)
        self.alerts = NodeAlerts(name, self.kept.alerts, self.checks)
        self.identities = Identities(name)
        self.since_boot_s = -1.0
        self.last_boot_s = -1.0
        self.thaw_boot_s = 0.0
        self._absent_boot_s: dict[str, float] = {}  # run that is not shown -> since when
        self._seen: tuple[Now, Observed] | None = None

    def configure(self, settings: Settings, runbooks: Mapping[str, Runbook]) -> None:
        """From the next step on; what is remembered and what is in flight stays."""
        self.settings, self.runbooks = settings, runbooks

    def memory(self) -> bytes:
        """JSON for the next start of the agent; bounded."""
        return msgspec.json.encode(self.kept)

    def stages(self) -> dict[str, str]:
        """Run -> the name of what it was doing in the last step."""
        return {run: case.stage.value for run, case in sorted(self.cases.items())}

    def paces(self) -> dict[str, GradientPace]:
        """Run -> how long its ranks wait for the sums of their gradients."""
        return {run: case.state.history.gradients for run, case in sorted(self.cases.items())}

    def suspended(self) -> dict[str, Suspension]:
        """Run -> since when it is stopped from outside, and why that is believed."""
        return {run: found for run, case in sorted(self.cases.items())
                if (found := case.state.suspects.suspension) is not None}

    def paused_until(self) -> dict[str, float]:
        """Subject of each pause that ends by itself -> when, by the wall clock."""
        found = {run_subject(run): held.until_wall_s if held.paused else held.ends_wall_s
                 for run, held in sorted((r, c.state.held) for r, c in self.cases.items())}
        found[node_subject(self.name)] = self.kept.paused_until_wall_s
        found[FLEET] = self.fleet_pause.until_wall_s(self._seen[0]) if self._seen else 0.0
        return {subject: until_s for subject, until_s in found.items() if until_s > 0.0}

    def endings(self) -> dict[str, tuple[int, str]]:
        """Run -> exit code and reason, of each whose end is decided."""
        return {run: (ending.code, ending.reason) for run, case in sorted(self.cases.items())
                if (ending := case.state.ending) is not None and ending.code >= 0}

    def step(self, now: Now, observed: Observed) -> Decision:
        """One step.  The same (now, observed) twice gives no new effect and no changed incident."""
        self._clock(now)
        self._seen = now, observed
        settled = self.kept.in_flight.settle(observed.outcomes, now.boot_s)
        if 0.0 < self.kept.paused_until_wall_s <= now.wall_s:
            self.kept.paused, self.kept.paused_until_wall_s = "", 0.0
        effects: list[Effect] = []
        verdicts = self._own_verdicts(observed)
        changed: dict[str, Incident] = {}
        contexts: list[Context] = []
        doing: dict[str, str] = {}
        whole = self._any(now, observed, settled, effects, verdicts, changed)
        self._requests(whole)
        of_fleet = self.fleet_pause.standing(now, observed.store, self.settings.single_node)
        paused = self.kept.paused or of_fleet
        causes = self.kernel.step(whole, paused)
        conditions = self.watch.look(observed)
        verdicts.extend(conditions)
        self.conditions.step(whole, conditions, self.kernel.addresses())
        self.identities.step(whole)
        check_reports.step(whole, self.name)
        fleet_baseline.step(whole, self.name)
        leaving = ec2.leaving(conditions, self.settings)
        verdicts[:] = ec2.acted(verdicts) if leaving else verdicts
        opened = (*self.kernel.book.incidents().values(),
                  *self.conditions.book.incidents().values())
        explaining = known_causes.conditions(conditions, observed.samples)
        sent = self._beats(whole, opened, explaining)
        observed = whole.observed
        for view in sorted(observed.runs, key=lambda v: v.run):
            context = self._context(now, observed, view, settled, effects, verdicts, changed)
            context.conditions = members.conditions(
                view, explaining, observed.beats, now, self.settings)
            context.causes, context.beyond = causes, partial(self.repairs.rung, whole)
            context.opened = opened
            doing[view.run] = self._judge(
                context, leaving if self.settings.single_node else "", bool(of_fleet))
            contexts.append(context)
        for _, case in sorted(self.cases.items()):
            verdicts.extend(case.incidents.stopped(now))
        for context in contexts:
            self._climb(whole, context)
        led = [c for c in contexts if c.leader]
        sick = bool(sent and sent[0].fatal) or exclusions.is_open_still(self.name, whole, opened)
        self.fleet_pause.step(whole)
        asked = self.alerts.step(whole, self.cases, self.kept.exclusions, paused)
        for request in asked:
            self._request(whole, request)
        if not (self.settings.single_node or paused):
            self.kept.left_for = self.exclusions.leave(
                self.kept.exclusions, whole, leaving, self.kept.left_for)
        self.exclusions.step(
            self.kept.exclusions, self.kept.fleet, led, whole, sick, bool(of_fleet))
        self.checks.step(whole, paused)
        self.repairs.step(whole, self.cases, paused, self.kept.exclusions)
        stale_locks.step(whole, conditions, self.kept.unlocked, paused)
        checking = self.kept.in_flight.busy(node_subject(self.name, "checks"))
        seen = {view.run for view in observed.runs}
        resting = "health_check" if checking else "startup" if observed.coming else "idle"
        self.kept.ledger.settle(
            now.boot_s, now.boot_id, doing, resting,
            {run: self.cases[run].shown for run in doing if run in self.cases})
        self._leave(whole, seen)
        self._forget(seen)
        answers = self._answers(whole, contexts)
        decision = self._decision(now, contexts, effects, verdicts, changed, answers)
        return msgspec.structs.replace(decision, beats=self._gated(sent, observed),
                                       fleet_paused=of_fleet, asked=tuple(asked))

    def _beats(
        self, whole: Context, opened: tuple[Incident, ...], explaining: tuple[Condition, ...]
    ) -> tuple[Beat, ...]:
        """What is sent to the others; this node hears itself at once, and from nobody else."""
        if self.settings.single_node:
            return ()
        names = start_gate.names_of_devices(whole)
        sent = outgoing.beats(whole, self.name, opened, names, explaining)
        own = [msgspec.structs.replace(one, boot_s=whole.now.boot_s)
               for one in self._gated(sent, whole.observed)]
        others = [one for one in whole.observed.beats if one.node != self.name]
        whole.observed = msgspec.structs.replace(whole.observed, beats=(*own, *others))
        return sent

    def _gated(self, sent: tuple[Beat, ...], observed: Observed) -> tuple[Beat, ...]:
        """With what the gate of each run has said, and which generations its name has had."""
        views = {view.run: view for view in observed.runs}
        return tuple(self._case(one.run).beat(one, views[one.run]) if one.run in views else one
                     for one in sent)

    def _judge(self, context: Context, leaving: str, rests: bool) -> str:
        """One run's step, and what the run does now.

        What it emitted before a bug of ours showed stays: each effect was decided by itself.  The
        rest is not made up for, and the next step begins from the same levels.
        """
        case = self._case(context.view.run)
        try:
            case.read(context)
            case.operator.of_fleet(rests)
            if leaving:
                case.operator.leave(context.view, leaving)
            case.document.lead(context)
            case.step(context)
            return case.doing(context)
        except Exception as error:  # border of a run: one run's levels never halt another's
            failure = registry.run_not_judged(context.view, error)
            context.leader, context.reason, case.stage = False, failure.reason, Stage.UNKNOWN
            context.verdicts.append(failure)
            return "unknown"

    def _climb(self, whole: Context, context: Context) -> None:
        """What the ladder of a run came to beyond the run itself."""
        for cause, action, why in context.climbed:
            if action == actions.EXCLUDE_NODE:
                made = exclusions.struck(whole, cause.node, cause.fault, why, self.name)
                self.kept.exclusions[cause.node] = msgspec.structs.replace(
                    made, request=cause.request)
            else:
                self.kernel.climb(whole, cause, action, why)

    def outlook(self, fault: str) -> tuple[Outlook, ...]:
        """What would be done about this fault if it came now, for each rank of each run that goes
        on here, and for this node.  Changes nothing."""
        if self._seen is None:
            return ()
        now, observed = self._seen
        book = self.runbooks.get(fault)
        of_node = book is not None and book.scope not in ("rank", "run")
        detector = kernel_incidents.DETECTOR if of_node else ends.detector_of(fault)
        found: list[Outlook] = []
        whole = self._any(now, observed, [], [], [], {})
        for view in sorted(observed.runs, key=lambda v: v.run):
            case = self.cases.get(view.run)
            context = self._context(now, observed, view, [], [], [], {})
            context.beyond = partial(self.repairs.rung, whole)
            if book is not None and of_node and not kernel_incidents.ends_ranks(book):
                found += self._looks(book, view)
                continue  # no cause of a run comes of it
            for rank in (-1, *(r.rank for r in view.ranks)):
                cause = ends.Cause(fault, view.generation, fault, rank, self.name, step=-1,
                                   detector=detector, user=fault in ends.OF_THE_JOB)
                granted = case.outlook(context, cause) if case is not None else None
                if granted is not None and case is not None:
                    paused = case.state.held.rests or bool(self.kept.paused)
                    over = granted.action == "finish" and not paused
                    said = granted.reason + (OWN_CODE if over and cause.user else "")
                    found.append(Outlook(
                        rank_subject(view.run, rank), "" if paused else granted.rung,
                        PAUSED if paused else said, granted.code if over else -1))
        if book is not None and of_node:
            cause = ends.Cause(fault=fault, generation=0, reason=fault, severity=book.severity)
            action, why = self.repairs.outlook(whole, cause)
            unlocks = ladder.holds(book, actions.REMOVE_LOCK)
            if unlocks and actions.REMOVE_LOCK in self.settings.allow:
                action, why = actions.REMOVE_LOCK, ""
            if not action and ladder.holds(book, actions.RUN_CHECK):
                action, why = actions.RUN_CHECK, ""
            if not action and kernel_incidents.looks_at(book):
                why = NOBODY_NAMED
            if self.kept.paused or self.kept.fleet_pause.in_force.paused:
                action, why = "", PAUSED
            found.append(Outlook(node_subject(self.name), action, why))
        return tuple(found)

    def _looks(self, book: Runbook, view: RunView) -> list[Outlook]:
        """The ranks that would be looked at if the kernel named them."""
        living = [r for r in view.ranks if r.state in kernel_incidents.LIVING]
        paused = self.kept.paused or self.kept.fleet_pause.in_force.paused
        if not kernel_incidents.looks_at(book) or paused:
            return []
        return [Outlook(rank_subject(view.run, rank.rank), actions.TAKE_EVIDENCE, "")
                for rank in living if rank.node == self.name]

    # ------------------------------------------------------------ inputs

    def _clock(self, now: Now) -> None:
        if self.since_boot_s < 0:
            self.since_boot_s = now.boot_s
        elif now.boot_s - self.last_boot_s > FROZEN_S:
            self.thaw_boot_s = now.boot_s + THAW_S
        self.last_boot_s = now.boot_s
        if now.boot_id != self.kept.boot_id:
            self.kept.in_flight.new_boot()
            self.watch.other_boot()
            for case in self.cases.values():
                case.new_boot(now.boot_s)
            self.kept.boot_id = now.boot_id

    def _requests(self, whole: Context) -> None:
        for request in sorted(whole.observed.requests, key=lambda r: r.id):
            if request.id in self.kept.handled:
                continue
            self.kept.handled = [*self.kept.handled[-(HANDLED_MAX - 1) :], request.id]
            if request.subject == FLEET:
                self.fleet_pause.ask(request, request.reason or ASKED, whole.now)
            else:
                self._request(whole, request)

    def _answers(self, whole: Context, contexts: list[Context]) -> tuple[Answer, ...]:
        """To the requests and alerts that are settled.  A restart is one when a plan names it, or
        something else happened; all others are done or refused in the step that sees them."""
        observed = whole.observed
        found = [answer for request in sorted(observed.requests, key=lambda r: r.id)
                 if (answer := self._answer(request, observed)) is not None]
        found += [answer for request in observed.orphans
                  if (answer := self._answer_orphan(whole.now, request, observed)) is not None]
        for request in self.alerts.asked():
            made = self._excluded(request, observed) if self._is_of_fleet(request) else (
                self.alerts.answer(whole, request))
            if made is not None:
                self.alerts.answered(whole, made)
        found += self.alerts.answers(whole)
        found += [answer for context in contexts for answer in context.answers]
        known = {view.run for view in observed.runs}
        found += [Answer(alert.id, False, f"no launcher of run {alert.run!r} came")
                  for alert in observed.alerts if alert.run not in known
                  and is_of_run(alert, self.runbooks.get(alert.runbook))
                  and self.alerts.waited(whole, alert)
                  and not self._goes_on(observed, alert.run)]
        return tuple(found)

    def _answer(self, request: Request, observed: Observed) -> Answer | None:
        """To a person's request; None while it is under way."""
        shown = {view.run for view in observed.runs if view.connected}
        run = request.run or subject_of(request.subject).run
        case = self.cases.get(run)
        if run and (case is None or run not in shown):
            return Answer(request.id, False, f"no launcher of {run} is connected here")
        return self._came_of(request, observed, case, run in shown)

    def _came_of(
        self, request: Request, observed: Observed, case: RunCase | None, shown: bool
    ) -> Answer | None:
        if request.subject == FLEET:
            return self.fleet_pause.answer(request)
        if self._is_of_fleet(request):
            return self._excluded(request, observed)
        if request.action == actions.RUN_CHECK:
            return self.checks.answers.get(request.id)
        if case is not None and request.action == actions.RESTART_RANKS:
            return case.operator.answer(request.id, shown)
        return Answer(request.id, True, f"{request.action}: taken")

    def _answer_orphan(self, now: Now, request: Request, observed: Observed) -> Answer | None:
        """To a request that an earlier life of this agent took.  It is never begun here: what that
        life began is in its memory and goes on, and of all else it is said that it was not done."""
        id, run, alerts = request.id, subject_of(request.subject).run, self.kept.alerts
        if not observed.store.up or id in alerts.asked or id in {one.id for one in observed.alerts}:
            return None  # an alert's request is made again by itself
        case, restarts = self.cases.get(run), request.action == actions.RESTART_RANKS
        # What is no action of the core's a launcher was asked for, and may have done.
        not_done = Answer(id, False, NOT_DONE if request.action in actions.ACTIONS else LOST)
        if id not in self.kept.handled or run and case is None:
            return alerts.answers.get(id, not_done)
        shown = any(view.run == run and view.connected for view in observed.runs)
        if restarts and not shown and now.boot_s - self.since_boot_s < ABSENT_S:
            return None  # its launcher comes back, and what was planned is read again
        if request.action == actions.RUN_CHECK:
            return not_done  # its round ended with the agent
        answer = self._came_of(request, observed, case, shown)
        return not_done if restarts and answer is not None and not answer.ok else answer

    def _goes_on(self, observed: Observed, run: str) -> bool:
        """Whether others answer for this run: over nodes its document is in force without it."""
        if self.settings.single_node:
            return False
        plan = members.read_plan(observed.store.docs.get(str(run_subject(run))))
        return plan is not None and plan.finished < 0

    def _request(self, ctx: Context, request: Request) -> None:
        node = subject_of(request.subject).node
        reason = request.reason or ASKED
        if self._is_of_fleet(request):
            self._mark(ctx, request, node, reason)
            if not (self.settings.single_node and request.action == actions.DRAIN):
                return None
        run = request.run or subject_of(request.subject).run
        mine = [run] if run else sorted(self.cases) if node in ("", self.name) else []
        whole = not run and node in ("", self.name)
        if whole and request.action == actions.RUN_CHECK:
            return self.checks.ask(request)
        if whole and request.action in (actions.PAUSE, actions.RESUME):
            pauses = request.action == actions.PAUSE
            self.kept.paused = reason if pauses else ""
            self.kept.paused_until_wall_s = request.until_wall_s if pauses else 0.0
        for name in mine:
            case = self.cases.get(name)
            if case is not None:
                case.operator.ask(request, reason)

    def _is_of_fleet(self, request: Request) -> bool:
        """Whether it is about a node's place among all runs."""
        return bool(subject_of(request.subject).node) and actions.marks_node(request.action)

    def _mark(self, ctx: Context, request: Request, node: str, reason: str) -> None:
        """The document that is wanted of a node.  What it was excluded for before is kept, and only
        what is done for a fault counts among that."""
        if request.fault:
            made = exclusions.struck(ctx, node, request.fault, reason, request.by)
        else:
            known = ctx.observed.store.docs.decoded(node_subject(node), members.read_node)
            made = members.NodeDoc(
                excluded=request.action != actions.RELEASE_NODE, reason=reason, by=request.by,
                strikes=known.strikes, since_wall_s=ctx.now.wall_s)
        self.kept.exclusions[node] = msgspec.structs.replace(
            made, draining=request.action == actions.DRAIN, request=request.id)

    def _excluded(self, request: Request, observed: Observed) -> Answer | None:
        """Once the node's document says what was asked, and a drain has come to its end."""
        node = subject_of(request.subject).node
        doc = observed.store.docs.decoded(node_subject(node), members.read_node)
        if node in self.kept.exclusions or doc.request == request.id and doc.draining:
            return None
        if doc.request != request.id:
            return Answer(request.id, False, f"something else was done with {node} since: "
                          f"{doc.reason or 'nothing is known of it'}")
        if request.action == actions.DRAIN:
            return Answer(request.id, doc.excluded, f"{node} is drained: nothing of any run is "
                          "left there" if doc.excluded else doc.reason)
        return Answer(request.id, True, f"{node} is " + (
            "excluded from runs" if doc.excluded else "released"))

    def _own_verdicts(self, observed: Observed) -> list[Verdict]:
        found = []
        if observed.journal_stalled:
            found.append(
                Verdict(
                    fault="journal_stalled", subject=node_subject(self.name), severity=DEGRADED,
                    confidence=1.0, detector="journal",
                    reason="the journal takes no writes: nothing that outlives the node is done")
            )
        if not observed.store.up:
            found.append(
                Verdict(
                    fault="store_lost", subject=STORE, severity=WARN, confidence=1.0,
                    reason=(f"{observed.store.problem or 'the store does not answer'}: no plan is "
                            "made, training goes on"),
                    detector="store")
            )
        return found

    def _context(
        self, now: Now, observed: Observed, view: RunView, settled: list[EffectResult],
        effects: list[Effect], verdicts: list[Verdict], changed: dict[str, Incident],
    ) -> Context:
        leader = self.settings.single_node or plan.is_leader(
            view.run, self.name, observed.store.leases, now)
        return Context(
            now=now, view=view, observed=observed, settings=self.settings, runbooks=self.runbooks,
            in_flight=self.kept.in_flight, settled=settled, since_boot_s=self.since_boot_s,
            frozen=now.boot_s < self.thaw_boot_s, counts=self.kept.counts, effects=effects,
            verdicts=verdicts, changed=changed, leader=leader, wake_s=TICK_S,
        )

    def _any(
        self, now: Now, observed: Observed, settled: list[EffectResult], effects: list[Effect],
        verdicts: list[Verdict], changed: dict[str, Incident],
    ) -> Context:
        """A context of no run, for what concerns nodes."""
        view = RunView(run="", node=self.name, grade="", nproc=0)
        return self._context(now, observed, view, settled, effects, verdicts, changed)

    def _case(self, run: str) -> RunCase:
        if run not in self.cases:
            self.kept.runs[run] = RunState(run, held=born(
                bool(self.kept.paused), self.kept.paused_until_wall_s))
            self.cases[run] = RunCase(self.kept.runs[run])
        return self.cases[run]

    # ------------------------------------------------------------ outputs

    def _leave(self, whole: Context, seen: set[str]) -> None:
        """Closes what stands open of runs that are over here.  A launcher that was asked to end, by
        its caller or a drain, leaves by itself, and nobody is left to see how it went on."""
        now_s, before = whole.now.boot_s, self._absent_boot_s
        self._absent_boot_s = {
            run: before.get(run, now_s) for run in self.cases if run not in seen}
        for run, since_s in sorted(self._absent_boot_s.items()):
            incidents = self.cases[run].incidents
            if incidents.book.open and now_s - since_s > ABSENT_S:
                incidents.close_all(whole, "the run is over here: its launcher has left")

    def _forget(self, seen: set[str]) -> None:
        """Runs that nobody shows any more go first when there are too many, and of those the ones
        of which nothing is said any more."""
        absent = [run for run in sorted(self.cases) if run not in seen]
        absent.sort(key=lambda run: self.cases[run].state.incidents.stopped is not None)
        for run in absent[: max(0, len(self.cases) - RUNS_MAX)]:
            del self.cases[run]
            del self.kept.runs[run]

    def _decision(
        self, now: Now, contexts: list[Context], effects: list[Effect],
        verdicts: list[Verdict], changed: dict[str, Incident], answers: tuple[Answer, ...],
    ) -> Decision:
        shown = {one.id: one for one in self.kept.fleet.incidents().values()}
        shown |= self.kernel.book.incidents() | self.conditions.book.incidents()
        shown |= self.kept.alerts.book.incidents()
        for run in sorted(self.cases):
            shown |= self.kept.runs[run].incidents.book.incidents()
        shown.update(changed)
        waits = [TICK_S, self.kept.in_flight.retry_at_s(now.boot_s), *(c.wake_s for c in contexts)]
        plans = [(c.view.run, self.cases[c.view.run].state.document.plan) for c in contexts]
        counts = [(key.partition("/"), n) for key, n in sorted(self.kept.counts.items())]
        return Decision(
            effects=tuple(effects), verdicts=tuple(verdicts),
            incidents=tuple(shown[i] for i in sorted(shown)),
            plans=tuple(p for _, p in plans if p is not None),
            reasons=tuple((c.view.run, c.reason) for c in contexts),
            ledger=self.kept.ledger.node_rows(), ledger_settled=self.kept.ledger.settled_rows(),
            run_ledger=self.kept.ledger.run_rows(),
            detector_counts=tuple((key[0], key[2], n) for key, n in counts),
            next_step_s=max(0.01, min(waits)), paused=self.kept.paused, answers=answers,
        )


def _read_memory(name: str, memory: bytes) -> tuple[NodeMemory, registry.NodeWatch]:
    """With the detectors, whose memories are part of it: it is read as a whole or not at all."""
    try:
        kept = msgspec.json.decode(memory, type=NodeMemory) if memory else NodeMemory()
        return kept, registry.NodeWatch(name, kept.detectors)
    except UNREADABLE:
        kept = NodeMemory()
        return kept, registry.NodeWatch(name, kept.detectors)
