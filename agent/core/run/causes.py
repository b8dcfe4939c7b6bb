"""Noticing: what the ranks' levels teach, and whether they are a cause to replace the generation.

Owns the order in which detectors are asked and what counts as one cause.  It orders nothing: the
cause it leaves in RunMemory is answered by agent/core/run/case.py.
"""

from __future__ import annotations

import msgspec

from ..detect.ranks import collective, hang, limits
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..model import DEGRADED, TRAINER, UNKNOWN, Plan, RankView, Verdict
from ..nodes import kernel_incidents
from ..series.wait_history import Seen
from . import members, reconcile
from . import plan as planning
from .incidents import Casebook
from .state import Context, RunMemory

LONELY_S = 0.5  # only consequences ended: the root may be a moment late on one node
LONELY_FAR_S = 3.0  # ... and a few beats late on another
BACKOFF_MAX = 64.0
OPERATOR = "operator_request"
BAD_CHECKPOINT = "bad_checkpoint"  # how a trainer's reason begins when it refused one
RESTORE_FAILED = "restore_failed"  # ... or when a snapshot or survivors did not prove


def unproven(reason: str) -> bool:
    """A trainer's word for state that it read and does not believe."""
    return reason.startswith((BAD_CHECKPOINT, RESTORE_FAILED))


class Wish(msgspec.Struct, frozen=True):
    """An operator's restart, waiting to become a cause."""

    reason: str
    rank: int = -1


class Notice:
    """The eyes of one run's case."""

    def __init__(self, memory: RunMemory, book: Casebook) -> None:
        self.memory = memory
        self.book = book
        self.seen: dict[int, Seen] = {}
        self.wish: Wish | None = None
        self.plan_since: tuple[int, float] = (0, 0.0)

    # ------------------------------------------------------------ learning

    def learn(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """Windows, the highest step, kernel lines about our pids; a new plan ends the old cause."""
        m = self.memory
        if plan and m.cause and plan.generation > m.cause.generation:
            m.cause, m.grant, m.stop_boot_s, m.lonely_boot_s = None, None, 0.0, 0.0
            m.restarts += 1
        if plan and self.plan_since[0] != plan.generation:
            self.plan_since = (plan.generation, ctx.now.boot_s)
        for rank in ranks:
            if rank.step > m.peak_step:
                m.peak_step = rank.step
                m.peak_boot_s = ctx.now.boot_s - rank.still_s
        pids = tuple(r.pid for r in ctx.view.ranks)
        m.oom_pids = [*m.oom_pids, *ends.oom_pids(ctx.observed.lines, pids)][-64:]
        if not ctx.frozen:
            m.history.look(ranks, self.seen, ctx.now.boot_s)
        if plan is not None and m.bases_generation != plan.generation:
            # The trainer's pages count from the end of its restore; a script's must be learnt.
            m.bases = {} if ctx.view.grade == TRAINER else None
            m.bases_generation = plan.generation
        if ctx.view.grade != TRAINER and (m.bases is None or not collective.advance(ranks)):
            m.bases = collective.learn_bases(ranks)

    # ------------------------------------------------------------ detecting

    def detect(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        m = self.memory
        over = m.finish_code >= 0 or bool(ctx.view.shutdown) or bool(m.drain)
        if m.cause is not None:
            ctx.verdicts.append(ends.verdict_of(m.cause, m.run))
            return
        if plan is None or plan.finished >= 0 or over or not ctx.leader:
            return
        cause = self._from_members(ctx, plan) or self._from_wish(plan, ranks)
        cause = cause or self._from_ends(ctx, ranks) or self._from_kernel(ctx, plan)
        if cause is not None:
            return self._set(ctx, cause)
        if ranks and not ctx.frozen and not self._anything_bad(ranks):
            self._from_stillness(ctx, plan, ranks)

    def _anything_bad(self, ranks: tuple[RankView, ...]) -> bool:
        """A bad end is being looked into: nobody is suspected of standing still meanwhile."""
        return bool(ends.failed_ranks(ranks))

    def _set(self, ctx: Context, cause: Cause, by_cost: bool = False) -> None:
        m = self.memory
        m.cause, m.grant, m.cause_boot_s = cause, None, ctx.now.boot_s
        m.earned_steps = m.peak_step - m.base_step
        m.base_step, m.stop_boot_s, m.lonely_boot_s = m.peak_step, 0.0, 0.0
        m.recovering = True
        if by_cost:
            # A slow step that was cut short would be slow again: the next wait there is longer.
            again = m.backoff_step == cause.step
            m.backoff = min(BACKOFF_MAX, m.backoff * 2) if again else 2.0
            m.backoff_step = cause.step
        ctx.verdicts.append(ends.verdict_of(cause, m.run))
        self.book.open_cause(ctx, cause)

    # ------------------------------------------------------------ sources of causes

    def _from_ends(self, ctx: Context, ranks: tuple[RankView, ...]) -> Cause | None:
        m = self.memory
        failed = ends.failed_ranks(ranks)
        if not failed:
            return self._from_leftovers(ctx, ranks)
        rank, is_root = ends.first_root(failed)
        if rank is None:
            return None
        if is_root:
            return ends.cause_of(rank, len(failed) - 1, tuple(m.oom_pids))
        proven = collective.proofs(ranks, self._resumed(), ctx.now.boot_s, m.bases)
        if proven is not None:
            return proven
        m.lonely_boot_s = m.lonely_boot_s or ctx.now.boot_s
        settle_s = LONELY_S if ctx.settings.single_node else LONELY_FAR_S
        left_s = m.lonely_boot_s + settle_s - ctx.now.boot_s
        # All have ended: nobody is left whose end could still explain it.
        if left_s > 0 and any(r.ended is None for r in ranks):
            ctx.wake(left_s)
            return None
        return ends.victims_only(rank, len(failed) - 1, tuple(m.oom_pids))

    def _from_leftovers(self, ctx: Context, ranks: tuple[RankView, ...]) -> Cause | None:
        """Nobody ended badly by itself, yet the generation cannot go on."""
        orphans = [r for r in ranks if r.ended and r.ended.by_us]
        if orphans:
            rank = orphans[0]
            base = ends.cause_of(rank, 0, ())
            reason = f"rank {rank.rank} was ended on an order whose reason is not known any more"
            return msgspec.structs.replace(base, fault="rank_killed", user=False, reason=reason)
        parked = [r for r in ranks if r.parked and r.ended is None]
        if not parked or any(r.state in ("starting", "running") for r in ranks):
            return None
        proven = collective.proofs(ranks, self._resumed(), ctx.now.boot_s, self.memory.bases)
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

    def _from_wish(self, plan: Plan, ranks: tuple[RankView, ...]) -> Cause | None:
        wish, self.wish = self.wish, None
        if wish is None or not ranks:
            return None
        rank = next((r for r in ranks if r.rank == wish.rank), None)
        return Cause(
            fault=OPERATOR, generation=plan.generation, reason=wish.reason, charged=False,
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
            gone = generation < plan.generation <= self.memory.top
        else:
            beats = [b for b in ctx.observed.beats if (b.node, b.run) == (member.node, plan.run)]
            generation = beats[0].generation if beats else plan.generation
            since_s = ctx.now.boot_s - self.plan_since[1]
            late = since_s > members.LOST_LEASES * ctx.settings.lease_s
            gone = member.fresh and generation < plan.generation and late
        return ("launcher_lost", "its launcher runs no rank of the plan") if gone else ("", "")

    # ------------------------------------------------------------ stillness

    def _from_stillness(self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...]) -> None:
        m = self.memory
        shown = tuple(self._with_where(r) for r in ranks)
        view = hang.HangView(
            run=m.run, ranks=shown, costs=self._costs(ctx, plan, ranks),
            boot_s=ctx.now.boot_s, resumed_step=plan.resume.step, bases=m.bases,
        )
        look = hang.look(view, m.history, ctx.settings)
        ctx.wake(look.wake_s)
        acting = [f for f in look.findings if f.act]
        observe = "hang" not in ctx.settings.act
        held_back = observe or m.paused or plan.paused
        for number in look.evidence:
            self._ask_evidence(ctx, ranks, number)
        if acting and not held_back:
            self._ask_evidence(ctx, ranks, acting[0].cause.rank)
            return self._set(ctx, acting[0].cause, by_cost=not acting[0].proof)
        if not look.findings:
            return self.book.take_back(ctx, "it moves again")
        found = look.findings[0]
        would = "ended the rank and gone on without it" if found.act and observe else ""
        ctx.verdicts.append(ends.verdict_of(found.cause, m.run, act=False))
        self.book.suspect(ctx, found.cause, would)

    def _with_where(self, rank: RankView) -> RankView:
        where = self.memory.evidence.get(f"{rank.generation}/{rank.rank}/{rank.step}", "")
        return msgspec.structs.replace(rank, where=rank.where or where)

    def _ask_evidence(self, ctx: Context, ranks: tuple[RankView, ...], number: int) -> None:
        """Once a suspicion and rank; only this node's own can be looked at from here."""
        m = self.memory
        rank = next((r for r in ranks if r.rank == number and r.node == ctx.view.node), None)
        if rank is None or rank.state not in ("starting", "running"):
            return
        key = f"{rank.generation}/{rank.rank}/{rank.step}"
        if key in m.evidence:
            return
        draft = reconcile.evidence_draft(ctx.view, rank, "it stands still")
        if ctx.emit(rank.generation, draft) is not None:
            m.evidence[key] = ""

    def _costs(
        self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...]
    ) -> limits.Costs:
        m, view = self.memory, ctx.view
        held = [plan.resume.step]
        held += [c.step for c in view.commits if not c.bad]
        held += [view.snapshot.step] if view.snapshot else []
        alone = view.grade != TRAINER or len(ranks) < 2
        return limits.Costs(
            grade=view.grade, startup_s=view.startup_s, hang_limit_s=view.hang_limit_s,
            steps_to_redo=max(0, m.peak_step - max(held)) if alone else 0,
            compiling=view.compiling, started=m.peak_step > 0,
            backoff=m.backoff if m.peak_step <= m.backoff_step + 1 else 1.0,
        )

    # ------------------------------------------------------------ within

    def _resumed(self) -> int:
        return self.memory.plan.resume.step if self.memory.plan else 0

    def _host_unknown(self, node: str, plan: Plan) -> Verdict:
        return Verdict(
            fault="host_unknown", subject=f"node/{node}", severity=UNKNOWN, confidence=0.5,
            reason=f"{node} was not heard of lately", run=plan.run, detector="members",
            generation=plan.generation,
        )
