"""One run on this node, step by step: read, find causes, answer, act on the stage.

Owns the order of things and RunState.upkeep.  The detectors, stage, policy, plan, reconcile and
validity answer its questions; RECORDS in state.py names the one module that writes each record of
RunState.  Driven by levels alone: a step looks at the levels, and asks for the one thing that is
missing.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.worker import exits

from .. import ledger
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..model import (
    TRAINER,
    UNKNOWN,
    Beat,
    Delete,
    Plan,
    RankView,
    RunView,
    Stop,
    Verdict,
    node_subject,
    run_subject,
)
from . import heard, members, policy, progress, reconcile
from .alert_looks import AlertLooks
from .between import BetweenTests
from .causes import Causes
from .ending import LOOK_AGAIN_S, Endings
from .incidents import RunIncidents
from .layout import WAITING
from .log_questions import LogQuestions
from .operator import Operator
from .peer_gate import PeerGate
from .plan import NOTHING_LEFT
from .plan_document import Document
from .recovery import LIVE, Recoveries
from .stage import Stage, StageView, may_start, stage, wants_plan
from .start_gate import REFUSED, StartGate
from .state import Context, RunState

STILL_S = 1.0  # a suspended run is idle; one whose launcher alone is stopped trains on
START_ATTEMPTS = 3
DELETED_MAX = 256


class RunCase:
    """The life of one run, as far as this node can see and lead it."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.incidents = RunIncidents(state)
        self.operator = Operator(state)
        self.document = Document(state, self.incidents)
        self.logs = LogQuestions(state, self.incidents)
        self.ending = Endings(state, self.document, self.incidents, self.logs)
        self.recovery = Recoveries(state, self.incidents, self.ending)
        self.causes = Causes(state, self.incidents, self.recovery, self.operator)
        self.looks = AlertLooks(state, self.incidents, self.document, self.recovery)
        self.gate = StartGate(state, self.incidents, self.ending)
        self.peers = PeerGate(state, self.incidents, self.document)
        self.between = BetweenTests(state, self.incidents, self.document, self.peers)
        self.stage = Stage.UNKNOWN  # as of the last step
        self.shown = ledger.Shown()  # as of the last step

    def read(self, ctx: Context) -> None:
        """The newest document, before anything else: who may lead follows from it."""
        if self.document.read(ctx):
            # Where ranks of the run live on other nodes, it goes on.
            if not self._elsewhere(ctx, self.document.current(ctx)):
                progress.new_launcher(self.state, ctx.view.grade == TRAINER)
            self.recovery.forget()
            self.ending.forget(ctx)
            self.operator.drain("")

    def new_boot(self, boot_s: float) -> None:
        """Another boot's seconds mean nothing here."""
        progress.new_boot(self.state, boot_s)
        self._storeless_since(-1.0)
        for part in (self.document, self.incidents, self.recovery, self.ending, self.causes,
                     self.between):
            part.new_boot()

    def step(self, ctx: Context) -> None:
        """One step, after `read`."""
        self.operator.pass_time(ctx.now, ctx.leader)
        self._take_outcomes(ctx)
        self._levels_came_true(ctx)
        self.document.came_true(ctx)
        plan = self.document.current(ctx)
        if self._is_anothers(ctx, plan):
            self._name(ctx, plan)
            return
        if plan is not None and not ctx.settings.single_node:
            heard.look(self.state, ctx, plan)
        ranks = self._ranks(ctx, plan)
        self.causes.see_suspension(ctx, ranks)
        if self.state.suspects.suspension is not None:
            self._name(ctx, plan)
            return
        if ctx.view.connected:
            self.peers.look(ctx, plan)
            self.causes.learn(ctx, plan, ranks)
            self.recovery.close(ctx, plan, ranks)
            self.causes.detect(ctx, plan, ranks)
            self.looks.step(ctx, plan, ranks)
            self.logs.step(ctx, ranks)
            if not self.causes.holds(ctx, ranks):
                self.recovery.answer(ctx, plan)
            self._see_end(ctx, plan, ranks)
            self._park(ctx, plan, ranks)
            self._without_store(ctx)
        if ctx.view.generation and not ctx.settings.single_node:
            self.gate.stands(ctx)
        self._act(ctx, plan, ranks)
        if ctx.leader and not ctx.settings.single_node:
            self.document.restore(ctx)
            self.document.tell_unheard(ctx)
            self.gate.leaves_out(ctx, self.peers.names_hurt(ctx))
        self.gate.shown(ctx)
        if ctx.view.connected and self.state.recovery is not None:
            ctx.wake(LOOK_AGAIN_S)

    def beat(self, sent: Beat, view: RunView) -> Beat:
        """What is sent of the run, with what its own state adds to the launcher's levels."""
        return replace(sent, held=self.gate.held(view), top=self.document.top)

    def _is_anothers(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether the run of this name is another user's, and goes on: this launcher leaves."""
        if plan is None or plan.finished >= 0 or not members.is_anothers(plan.owner, ctx.view.uid):
            return False
        ctx.reason = (f"run {self.state.run} is user {plan.owner}'s, and goes on: give yours "
                      "another name with --run")
        self.ending.decide(exits.CONFIGURATION, ctx.reason)
        if ctx.view.connected and not (self.state.ending and self.state.ending.left):
            ctx.emit(ctx.view.generation,
                     drafts.finish(ctx.view, exits.CONFIGURATION, ctx.reason))
        return True

    def _park(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """This node's ranks leave at the end of their step when the document says so."""
        if plan is None or ctx.settings.single_node:
            return
        why = members.asked_to_end(ctx.view, plan, ctx.observed.beats, ctx.now, ctx.settings)
        if why and ctx.leader and ctx.view.grade == TRAINER and plan is self.state.document.plan:
            # Callers signal their launchers one by one: only one step for all makes a whole
            # checkpoint.
            self.document.put(ctx, replace(
                plan, park=why, saves=True,
                park_after=self.recovery.park_after(ctx, ranks, saves=True)), why)
        draft = reconcile.park(plan, ctx.view, ctx.settings.stop_grace_s)
        if draft is not None and not self.recovery.park_is_over(ctx):
            ctx.emit(ctx.view.generation, draft)

    def _gang(self, ctx: Context, since_s: float) -> None:
        """A run that cannot start whole within its limit is tried again elsewhere."""
        limit_s = ctx.view.gang_limit_s or ctx.settings.gang_limit_s
        waits = ctx.leader and ctx.reason.startswith(WAITING)
        if waits and ctx.now.boot_s - since_s > limit_s:
            self.recovery.give_up(f"{ctx.reason}, for {limit_s:g} s")

    def _nothing_left(self, ctx: Context, plan: Plan | None) -> None:
        """A run whose checkpoints were all put aside begins anew on a person's word alone."""
        if ctx.leader and ctx.reason.startswith(NOTHING_LEFT):
            self.ending.decide(exits.BUDGET_SPENT, ctx.reason, "checkpoint_bad")
            self.ending.finish(ctx, plan)

    def _strand(self, ctx: Context) -> None:
        """A script that was queued again elsewhere is not started beside what may be left of it."""
        if ctx.view.grade == TRAINER or not self.document.is_deserted(ctx):
            return
        plan = self.document.current(ctx)
        gone = ", ".join(plan.members) if plan else ""
        ctx.reason = (f"nothing is heard of {gone}, where ranks of this run may go on: a script is "
                      "not started a second time under one name")
        limit_s = ctx.view.gang_limit_s or ctx.settings.gang_limit_s
        if ctx.now.boot_s - max(ctx.view.registered_boot_s, ctx.since_boot_s) > limit_s:
            why = f"{ctx.reason}, for {limit_s:g} s: start it again with another --run"
            self.ending.decide(policy.INFRASTRUCTURE, why, alone=True)

    def _without_store(self, ctx: Context) -> None:
        """A store on one node of the run does not come back without that node: whoever stands still
        meanwhile waits for it no longer than for nodes.  A script's ranks live by their permits,
        which that node's agent renews."""
        where, view = ctx.settings.store_node, ctx.view
        since_s = self.state.upkeep.storeless_boot_s
        limit_s = view.gang_limit_s or ctx.settings.gang_limit_s
        moves = any(rank.state in LIVE and (view.grade != TRAINER or rank.still_s < limit_s)
                    for rank in view.ranks)
        if not where or ctx.observed.store.up or moves:
            self._storeless_since(-1.0)
        elif since_s < 0.0:
            self._storeless_since(ctx.now.boot_s)
        elif ctx.now.boot_s - since_s > limit_s:
            self.recovery.give_up(
                f"the state of this run is kept by the node of --rdzv-endpoint {where}, which was "
                f"out of reach for {limit_s:g} s: start the run again on all nodes")

    def _storeless_since(self, boot_s: float) -> None:
        if self.state.upkeep.storeless_boot_s != boot_s:
            self.state.upkeep = replace(self.state.upkeep, storeless_boot_s=boot_s)

    def outlook(self, ctx: Context, cause: Cause) -> policy.Grant | None:
        """What would be done about such a cause if it came now; nothing is changed."""
        return self.recovery.outlook(ctx, self.document.current(ctx), cause)

    def _ranks(self, ctx: Context, plan: Plan | None) -> tuple[RankView, ...]:
        if plan is None or ctx.view.generation == 0 and ctx.settings.single_node:
            return ()
        beats = () if ctx.settings.single_node else ctx.observed.beats
        found = members.ranks_of(ctx.view, plan.generation, beats, ctx.now, ctx.settings)
        if ctx.view.grade != TRAINER:
            return found
        # A page shows the steps that its process has ended: of a new one none, and of one that
        # raised inside a step one less than where it goes on from.
        return tuple(replace(rank, step=plan.resume.step)
                     if rank.page and rank.step < plan.resume.step else rank for rank in found)

    # ------------------------------------------------------------ reading what came back

    def _take_outcomes(self, ctx: Context) -> None:
        run = self.state.run
        for done in ctx.settled:
            effect = done.effect
            if effect.kind == "put" and effect.subject == drafts.document_subject(run):
                self.document.settled(ctx, done)
            elif getattr(effect.body, "run", "") != run:
                continue
            elif effect.kind == "logs":
                self.logs.settled(ctx, done)
            elif isinstance(effect.body, Delete):
                upkeep = self.state.upkeep
                kept = () if done.ok else effect.body.paths
                self.state.upkeep = replace(
                    upkeep, not_deleted=(*upkeep.not_deleted, *kept)[-DELETED_MAX:])
            else:
                self.ending.settled(done)
                self.gate.settled(done)
                self.peers.settled(ctx, done)
                self.between.settled(ctx, done)
                self.causes.settled(ctx, done)
                self.incidents.settled(ctx, done)

    def _levels_came_true(self, ctx: Context) -> None:
        """Effects that levels show as done need no outcome."""
        view, subject = ctx.view, run_subject(self.state.run)
        for effect in ctx.in_flight.of("stop", subject):
            if isinstance(effect.body, Stop) and reconcile.stop_came_true(effect.body, view):
                ctx.in_flight.came_true(effect.id)
        for effect in ctx.in_flight.of("start", subject):
            if getattr(effect.body, "generation", 0) <= view.generation:
                ctx.in_flight.came_true(effect.id)

    def _see_end(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """An end that levels or the document show, and nobody had to decide."""
        if ctx.view.shutdown or self.state.held.drain or plan is None:
            return
        whole = ranks and len(ranks) >= len(plan.ranks)
        if whole and all(r.ended is not None and ends.ended_well(r.ended) for r in ranks):
            self.ending.decide(0, "every rank is done")
        elif plan.finished >= 0 and self.state.document.meant == plan.generation:
            self.ending.decide(plan.finished, "the run's document says it is over")

    # ------------------------------------------------------------ acting, one thing at a time

    def _act(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        seen = self._name(ctx, plan)
        match self.stage:
            case Stage.UNKNOWN:
                self._unknown(ctx)
            case Stage.ENDING:
                self._end(ctx, plan)
            case Stage.OVER:
                self.ending.record(ctx, plan)
            case Stage.STARTING:
                self._start(ctx, seen)
            case Stage.IDLE:
                self._idle(ctx, seen)
            case Stage.RECOVERING:
                self._recover(ctx, plan, ranks)
            case Stage.TRAINING | Stage.WAITING:
                self._keep_up(ctx, plan)

    def _name(self, ctx: Context, plan: Plan | None) -> StageView:
        """What the run does as of this step, and what decided that."""
        seen = StageView(ctx.view, plan, ctx.settings.single_node, self._elsewhere(ctx, plan),
                         ctx.leader, self.document.answered, ctx.observed.store.up)
        self.stage = stage(self.state, seen)
        return seen

    def _elsewhere(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether other nodes' beats show ranks of the newest plan."""
        if plan is None or ctx.settings.single_node or ctx.view.generation != 0:
            return False
        beats = ctx.observed.beats
        return bool(members.ranks_of(ctx.view, plan.generation, beats, ctx.now, ctx.settings))

    def _unknown(self, ctx: Context) -> None:
        ctx.reason = "the launcher is not connected: unknown, so nothing is done"
        ctx.verdicts.append(Verdict(
            fault="launcher_lost", subject=run_subject(self.state.run), severity=UNKNOWN,
            confidence=0.5, reason="the launcher's connection is gone", run=self.state.run,
            detector="launcher", generation=ctx.view.generation))

    def _end(self, ctx: Context, plan: Plan | None) -> None:
        if ctx.view.shutdown or self.state.held.drain:
            self.ending.shut_down(ctx, plan)
        else:
            self.ending.finish(ctx, plan)

    def _start(self, ctx: Context, seen: StageView) -> None:
        """Have the launcher start what is planned for it, or wait until its ranks began."""
        plan = seen.plan
        if plan is None or not may_start(self.state, seen):
            return self._keep_up(ctx, plan)
        permit_s = 0.0 if ctx.settings.single_node else ctx.settings.lease_s
        draft = reconcile.start(plan, ctx.view, permit_s)
        if draft is None:
            return
        taken = self.gate.taken(ctx, plan)
        if taken and not (ctx.leader or ctx.settings.single_node):
            # It stays a spare: who leads misses its ranks soon, and plans without it.
            self.gate.stands(ctx)
            ctx.reason = taken
            return
        if taken:
            self.ending.decide(policy.INFRASTRUCTURE, taken, REFUSED, alone=True)
            return
        failures = ctx.in_flight.failures(plan.generation, draft.subject, "start")
        if failures >= START_ATTEMPTS:
            why = f"the launcher could not start generation {plan.generation}"
            self.ending.decide(policy.INFRASTRUCTURE, why, "launcher_lost")
            return
        effect = ctx.emit(plan.generation, draft)
        ctx.reason = plan.reason
        if effect is not None:
            self.incidents.note_all(ctx, f"generation {plan.generation} starts", effect.id)

    def _idle(self, ctx: Context, seen: StageView) -> None:
        if not wants_plan(self.state, seen):
            if not ctx.settings.single_node:
                self.gate.holds(ctx, joins=True)
                self._strand(ctx)
            self._keep_up(ctx, seen.plan)
        elif (not self.gate.holds(ctx) or self.gate.leads_on(ctx)) and not self.peers.holds(
                ctx, seen.plan):
            self.document.propose(ctx, seen.plan, (), "the launcher is idle",
                                  left_out=self.peers.left_out(ctx, seen.plan))
            self._nothing_left(ctx, seen.plan)
            self._gang(ctx, max(ctx.view.registered_boot_s, ctx.since_boot_s))

    def _recover(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        cause, grant = self.state.cause, self.state.grant
        if cause is None or grant is None or plan is None:
            return self._keep_up(ctx, plan)
        if not ctx.leader:
            return
        if grant.action == policy.OBSERVE:
            ctx.reason = grant.reason
            # Ranks that wait for a dead one would wait for ever; what only might be lost ends none.
            dead = any(rank.ended is not None for rank in ranks)
            if self.recovery.gathered(ctx, ranks) if dead else (
                    not any(rank.state in LIVE for rank in ranks)):
                self.ending.decide(policy.finish_code(cause), grant.reason, cause.fault)
                self.ending.finish(ctx, plan)
        elif (self.recovery.ready(ctx, ranks) and not self.gate.holds_restart(ctx, cause)
              and not self.between.holds(ctx, plan, cause)):
            cause = self.recovery.doubted(ctx, plan, ranks, cause)
            self.document.propose(ctx, plan, ranks, cause.reason, cause,
                                  self.peers.left_out(ctx, plan))
            self._nothing_left(ctx, plan)
            self._gang(ctx, self.state.progress.broken_boot_s + progress.tested_s(self.state))

    # ------------------------------------------------------------ while it trains

    def _keep_up(self, ctx: Context, plan: Plan | None) -> None:
        """Say pauses, name spares, delete old checkpoints."""
        held = self.state.held
        asked = plan is not None and (held.paused or held.resumed)
        if plan is not None and asked and (held.paused, held.until_wall_s) != (
                plan.paused, plan.paused_until_wall_s):
            changed = replace(
                plan, paused=held.paused, paused_until_wall_s=held.until_wall_s,
                paused_since_wall_s=ctx.now.wall_s if held.until_wall_s else 0.0)
            self.document.put(ctx, changed, "paused" if held.paused else "resumed")
        self.operator.shown(plan)
        if plan is None:
            return
        if not ctx.settings.single_node:
            stale = reconcile.stale(plan, ctx.view)
            if stale is not None:
                ctx.emit(plan.generation, stale)
            if ctx.leader:
                self._name_spares(ctx, plan)
        if self.state.recovery is None:
            self._delete(ctx, plan)

    def _delete(self, ctx: Context, plan: Plan) -> None:
        view, upkeep = ctx.view, self.state.upkeep
        commits = members.kept_commits(view, plan, ctx.observed.beats, ctx.now, ctx.settings)
        if not reconcile.may_delete(plan, view, commits, ctx.leader):
            return
        paths = reconcile.deletable(
            commits, plan.history, view.keep or ctx.settings.keep_checkpoints,
            plan.quarantined)
        new = tuple(path for path in paths if path not in upkeep.deleted)
        again = tuple(path for path in paths if path in upkeep.not_deleted)
        if new and ctx.emit(plan.generation, drafts.delete(plan, view, (*new, *again))):
            self.state.upkeep = replace(
                upkeep, deleted=(*upkeep.deleted, *new)[-DELETED_MAX:], not_deleted=tuple(
                    path for path in upkeep.not_deleted if path not in again))

    def _name_spares(self, ctx: Context, plan: Plan) -> None:
        """Names a node that came, or came back: only a named node may follow a lost leader."""
        if plan is not self.state.document.plan or plan.finished >= 0:
            return
        nodes = ctx.nodes(plan)
        named = {*plan.members, *plan.spares}
        new = [m.node for m in nodes if m.is_fit and not m.draining and m.node not in named]
        if new:
            changed = replace(plan, spares=tuple(sorted({*plan.spares, *new})))
            self.document.put(ctx, changed, f"new spares: {', '.join(new)}")

    # ------------------------------------------------------------ for the ledger

    def doing(self, ctx: Context) -> str:
        """The category of the seconds until the next step."""
        state, view, now = self.state, ctx.view, self.state.progress
        current = self.document.current(ctx)
        mine = [r for r in view.ranks if current and r.generation == current.generation]
        live = [r for r in mine if r.state in LIVE]
        recovery, leaves = state.recovery, bool(view.shutdown)
        well = bool(mine) and all(r.ended and ends.ended_well(r.ended) for r in mine)
        parked = not live and any(r.state == "parked" for r in mine)
        # Ranks that are to leave at the end of a step train on until then.
        trains = recovery is not None and recovery.cause.parks and not recovery.planned and live
        broken = not leaves and (
            recovery is not None and not trains or parked
            or any(r.ended and not ends.ended_well(r.ended) for r in mine))
        failed = state.finish_code > 0 and not leaves
        self.shown = _shown(live, now.last_step_boot_s, broken or failed, leaves)
        placed = current is not None and any(node == view.node for _, node in current.ranks)
        resumed = current.resume.step if current else 0
        earlier = now.earlier_step_boot_s > 0.0
        idle = state.suspects.suspension is not None and all(
            r.proc_state == "T" or r.still_s > STILL_S for r in live)
        return ledger.category(ledger.Doing(
            connected=view.connected, live=bool(live), known=recovery is not None or parked,
            over=(view.state == "done" or state.finish_code >= 0 or idle or well
                  or leaves and not live),
            fault_paused=state.held.rests and state.cause is not None, broken=broken,
            checked=not live and (ctx.in_flight.busy(node_subject(view.node, "checks"))
                                  or ctx.in_flight.busy(drafts.peers_subject(view.run))
                                  or self.state.gate.held_boot_s > 0.0),
            no_spare=self._too_few(ctx, current),
            again=placed and earlier and now.seen_step <= (
                resumed if view.grade == TRAINER else 0),
            phases=tuple(sorted({_phase(r, view) for r in live})), compiling=bool(view.compiling),
            step=min((r.step for r in live), default=0),
            # A trainer goes on from its checkpoints under a new launcher too.
            base_step=max(now.base_step, current.peak if current and (
                earlier or view.grade == TRAINER) else 0),
            resumed_step=resumed, redoes=view.grade == TRAINER,
            step_s=state.history.step_s, still_s=max((r.still_s for r in live), default=0.0),
        ))

    def _too_few(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether fewer nodes can take ranks than the run may go on with."""
        view = ctx.view
        if ctx.settings.single_node:
            return False
        return sum(one.is_fit for one in ctx.nodes(plan)) < view.nnodes_min


def _shown(
    live: list[RankView], last_step_boot_s: float, broken: bool, asked: bool
) -> ledger.Shown:
    total: dict[str, float] = {}
    for rank in live:
        for phase, seconds in rank.phase_s:
            total[phase] = total.get(phase, 0.0) + seconds
    return ledger.Shown(
        live[0].generation if live else 0, tuple(rank.rank for rank in live), total,
        last_step_boot_s, broken, asked)


def _phase(rank: RankView, view: RunView) -> str:
    if view.compiling:
        return "compile"
    return "startup" if rank.state == "starting" else rank.phase
