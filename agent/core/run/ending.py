"""The end of a run: who decided it, how it is recorded, and when the launcher may leave.

Owns RunState.ending.  Why a run ends is found elsewhere (recovery.py, case.py, an operator); here
an end is decided once, recorded in the document, and performed.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import TRAINER, Plan, run_subject
from . import policy
from .incidents import RunIncidents
from .layout import arranged
from .log_questions import LogQuestions
from .plan import slots_of
from .plan_document import QUARANTINE_MAX, Document, world_of
from .state import Context, Ending, RunState

SHUTDOWN_CODES = {"preempted": policy.INFRASTRUCTURE, "interrupted": 130}
STOP_WAIT_S = 2.0  # after an order to stop: the launcher's start ends what is left
LOOK_AGAIN_S = 0.05


class Endings:
    """How one run ends."""

    def __init__(
        self, state: RunState, document: Document, incidents: RunIncidents, logs: LogQuestions
    ) -> None:
        self.state, self.document, self.incidents = state, document, incidents
        self.logs = logs

    def decide(self, code: int, reason: str, fault: str = "", alone: bool = False) -> None:
        """The first decision stands.  `alone`: only this node's launcher leaves."""
        if self.state.finish_code < 0:
            ending = self.state.ending or Ending()
            self.state.ending = replace(
                ending, code=code, reason=reason, fault=fault, alone=alone)

    def settled(self, done: EffectResult) -> None:
        if done.effect.kind == "finish" and done.ok:
            self.state.ending = replace(self.state.ending or Ending(), left=True)

    def forget(self, ctx: Context) -> None:
        """Another launcher came: it has heard of no end, and what its predecessor answered does not
        count."""
        subject = run_subject(self.state.run)
        for effect in ctx.in_flight.of("finish", subject):
            ctx.in_flight.came_true(effect.id)
        ctx.settled[:] = [done for done in ctx.settled
                          if (done.effect.kind, done.effect.subject) != ("finish", subject)]
        self.state.ending = None

    def new_boot(self) -> None:
        if self.state.ending is not None:
            self.state.ending = replace(self.state.ending, shutdown_boot_s=0.0, stop_boot_s=0.0)

    # ------------------------------------------------------------ what is done

    def record(self, ctx: Context, plan: Plan | None) -> bool:
        """Write the end into the document that does not show it; whether this node may."""
        ending = self.state.ending or Ending()
        if plan is None or ending.alone or not self._misses(ctx, plan):
            return False
        if not ctx.settings.single_node and not ctx.leader:
            return False
        ended = replace(plan, finished=ending.code)
        if ending.fault == "checkpoint_bad":
            # Who submits it again reads what was trained and put aside, and begins nothing anew.
            bad = dict.fromkeys((*plan.quarantined, *self.state.document.bad_paths))
            ended = replace(ended, quarantined=tuple(bad)[-QUARANTINE_MAX:],
                            peak=max(plan.peak, self.state.progress.peak_step))
        self.document.put(ctx, ended, ending.reason)
        return True

    def finish(self, ctx: Context, plan: Plan | None) -> None:
        """Record the end, then let the launcher leave; a store that is down holds nobody up."""
        ending = self.state.ending or Ending()
        if self.record(ctx, plan) or ending.left:
            return
        if ctx.in_flight.busy(drafts.document_subject(self.state.run)):
            return
        # Whom the plan does not name leaves by himself: the run goes on without him.
        named = plan is None or ctx.view.node in (*plan.members, *plan.spares)
        shared = named and not (ctx.settings.single_node or ctx.view.shutdown or ending.alone)
        if ctx.settings.store_node and not ctx.observed.store.up:
            shared = False  # nobody may be left to record it
        if shared and self._misses(ctx, plan):
            ctx.reason = "waiting for the leader to record the end"
            return
        if self.logs.holds(ctx):
            ctx.reason = "reading what the ranks wrote, before the run ends"
            return
        draft = drafts.finish(ctx.view, ending.code, ending.reason, ending.fault)
        effect = ctx.emit(ctx.view.generation, draft)
        ctx.reason = ending.reason
        if effect is not None:
            self.incidents.close_all(ctx, f"the run is over: {ending.reason}")

    def shut_down(self, ctx: Context, plan: Plan | None) -> None:
        """The caller asked the launcher to end: ranks get their grace, then the code says why."""
        view, drain, now_s = ctx.view, self.state.held.drain, ctx.now.boot_s
        why = view.shutdown or "drained"
        reason = f"the run was {why}" + (f": {drain}" if drain and why == "drained" else "")
        ending = self.state.ending or Ending()
        ending = replace(ending, shutdown_boot_s=ending.shutdown_boot_s or now_s)
        live = [rank for rank in view.ranks if rank.state != "ended"]
        grace_s = ctx.settings.stop_grace_s
        if live and ending.stop_boot_s < ending.shutdown_boot_s:
            draft = drafts.stop(view, (), grace_s, reason, "", leave=why == "drained")
            if ctx.emit(view.generation, draft) is not None:
                ending = replace(ending, stop_boot_s=now_s)
        self.state.ending = ending
        over = now_s - ending.shutdown_boot_s > grace_s + STOP_WAIT_S
        if live and not over:
            ctx.reason = f"{why}: waiting for the ranks to end"
            return ctx.wake(LOOK_AGAIN_S)
        self.decide(SHUTDOWN_CODES.get(why, policy.INFRASTRUCTURE), reason,
                    alone=self._others_go_on(ctx, plan))
        self.finish(ctx, plan)

    def _others_go_on(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether the run has a world without this node, whose launcher was asked to end and theirs
        were not.  A trainer's alone: a script that is queued again is not started beside what may
        be left of a run whose end nobody recorded, and all its launchers may yet be asked."""
        view = ctx.view
        if not view.shutdown or view.grade != TRAINER or ctx.settings.single_node or plan is None:
            return False
        others = [one for one in ctx.nodes(plan) if one.node != view.node]
        return bool(arranged(world_of(view), others, slots_of(plan))[0])

    def _misses(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether the document in force goes on without this end, and takes a write."""
        if plan is None or plan.finished >= 0 or plan is not self.state.document.plan:
            return False
        subject = drafts.document_subject(self.state.run)
        return not ctx.in_flight.failures(plan.generation, subject, "put")
