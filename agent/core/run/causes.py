"""Whether what the ranks' levels show is a cause to replace the generation.

Owns the order in which detectors are asked, what counts as one cause, and RunState.suspects.  It
orders nothing but evidence: what a cause is answered with is decided in recovery.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..detect.ranks import collective, hang, limits
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import DEGRADED, TRAINER, UNKNOWN, Plan, RankView, TakeEvidence, Verdict
from ..nodes import kernel_incidents
from ..series.wait_history import Seen
from . import members, policy, progress
from . import plan as planning
from .incidents import RunIncidents, Where, read_where
from .operator import Operator
from .plan_document import RESTORE_FAILED
from .recovery import Recoveries
from .state import Context, RunState

LONELY_S = 0.5  # only consequences ended: the root may be a moment late on one node
LONELY_FAR_S = 3.0  # ... and a few beats late on another
EVIDENCE_KEPT = 64
OPERATOR = "operator_request"
BAD_CHECKPOINT = "bad_checkpoint"  # how a trainer's reason begins when it refused one


def unproven(reason: str) -> bool:
    """A trainer's word for state that it read and does not believe."""
    return reason.startswith((BAD_CHECKPOINT, RESTORE_FAILED))


class Causes:
    """What is found out about one run's ranks."""

    def __init__(
        self, state: RunState, incidents: RunIncidents, recovery: Recoveries, operator: Operator
    ) -> None:
        self.state, self.incidents = state, incidents
        self.recovery, self.operator = recovery, operator
        self.seen: dict[int, Seen] = {}
        self.plan_since: tuple[int, float] = (0, 0.0)

    # ------------------------------------------------------------ learning

    def learn(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """What the levels teach before anything is judged; a new plan ends the old cause."""
        if self.recovery.planned(plan):
            self._lonely_since(0.0)
        if plan and self.plan_since[0] != plan.generation:
            self.plan_since = (plan.generation, ctx.now.boot_s)
        progress.learn(ctx, self.state, plan, ranks, self.seen)

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """Where a rank stands, as the evidence child saw it."""
        body = done.effect.body
        if done.effect.kind != "evidence" or not isinstance(body, TakeEvidence):
            return
        step = next((r.step for r in ctx.view.ranks if r.rank == body.rank), 0)
        found = read_where(done.detail) if done.ok else Where()
        self._stands(f"{body.generation}/{body.rank}/{step}", found.where)

    def new_boot(self) -> None:
        self._lonely_since(0.0)

    def _lonely_since(self, boot_s: float) -> None:
        self.state.suspects = replace(self.state.suspects, lonely_boot_s=boot_s)

    def _stands(self, key: str, where: str) -> None:
        kept = {**self.state.suspects.where, key: where}
        kept = dict(list(kept.items())[-EVIDENCE_KEPT:])
        self.state.suspects = replace(self.state.suspects, where=kept)

    # ------------------------------------------------------------ detecting

    def detect(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        state, cause = self.state, self.state.cause
        over = state.finish_code >= 0 or bool(ctx.view.shutdown) or bool(state.held.drain)
        if cause is not None:
            ctx.verdicts.append(ends.verdict_of(cause, state.run))
            return
        if plan is None or plan.finished >= 0 or over or not ctx.leader:
            return
        cause = self._from_members(ctx, plan) or self._from_operator(plan, ranks)
        cause = cause or self._from_ends(ctx, ranks) or self._from_kernel(ctx, plan)
        if cause is not None:
            return self._begin(ctx, cause)
        if ranks and not ctx.frozen and not self._anything_bad(ranks):
            self._from_stillness(ctx, plan, ranks)

    def _anything_bad(self, ranks: tuple[RankView, ...]) -> bool:
        """A bad end is being looked into: nobody is suspected of standing still meanwhile."""
        return bool(ends.failed_ranks(ranks))

    def _begin(self, ctx: Context, cause: Cause, by_cost: bool = False) -> None:
        progress.broken_off(self.state, cause, by_cost, ctx.now.boot_s)
        self._lonely_since(0.0)
        ctx.verdicts.append(ends.verdict_of(cause, self.state.run))
        self.recovery.begin(cause, self.incidents.open_cause(ctx, cause))
        if cause.charged and policy.wants_evidence(ctx.runbooks, cause.fault):
            self._ask_evidence(ctx, ctx.view.ranks, cause.rank)

    # ------------------------------------------------------------ sources of causes

    def _from_ends(self, ctx: Context, ranks: tuple[RankView, ...]) -> Cause | None:
        now = self.state.progress
        failed = ends.failed_ranks(ranks)
        if not failed:
            return self._from_leftovers(ctx, ranks)
        rank, is_root = ends.first_root(failed)
        if rank is None:
            return None
        if is_root:
            return ends.cause_of(rank, len(failed) - 1, now.oom_pids)
        proven = collective.proofs(ranks, self._resumed(), ctx.now.boot_s, now.bases)
        if proven is not None:
            return proven
        self._lonely_since(self.state.suspects.lonely_boot_s or ctx.now.boot_s)
        settle_s = LONELY_S if ctx.settings.single_node else LONELY_FAR_S
        left_s = self.state.suspects.lonely_boot_s + settle_s - ctx.now.boot_s
        # All have ended: nobody is left whose end could still explain it.
        if left_s > 0 and any(r.ended is None for r in ranks):
            ctx.wake(left_s)
            return None
        return ends.victims_only(rank, len(failed) - 1, now.oom_pids)

    def _from_leftovers(self, ctx: Context, ranks: tuple[RankView, ...]) -> Cause | None:
        """Nobody ended badly by itself, yet the generation cannot go on."""
        orphans = [r for r in ranks if r.ended and r.ended.by_us]
        if orphans:
            rank = orphans[0]
            base = ends.cause_of(rank, 0, ())
            reason = f"rank {rank.rank} was ended on an order whose reason is not known any more"
            return replace(base, fault="rank_killed", user=False, reason=reason)
        parked = [r for r in ranks if r.parked and r.ended is None]
        if not parked or any(r.state in ("starting", "running") for r in ranks):
            return None
        bases = self.state.progress.bases
        proven = collective.proofs(ranks, self._resumed(), ctx.now.boot_s, bases)
        if proven is not None:
            return proven
        refused = next((r for r in parked if r.parked and unproven(r.parked.reason)), None)
        if refused is not None and refused.parked is not None:
            return Cause(
                fault="checkpoint_bad", generation=refused.generation, step=refused.step,
                severity=DEGRADED, reason=f"state did not prove: {refused.parked.reason}",
                boot_s=ctx.now.boot_s, detector="ended", error=refused.parked.reason,
            )
        said = next((r.parked.reason for r in parked if r.parked and r.parked.reason), "no reason")
        return Cause(
            fault="rank_hung", generation=parked[0].generation, step=parked[0].step,
            reason=f"culprit unknown: every rank left a broken collective ({said})",
            boot_s=ctx.now.boot_s, detector="ended", confidence=0.5, error=said,
        )

    def _from_operator(self, plan: Plan, ranks: tuple[RankView, ...]) -> Cause | None:
        request = self.operator.take_restart()
        if request is None or not ranks:
            return None
        rank = next((r for r in ranks if r.rank == request.rank), None)
        return Cause(
            fault=OPERATOR, generation=plan.generation, reason=request.reason, charged=False,
            rank=rank.rank if rank else -1, node=rank.node if rank else "",
            pid=rank.pid if rank else 0, severity="warn", detector="operator",
        )

    def _from_kernel(self, ctx: Context, plan: Plan) -> Cause | None:
        """Hardware under a rank of ours broke, and the rank does not know it yet."""
        if kernel_incidents.DETECTOR not in ctx.settings.act:
            return None
        return kernel_incidents.cause_of(ctx.causes, ctx.view.ranks, plan.generation)

    def _from_members(self, ctx: Context, plan: Plan) -> Cause | None:
        """A node that may not or cannot carry its ranks any more."""
        view = ctx.view
        nodes = members.members(
            view, plan, ctx.observed.beats, ctx.observed.store, ctx.now, ctx.settings,
            ctx.since_boot_s,
        )
        placed = {node for _, node in plan.ranks}
        for member in nodes:
            if member.node not in placed:
                continue
            if not member.fresh and not member.lost:
                ctx.verdicts.append(self._host_unknown(member.node, plan))
            fault, why = self._member_fault(ctx, plan, member)
            if not fault:
                continue
            wanted = planning.PlanView(
                run=view.run, grade=view.grade, leader=True, highest=plan.generation,
                nproc=view.nproc, nnodes=view.nnodes, reason="", members=nodes, current=plan,
            )
            if member.lost and not planning.layout(wanted)[0]:
                ctx.reason = f"{member.node} is lost and no spare can take its ranks"
                continue
            return Cause(
                fault=fault, generation=plan.generation, reason=f"{member.node}: {why}",
                node=member.node, boot_s=ctx.now.boot_s, detector="ended",
                charged=not member.excluded,
            )
        return None

    def _member_fault(
        self, ctx: Context, plan: Plan, member: planning.Member
    ) -> tuple[str, str]:
        if member.fatal:
            return member.fatal, f"fatal fault {member.fatal}"
        if ctx.settings.single_node:
            return "", ""
        if member.excluded:
            return OPERATOR, "excluded from runs"
        if member.lost:
            return "host_unknown", "not heard of for longer than the lease and its margin"
        if member.node == ctx.view.node:
            generation = ctx.view.generation
            absent = generation < plan.generation <= self.state.launcher.top
        else:
            beats = [b for b in ctx.observed.beats if (b.node, b.run) == (member.node, plan.run)]
            generation = beats[0].generation if beats else plan.generation
            since_s = ctx.now.boot_s - self.plan_since[1]
            late = since_s > members.LOST_LEASES * ctx.settings.lease_s
            absent = member.fresh and generation < plan.generation and late
        return ("launcher_lost", "its launcher runs no rank of the plan") if absent else ("", "")

    # ------------------------------------------------------------ stillness

    def _from_stillness(self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...]) -> None:
        state = self.state
        placed = tuple(self._with_where(r) for r in ranks)
        view = hang.HangView(
            run=state.run, ranks=placed, costs=self._costs(ctx, plan, ranks),
            boot_s=ctx.now.boot_s, resumed_step=plan.resume.step, bases=state.progress.bases,
        )
        look = hang.look(view, state.history, ctx.settings)
        ctx.wake(look.wake_s)
        acting = [f for f in look.findings if f.act]
        observe = "hang" not in ctx.settings.act
        held_back = observe or state.held.paused or plan.paused
        faults = [found.cause.fault for found in look.findings] or ["rank_stopped"]
        if policy.wants_evidence(ctx.runbooks, faults[0]):
            for number in (*look.evidence, *(found.cause.rank for found in acting)):
                self._ask_evidence(ctx, ranks, number)
        if acting and not held_back:
            return self._begin(ctx, acting[0].cause, by_cost=not acting[0].proof)
        if not look.findings:
            return self.incidents.take_back(ctx, "it moves again")
        found = look.findings[0]
        would = "ended the rank and gone on without it" if found.act and observe else ""
        ctx.verdicts.append(ends.verdict_of(found.cause, state.run, act=False))
        self.incidents.suspect(ctx, found.cause, would)

    def _with_where(self, rank: RankView) -> RankView:
        where = self.state.suspects.where.get(f"{rank.generation}/{rank.rank}/{rank.step}", "")
        return replace(rank, where=rank.where or where)

    def _ask_evidence(self, ctx: Context, ranks: tuple[RankView, ...], number: int) -> None:
        """Once a suspicion and rank; only this node's own can be looked at from here."""
        rank = next((r for r in ranks if r.rank == number and r.node == ctx.view.node), None)
        if rank is None or rank.state not in ("starting", "running"):
            return
        key = f"{rank.generation}/{rank.rank}/{rank.step}"
        if key in self.state.suspects.where:
            return
        draft = drafts.evidence(ctx.view, rank, "it stands still")
        if ctx.emit(rank.generation, draft) is not None:
            self._stands(key, "")

    def _costs(
        self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...]
    ) -> limits.Costs:
        now, view = self.state.progress, ctx.view
        held = [plan.resume.step]
        held += [c.step for c in view.commits if not c.bad]
        held += [view.snapshot.step] if view.snapshot else []
        alone = view.grade != TRAINER or len(ranks) < 2
        return limits.Costs(
            grade=view.grade, startup_s=view.startup_s, hang_limit_s=view.hang_limit_s,
            steps_to_redo=max(0, now.peak_step - max(held)) if alone else 0,
            compiling=view.compiling, started=now.peak_step > 0,
            backoff=now.backoff if now.peak_step <= now.backoff_step + 1 else 1.0,
        )

    # ------------------------------------------------------------ within

    def _resumed(self) -> int:
        plan = self.state.document.plan
        return plan.resume.step if plan is not None else 0

    def _host_unknown(self, node: str, plan: Plan) -> Verdict:
        return Verdict(
            fault="host_unknown", subject=f"node/{node}", severity=UNKNOWN, confidence=0.5,
            reason=f"{node} was not heard of lately", run=plan.run, detector="members",
            generation=plan.generation,
        )
