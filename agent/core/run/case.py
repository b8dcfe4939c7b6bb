"""One run on this node, step by step: notice, answer, plan, start, settle.

Owns the order of things.  Every question it asks is answered by a pure function next door
(detect/*, policy, plan, reconcile, validity); what it keeps is RunMemory.  Driven by levels alone:
each method looks at what is, and asks for the one thing that is missing.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ..detect.ranks import ended as ends
from ..model import TRAINER, UNKNOWN, Plan, RankView, Stop, Verdict
from . import members, policy, reconcile
from . import plan as planning
from .causes import RESTORE_FAILED, Notice
from .incidents import Casebook
from .log_questions import LogCase
from .plan_document import Document
from .state import Context, RunMemory

EVIDENCE_WAIT_S = 0.2  # at a verdict, for evidence that is still missing
STOP_WAIT_S = 2.0  # after an order to stop: the launcher's start ends what is left
START_ATTEMPTS = 3
SHUTDOWN_CODES = {"preempted": policy.INFRASTRUCTURE, "interrupted": 130}
RECOVERY_STEP_S = 0.05  # so that the cost of a recovery is measured this closely
FAULT_GRACE_S = 1.0  # for the rest of a script's ranks when one of them failed
LIVE = ("starting", "running")


class RunCase:
    """The life of one run, as far as this node can see and lead it."""

    def __init__(self, memory: RunMemory) -> None:
        self.memory = memory
        self.book = Casebook(memory)
        self.document = Document(memory, self.book)
        self.notice = Notice(memory, self.book)
        self.logs = LogCase(memory, self.book)

    def step(self, ctx: Context) -> None:
        self.document.read(ctx)
        self._take_outcomes(ctx)
        self._levels_came_true(ctx)
        self.document.came_true(ctx)
        plan = self.document.current(ctx)
        ranks = self._ranks(ctx, plan)
        if not ctx.view.connected:
            ctx.reason = "the launcher is not connected: unknown, so nothing is done"
            ctx.verdicts.append(self._unknown(ctx))
            return
        self.notice.learn(ctx, plan, ranks)
        self.book.close_recovered(ctx, plan, ranks)
        self.notice.detect(ctx, plan, ranks)
        self.logs.step(ctx, ranks)
        self._answer(ctx, plan)
        self._act(ctx, plan, ranks)
        if self.memory.recovering:
            ctx.wake(RECOVERY_STEP_S)

    def _ranks(self, ctx: Context, plan: Plan | None) -> tuple[RankView, ...]:
        if plan is None or ctx.view.generation == 0 and ctx.settings.single_node:
            return ()
        beats = () if ctx.settings.single_node else ctx.observed.beats
        return members.ranks_of(ctx.view, plan.generation, beats, ctx.now, ctx.settings)

    # ------------------------------------------------------------ reading what came back

    def _take_outcomes(self, ctx: Context) -> None:
        key = f"run/{self.memory.run}"
        for done in ctx.settled:
            body = done.effect.body
            if done.effect.kind == "put" and done.effect.subject == f"store/{key}":
                self.document.settled(ctx, done)
            elif done.effect.kind == "logs" and getattr(body, "run", "") == self.memory.run:
                self.logs.settled(ctx, done)
            elif getattr(body, "run", "") == self.memory.run:
                self.book.effect_settled(ctx, done)

    def _levels_came_true(self, ctx: Context) -> None:
        """Effects that levels show as done need no outcome."""
        m, view = self.memory, ctx.view
        subject = reconcile.run_subject(m.run)
        for effect in ctx.outbox.in_flight("stop", subject):
            if isinstance(effect.body, Stop) and reconcile.stop_came_true(effect.body, view):
                ctx.outbox.came_true(effect.id)
        for effect in ctx.outbox.in_flight("start", subject):
            if getattr(effect.body, "generation", 0) <= view.generation:
                ctx.outbox.came_true(effect.id)

    # ------------------------------------------------------------ answering a cause

    def _answer(self, ctx: Context, plan: Plan | None) -> None:
        """Grant what the cause asks for, once; what it costs is charged by the next plan."""
        m, cause = self.memory, self.memory.cause
        if cause is None or plan is None or m.grant is not None or not ctx.leader:
            return
        if m.paused or plan.paused:
            ctx.reason = "paused by an operator: the fault is seen and nothing is done"
            return
        account = policy.Account(
            m.run, self._max_restarts(ctx), self._spent(ctx, plan), self._expired(ctx, plan)
        )
        m.grant = policy.grant(cause, account, ctx.runbooks, ctx.settings)
        if m.grant.action == policy.FINISH:
            self._finish_with(m.grant.code, m.grant.reason, m.grant.fault or cause.fault)
            if m.grant.fault:
                self.book.open_side(ctx, m.grant.fault, cause, m.grant.reason)

    def _max_restarts(self, ctx: Context) -> int:
        return ctx.view.max_restarts

    def _spent(self, ctx: Context, plan: Plan) -> tuple[tuple[str, int], ...]:
        """Budgets, less what this generation earned back by making progress."""
        m = self.memory
        own = [(c.generation, c.step) for c in ctx.view.commits if not c.bad]
        newest = max(own, default=None)
        if policy.made_progress(plan, m.earned_steps, newest):
            return policy.give_back(plan.spent, plan)
        return plan.spent

    def _expired(self, ctx: Context, plan: Plan) -> tuple[str, ...]:
        """Budget keys whose window is over; one never seen here begins now."""
        m = self.memory
        keys = [k for k, _ in plan.spent if "/" in k]
        for key in keys:
            m.budget_since.setdefault(key, ctx.now.boot_s)
        m.budget_since = {k: s for k, s in sorted(m.budget_since.items()) if k in keys}
        return tuple(k for k in keys if self._window_over(ctx, k))

    def _window_over(self, ctx: Context, key: str) -> bool:
        book = ctx.runbooks.get(key.split("/")[1 if key.startswith("signature/") else 0])
        window_s = (book.budget_window_h if book else 24.0) * 3600.0
        since_s = self.memory.budget_since[key]
        return ctx.now.boot_s - since_s > window_s or since_s > ctx.now.boot_s

    def _finish_with(self, code: int, reason: str, fault: str = "") -> None:
        m = self.memory
        if m.finish_code < 0:
            m.finish_code, m.finish_reason, m.finish_fault = code, reason, fault

    # ------------------------------------------------------------ acting, one thing at a time

    def _act(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        m, view = self.memory, ctx.view
        if view.shutdown or m.drain:
            return self._shutdown(ctx, ranks)
        if self._all_done(ctx, plan, ranks):
            self._finish_with(0, "every rank is done")
        if m.finish_code >= 0:
            return self._finish(ctx, plan)
        if plan is not None and plan.finished >= 0 and m.planned == plan.generation:
            self._finish_with(plan.finished, "the run's document says it is over")
            return self._finish(ctx, plan)
        if plan is not None and self._may_start(ctx, plan):
            return self._start(ctx, plan)
        if view.generation == 0 and view.state == "idle" and self._nothing_runs(ctx, plan):
            return self._plan(ctx, plan, (), "the launcher is idle")
        if m.cause is not None and m.grant is not None and plan is not None:
            return self._recover(ctx, plan, ranks)
        if plan is not None and (m.paused or m.resumed) and m.paused != plan.paused:
            changed = msgspec.structs.replace(plan, paused=m.paused)
            self.document.put(ctx, changed, "paused" if m.paused else "resumed")
        m.resumed = m.resumed and plan is not None and plan.paused
        self._housekeeping(ctx, plan)
        return None

    def _nothing_runs(self, ctx: Context, plan: Plan | None) -> bool:
        """An idle launcher asks for a plan only where no other node runs the newest one."""
        if ctx.settings.single_node or plan is None or plan.finished >= 0:
            return True
        mine = any(node == ctx.view.node for _, node in plan.ranks)
        others = members.ranks_of(
            ctx.view, plan.generation, ctx.observed.beats, ctx.now, ctx.settings
        )
        return not others and (mine or plan.generation <= self.memory.top)

    def _all_done(
        self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]
    ) -> bool:
        if plan is None or not ranks or len(ranks) < len(plan.ranks):
            return False
        return all(r.ended is not None and ends.ended_well(r.ended) for r in ranks)

    def _may_start(self, ctx: Context, plan: Plan) -> bool:
        behind = plan.generation > ctx.view.generation and plan.finished < 0
        # A spare that leads is behind for ever: it has nothing to start, and must go on to recover.
        if not any(node == ctx.view.node for _, node in plan.ranks):
            return False
        if ctx.settings.single_node:
            return behind and self.memory.planned == plan.generation
        return behind and plan.generation > self.memory.top

    def _start(self, ctx: Context, plan: Plan) -> None:
        permit_s = 0.0 if ctx.settings.single_node else ctx.settings.lease_s
        draft = reconcile.start_draft(plan, ctx.view, permit_s)
        if draft is None:
            draft = reconcile.stale_draft(plan, ctx.view)
        if draft is None:
            return
        failures = ctx.outbox.failures(plan.generation, draft.subject, "start")
        if failures >= START_ATTEMPTS and draft.kind == "start":
            why = f"the launcher could not start generation {plan.generation}"
            self._finish_with(policy.INFRASTRUCTURE, why, "launcher_lost")
            return
        effect = ctx.emit(plan.generation, draft)
        ctx.reason = plan.reason
        if effect is not None and draft.kind == "start":
            self.book.note_all(ctx, f"generation {plan.generation} starts", effect.id)

    def _recover(self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...]) -> None:
        grant, cause = self.memory.grant, self.memory.cause
        if grant is None or cause is None or not ctx.leader:
            return
        if grant.action == policy.OBSERVE:
            ctx.reason = grant.reason
            if not any(r.state in LIVE for r in ranks):
                self._finish_with(policy.finish_code(cause), grant.reason, cause.fault)
                self._finish(ctx, plan)
            return
        if self._evidence_missing(ctx):
            return ctx.wake(EVIDENCE_WAIT_S)
        if not self._gathered(ctx, ranks):
            ctx.reason = "waiting until the other ranks are parked or ended"
            return
        self._plan(ctx, plan, ranks, cause.reason)

    def _evidence_missing(self, ctx: Context) -> bool:
        cause = self.memory.cause
        if cause is None or cause.detector != "hang" or self.memory.stop_boot_s > 0:
            return False
        subject = f"run/{self.memory.run}/rank/{cause.rank}"
        waited_s = ctx.now.boot_s - self.memory.cause_boot_s
        return ctx.outbox.busy(subject, "evidence") and waited_s < EVIDENCE_WAIT_S - 1e-6

    def _gathered(self, ctx: Context, ranks: tuple[RankView, ...]) -> bool:
        """Every rank is parked or has ended; what stands in the way is told to stop."""
        m, cause, view = self.memory, self.memory.cause, ctx.view
        if cause is None:
            return False
        live = [r for r in ranks if r.state in LIVE and r.ended is None]
        mine = [r for r in live if r.node == view.node]
        parked = [r for r in ranks if r.state == "parked" and r.node == view.node]
        if not live and (view.grade == TRAINER or not parked):
            return True
        park_over_s = m.cause_boot_s + ctx.settings.park_wait_s - ctx.now.boot_s
        # Where only consequences ended the others park by themselves, and hold what to resume from.
        blind = cause.rank < 0 and cause.fault != "rank_exited"
        if view.grade != TRAINER or blind:
            unfit = [*mine, *parked] if view.grade != TRAINER else mine
        else:
            unfit = [r for r in mine if r.rank == cause.rank or park_over_s <= 0]
        if unfit:
            self._stop(ctx, tuple(sorted(r.rank for r in unfit)), self._grace_s(ctx))
        ctx.wake(park_over_s if park_over_s > 0 else RECOVERY_STEP_S)
        stop_over = 0 < m.stop_boot_s < ctx.now.boot_s - STOP_WAIT_S
        far_over = not mine and park_over_s <= 0
        return far_over or (stop_over and park_over_s <= 0)

    def _grace_s(self, ctx: Context) -> float:
        cause = self.memory.cause
        if cause is not None and not cause.charged:
            return ctx.settings.stop_grace_s
        if ctx.view.grade == TRAINER:
            return 0.0
        return min(FAULT_GRACE_S, ctx.settings.stop_grace_s)

    def _stop(self, ctx: Context, ranks: tuple[int, ...], grace_s: float) -> None:
        m, cause = self.memory, self.memory.cause
        told = ranks == m.stop_ranks and m.stop_boot_s > 0
        if told and ctx.now.boot_s - m.stop_boot_s < grace_s + STOP_WAIT_S:
            return  # said once; its ranks have their grace before it is said again
        reason = cause.reason if cause else "the generation is replaced"
        fault = cause.fault if cause else ""
        draft = reconcile.stop_draft(ctx.view, ranks, grace_s, reason, fault)
        effect = ctx.emit(ctx.view.generation, draft)
        if effect is not None:
            m.stop_boot_s, m.stop_ranks = m.stop_boot_s or ctx.now.boot_s, ranks
            self.book.note_action(ctx, effect)

    # ------------------------------------------------------------ documents

    def _plan(
        self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...], reason: str
    ) -> None:
        m, view, grant = self.memory, ctx.view, self.memory.grant
        nodes = members.members(
            view, plan, ctx.observed.beats, ctx.observed.store, ctx.now, ctx.settings,
            ctx.since_boot_s,
        )
        # A source that was read and did not prove is not read again: the next one follows.
        distrust = bool(m.cause and m.cause.error.startswith(RESTORE_FAILED))
        sources = tuple(replace(r, parked=None) for r in ranks) if distrust else ranks
        granted = tuple(f"charged:{k}" for k in grant.charged) if grant and ranks else ()
        wanted = planning.PlanView(
            run=m.run, grade=view.grade, leader=ctx.leader, reason=reason, members=nodes,
            highest=max(members.highest_generation(view, m.plan, ctx.observed.beats), m.top),
            nproc=view.nproc, nnodes=view.nnodes, current=plan, ranks=sources,
            commits=view.commits, checkpoint_dir=view.checkpoint_dir,
            snapshot=view.snapshot if ranks and not distrust else None,
            bad_from=m.cause.bad_from if m.cause and ranks else 0,
            quarantined=self.book.quarantined(ctx, plan),
            spent=grant.spent if grant and ranks else (), granted=granted,
            paused=m.paused and bool(ranks),
        )
        made, ctx.reason = planning.plan_run(wanted)
        if made is not None:
            self.document.put(ctx, made, ctx.reason)

    def _finish(self, ctx: Context, plan: Plan | None) -> None:
        """Record the end, then let the launcher leave; a store that is down holds nobody up."""
        m = self.memory
        recorded = plan is None or plan.finished >= 0 or plan is not m.plan
        failed = ctx.outbox.failures(
            plan.generation if plan else 0, f"store/run/{m.run}", "put"
        )
        alone = ctx.settings.single_node
        if not recorded and plan is not None and not failed and (alone or ctx.leader):
            over = msgspec.structs.replace(plan, finished=m.finish_code)
            self.document.put(ctx, over, m.finish_reason)
            return
        if m.left or ctx.outbox.busy(f"store/run/{m.run}"):
            return
        if not recorded and not alone and not failed and not ctx.view.shutdown:
            ctx.reason = "waiting for the leader to record the end"
            return
        if self.logs.holds(ctx):
            ctx.reason = "reading what the ranks wrote, before the run ends"
            return
        draft = reconcile.finish_draft(
            ctx.view, m.finish_code, m.finish_reason, m.finish_fault
        )
        effect = ctx.emit(ctx.view.generation, draft)
        ctx.reason = m.finish_reason
        if effect is not None:
            self.book.close_all(ctx, f"the run is over: {m.finish_reason}")

    def _shutdown(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        """The caller asked the launcher to end: ranks get their grace, then the code says why."""
        m, view = self.memory, ctx.view
        why = view.shutdown or "drained"
        said = f"the run was {why}" + (f": {m.drain}" if m.drain and why == "drained" else "")
        m.shutdown_boot_s = m.shutdown_boot_s or ctx.now.boot_s
        live = [r for r in view.ranks if r.state != "ended"]
        grace_s = ctx.settings.stop_grace_s
        if live and m.stop_boot_s < m.shutdown_boot_s:
            draft = reconcile.stop_draft(view, (), grace_s, said, "", leave=why == "drained")
            if ctx.emit(view.generation, draft) is not None:
                m.stop_boot_s = ctx.now.boot_s
        over = ctx.now.boot_s - m.shutdown_boot_s > grace_s + STOP_WAIT_S
        if live and not over:
            ctx.reason = f"{why}: waiting for the ranks to end"
            return ctx.wake(RECOVERY_STEP_S)
        code = SHUTDOWN_CODES.get(why, policy.INFRASTRUCTURE)
        self._finish_with(code, said)
        return self._finish(ctx, self.document.current(ctx))

    def _housekeeping(self, ctx: Context, plan: Plan | None) -> None:
        m, view = self.memory, ctx.view
        if plan is None:
            return
        stale = None if ctx.settings.single_node else reconcile.stale_draft(plan, view)
        if stale is not None:
            ctx.emit(plan.generation, stale)
        if not ctx.settings.single_node and ctx.leader:
            self._name_spares(ctx, plan)
        if not reconcile.may_delete(plan, view, ctx.leader) or m.recovering:
            return
        paths = reconcile.deletable(
            view.commits, plan.history, view.keep or ctx.settings.keep_checkpoints,
            plan.quarantined,
        )
        new = tuple(p for p in paths if p not in m.deleted)
        if new and ctx.emit(plan.generation, reconcile.delete_draft(plan, view, new)):
            m.deleted = [*m.deleted, *new][-256:]

    def _name_spares(self, ctx: Context, plan: Plan) -> None:
        """A node that came (back) is named, for only who is named may follow a lost leader."""
        if plan is not self.memory.plan or plan.finished >= 0:
            return
        nodes = members.members(
            ctx.view, plan, ctx.observed.beats, ctx.observed.store, ctx.now, ctx.settings,
            ctx.since_boot_s,
        )
        new = [m.node for m in nodes if planning.is_fit(m)]
        new = [n for n in new if n not in (*plan.members, *plan.spares)]
        if new:
            spares = tuple(sorted({*plan.spares, *new}))
            changed = msgspec.structs.replace(plan, spares=spares)
            self.document.put(ctx, changed, f"new spares: {', '.join(new)}")

    def _unknown(self, ctx: Context) -> Verdict:
        return Verdict(
            fault="launcher_lost", subject=f"run/{self.memory.run}", severity=UNKNOWN,
            confidence=0.5, reason="the launcher's connection is gone", run=self.memory.run,
            detector="launcher", generation=ctx.view.generation,
        )


