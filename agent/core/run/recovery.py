"""The way from a cause to the next generation: what it is granted, and who must stop first.

Owns RunState.recovery and the age of its budgets.  Causes come from causes.py, what a cause may
cost from policy.py; the plan itself is plan_document.py's.
"""

from __future__ import annotations

from functools import partial
from math import ceil

from msgspec.structs import replace

from ..actions import ACTIONS, EXCLUDE_NODE, RUN
from ..detect.ranks.collective import skipped
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..ladder import MAY, Leave
from ..model import OPAQUE, TRAINER, Plan, RankView, rank_subject
from ..nodes import exclusions
from . import members, policy, progress
from .ending import LOOK_AGAIN_S, STOP_WAIT_S, Endings
from .incidents import RunIncidents
from .plan import is_whole
from .state import Budgets, Context, Recovery, RunState

EVIDENCE_WAIT_S = 0.2  # at a verdict, for evidence that is still missing
# ... on another node, of which nothing was asked before: who stands still is known by beats alone.
FAR_EVIDENCE_WAIT_S = 1.0
SAVE_LIMIT_S = 120.0  # ... with a checkpoint
PARK_LIMIT_S, PARK_STEPS = 10.0, 4.0  # for ranks to come to the end of a step
# Until every node has heard of it: a write, its watch, a step of each agent; and how old the word
# of a launcher may be on where its ranks are.
PARK_NOTICE_S = 1.5
# What a silent node adds: the step is to come before they are stopped.
HEARD_LIMIT_S, HEARD_SAVE_S = PARK_LIMIT_S / 2, SAVE_LIMIT_S / 2
# ... for ranks of other nodes that wait as all do, where nobody's state is whole yet: the word to
# leave goes over the links that they may be waiting for.
FAR_PARK_WAIT_S = 5.0
HUNG = "rank_hung"
FAULT_GRACE_S = 1.0  # for the rest of a script's ranks when one of them failed
LIVE = ("starting", "running")


class Recoveries:
    """How one run comes back from a cause."""

    def __init__(self, state: RunState, incidents: RunIncidents, ending: Endings) -> None:
        self.state, self.incidents, self.ending = state, incidents, ending

    def begin(self, cause: Cause, incident: str) -> None:
        self.state.recovery = Recovery(cause, incident)

    def excuse(self, ctx: Context, why: str) -> None:
        """A known condition is the cause of the cause."""
        recovery = self.state.recovery
        if recovery is not None:
            self.state.recovery = replace(recovery, cause=replace(recovery.cause, excused=True))
            self.incidents.note(ctx, recovery.incident, why)

    def planned(self, plan: Plan | None) -> bool:
        """Whether this plan is the first behind the cause: it ends the cause's hold."""
        recovery = self.state.recovery
        if plan is None or recovery is None or recovery.planned:
            return False
        if plan.generation <= recovery.cause.generation:
            return False
        self.state.recovery = replace(recovery, planned=True, grant=None, stop_boot_s=0.0, told=())
        return True

    def give_up(self, why: str) -> None:
        """No nodes came for as long as the run may wait: it is tried again elsewhere."""
        self.ending.decide(policy.INFRASTRUCTURE, why)

    def forget(self) -> None:
        """Another launcher came: nothing of it is broken."""
        self.state.recovery = None

    def new_boot(self) -> None:
        self.state.budgets = Budgets()  # a window whose age is unknown begins anew
        if self.state.recovery is not None:
            self.state.recovery = replace(self.state.recovery, stop_boot_s=0.0, told=())

    def close(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """It is over once every rank has finished a step that was never finished before."""
        recovery = self.state.recovery
        if plan is None or recovery is None or not recovery.planned:
            return
        if not ranks or len(ranks) < len(plan.ranks) or not progress.goes_on(
            ctx, self.state, ranks
        ):
            return
        first_s = progress.went_on_boot_s(ctx, self.state, ranks)
        self.state.recovery = None
        progress.restarted(self.state, first_s)
        self.incidents.recovered(ctx, min(r.step for r in ranks), first_s)

    # ------------------------------------------------------------ what is granted

    def answer(self, ctx: Context, plan: Plan | None) -> None:
        """Grant what the cause asks for, once; what it costs is charged by the next plan."""
        state, recovery = self.state, self.state.recovery
        if recovery is None or recovery.planned or plan is None or not ctx.leader:
            return
        if recovery.grant is not None:
            self._earned_since(ctx, plan, recovery, recovery.grant)
            return
        if state.held.rests or plan.paused:
            ctx.reason = "paused by an operator: the fault is seen and nothing is done"
            return
        since = self._since(ctx, plan)
        state.budgets = Budgets(since)
        now = state.progress
        ended = progress.Life(now.earned_steps, now.moved, now.lasted)
        grant = self._granted(ctx, plan, recovery.cause, since, ended)
        state.recovery = replace(recovery, grant=grant)
        if grant.would:
            self.incidents.would_have(ctx, recovery.incident, grant.would)
        if grant.rung and ACTIONS[grant.rung].scope != RUN:
            ctx.climbed.append((recovery.cause, grant.rung, grant.reason))
        if grant.action == policy.FINISH:
            self.ending.decide(grant.code, grant.reason, grant.fault or recovery.cause.fault)
            if grant.fault:
                self.incidents.open_side(ctx, grant.fault, recovery.cause, grant.reason)

    def _earned_since(
        self, ctx: Context, plan: Plan, recovery: Recovery, grant: policy.Grant
    ) -> None:
        """A generation that is asked to leave trains on until it does, which may be long, and gives
        back what it was charged for the steps and the checkpoint that it leaves.  A command's time
        tells nothing of when it left."""
        if not recovery.cause.parks or grant.charged or grant.action != policy.RESTART \
                or ctx.view.grade == OPAQUE:
            return
        now, later = self.state.progress, progress.life(ctx, self.state, recovery.cause.generation)
        spent = self._spent(ctx, plan, progress.Life(
            now.earned_steps + later.steps, now.moved or later.moved, now.lasted or later.lasted))
        if spent != grant.spent:
            self.state.recovery = replace(recovery, grant=replace(grant, spent=spent))

    def outlook(self, ctx: Context, plan: Plan | None, cause: Cause) -> policy.Grant | None:
        """What such a cause would be granted if it came now; None while another is answered, or
        nothing runs here."""
        if plan is None or self.state.cause is not None or plan.finished >= 0:
            return None
        ends = progress.life(ctx, self.state, plan.generation)
        return self._granted(ctx, plan, cause, self._since(ctx, plan), ends)

    def _granted(
        self, ctx: Context, plan: Plan, cause: Cause, since: dict[str, float], life: progress.Life
    ) -> policy.Grant:
        """What the runbook's ladder comes to for this cause, which ends this life."""
        account = policy.Account(
            self.state.run, ctx.view.max_restarts, self._spent(ctx, plan, life),
            tuple(key for key in since if self._window_over(ctx, key, since[key])),
            trained=self.state.progress.trained, grade=ctx.view.grade,
            quick=self.state.progress.quick > 0,
        )
        beyond = partial(self._beyond, ctx, plan)
        grant = policy.grant(cause, account, ctx.runbooks, ctx.settings, beyond)
        if grant.rung == EXCLUDE_NODE and not ctx.settings.single_node:
            is_open, why = exclusions.held_back(ctx, cause.fault, cause.node, {})
            return policy.unexcluded(grant, why) if is_open else grant
        return grant

    def _beyond(self, ctx: Context, plan: Plan, cause: Cause, action: str) -> tuple[int, Leave]:
        """What the node may do; a leader may exclude a node of its run."""
        if action != EXCLUDE_NODE or ctx.settings.single_node:
            return ctx.beyond(cause, action)
        if cause.node not in {node for _, node in plan.ranks}:
            return 0, Leave(False, reason=f"{action}: no node is named")
        return 0, MAY

    def _spent(
        self, ctx: Context, plan: Plan, life: progress.Life
    ) -> tuple[tuple[str, int], ...]:
        """Budgets, less what this generation earned back by making progress."""
        known = members.known(
            ctx.view, ctx.observed.beats, ctx.now, ctx.settings, self.state.heard.by_folder)
        own = [(c.generation, c.step) for c in known.commits if not c.bad]
        if policy.made_progress(plan, life.steps, max(own, default=None)):
            return policy.cleared(policy.give_back(plan.spent, plan))
        if life.lasted:
            # Redone from where nobody sees: enough to be no loop, no proof that it came further.
            return policy.cleared(policy.give_back(plan.spent, plan, (policy.RESTARTS,)))
        return policy.cleared(plan.spent) if life.moved else plan.spent

    def unexpired(self, ctx: Context, plan: Plan) -> dict[str, int]:
        """What is spent within its window, for what is charged beside a cause."""
        since = self._since(ctx, plan)
        self.state.budgets = Budgets(since)
        return {key: n for key, n in plan.spent
                if key not in since or not self._window_over(ctx, key, since[key])}

    def _since(self, ctx: Context, plan: Plan) -> dict[str, float]:
        """When each budget's window began; one never seen here begins now."""
        known, now_s = self.state.budgets.since, ctx.now.boot_s
        keys = sorted({key for key, _ in plan.spent if "/" in key})
        return {key: known.get(key, now_s) for key in keys}

    def _window_over(self, ctx: Context, key: str, since_s: float) -> bool:
        book = ctx.runbooks.get(key.split("/")[1 if key.startswith("signature/") else 0])
        window_s = (book.budget_window_h if book else 24.0) * 3600.0
        return ctx.now.boot_s - since_s > window_s

    # ------------------------------------------------------------ before the next plan

    def ready(self, ctx: Context, ranks: tuple[RankView, ...]) -> bool:
        """Whether the next generation may be planned; asks for what is missing."""
        recovery = self.state.recovery
        if recovery is None:
            return False
        if self._evidence_missing(ctx, recovery):
            ctx.wake(EVIDENCE_WAIT_S)
            return False
        if recovery.cause.parks and self._parking(ctx, recovery, ranks):
            ctx.reason = "waiting until the ranks have left at the end of their step"
            return False
        if not self.gathered(ctx, ranks):
            ctx.reason = "waiting until the other ranks are parked or ended"
            return False
        return not self._waits(ctx, recovery)

    def doubted(
        self, ctx: Context, plan: Plan, ranks: tuple[RankView, ...], cause: Cause
    ) -> Cause:
        """The cause, with what the pages of parked and ended ranks prove only now: where a
        collective was left out, no state behind it is resumed from, whatever ended the ranks."""
        proof = skipped(ranks, plan.resume.step, ctx.now.boot_s, self.state.progress.bases)
        if proof is None or cause.bad_from or self.state.recovery is None:
            return cause
        said = replace(cause, bad_from=proof.bad_from, reason=f"{cause.reason}; {proof.reason}")
        self.state.recovery = replace(self.state.recovery, cause=said)
        self.incidents.note(ctx, self.state.recovery.incident, proof.reason)
        return said

    def _waits(self, ctx: Context, recovery: Recovery) -> bool:
        """Whether quick failures in a row hold the next start back."""
        now, pause_s = self.state.progress, progress.pause_s(self.state)
        left_s = now.broken_boot_s + pause_s - ctx.now.boot_s
        if not recovery.cause.charged or left_s <= 0:
            return False
        ctx.reason = (f"waiting {pause_s:.1f} s before the next start: {now.quick} generations in "
                      f"a row broke within {progress.QUICK_S:g} s")
        self.incidents.note(ctx, recovery.incident, ctx.reason)
        ctx.wake(left_s)
        return True

    def _evidence_missing(self, ctx: Context, recovery: Recovery) -> bool:
        cause = recovery.cause
        if recovery.stop_boot_s > 0:
            return False
        subject = rank_subject(self.state.run, cause.rank)
        waited_s = ctx.now.boot_s - self.state.progress.broken_boot_s
        far = cause.node not in ("", ctx.view.node)
        limit_s = FAR_EVIDENCE_WAIT_S if far else EVIDENCE_WAIT_S
        return ctx.in_flight.busy(subject, "evidence") and waited_s < limit_s - 1e-6

    def gathered(self, ctx: Context, ranks: tuple[RankView, ...]) -> bool:
        """Every rank is parked or has ended; what stands in the way is ordered to stop."""
        recovery, view = self.state.recovery, ctx.view
        if recovery is None:
            return True
        cause = recovery.cause
        live = [r for r in ranks if r.state in LIVE and r.ended is None]
        mine = [r for r in live if r.node == view.node]
        parked = [r for r in ranks if r.state == "parked" and r.node == view.node]
        if not live and (view.grade == TRAINER or not parked):
            return True
        broken_s = self.state.progress.broken_boot_s
        # Where only victims of a loss have ended, the other ranks park by themselves, and hold the
        # state from which the run resumes.  What another node has does not concern the ranks here:
        # they are told to leave, and with them all others.  So are ranks that worked and now stand
        # still, none of them told apart from the others: who only waits can leave, and who does not
        # come is the one.
        elsewhere = cause.rank < 0 and cause.node not in ("", view.node)
        waiting = (view.grade == TRAINER and cause.fault == HUNG and cause.rank < 0
                   and self.state.progress.moved)
        blind = cause.rank < 0 and cause.fault != "rank_exited" and not elsewhere and not waiting
        park_wait_s = ctx.settings.park_wait_s
        if waiting and len(mine) < len(live) and not _has_left_whole(ranks):
            park_wait_s = max(park_wait_s, FAR_PARK_WAIT_S)
        park_over_s = broken_s + park_wait_s - ctx.now.boot_s
        if view.grade == TRAINER and (elsewhere or waiting) and mine and not recovery.left:
            draft = drafts.stop(view, (), 0.0, cause.reason, cause.fault, park=True)
            left = ctx.emit(view.generation, draft) is not None
            self.state.recovery = recovery = replace(recovery, left=left)
        if view.grade != TRAINER or blind:
            unfit = [*mine, *parked] if view.grade != TRAINER else mine
        else:
            unfit = [r for r in mine if r.rank == cause.rank or park_over_s <= 0]
        stop_boot_s = recovery.stop_boot_s
        if unfit:
            stop_boot_s = self._stop(ctx, recovery, tuple(sorted(r.rank for r in unfit)))
        self._stop_elsewhere(ctx, cause, [
            r for r in live if r.node != view.node
            and (view.grade != TRAINER or waiting or not blind and r.rank == cause.rank)],
            park=waiting)
        ctx.wake(park_over_s if park_over_s > 0 else LOOK_AGAIN_S)
        stop_over = 0 < stop_boot_s < ctx.now.boot_s - STOP_WAIT_S
        return park_over_s <= 0 and (not mine or stop_over)

    def _stop_elsewhere(
        self, ctx: Context, cause: Cause, ranks: list[RankView], park: bool
    ) -> None:
        """Orders ranks of other nodes to stop, or to leave, each node once, and again when they do
        not.

        Nothing waits for it: a plan that comes first ends them as well."""
        recovery, now_s = self.state.recovery, ctx.now.boot_s
        if recovery is None or not ranks:
            return
        grace_s, told = self._grace_s(ctx, cause), dict(recovery.told)
        for node in sorted({rank.node for rank in ranks}):
            if now_s - told.get(node, -1e9) < grace_s + STOP_WAIT_S:
                continue
            theirs = tuple(rank for rank in ranks if rank.node == node)
            draft = drafts.stop_elsewhere(
                self.state.run, theirs, grace_s, cause.reason, cause.fault, park)
            effect = ctx.emit(theirs[0].generation, draft)
            if effect is not None:
                told[node] = now_s
                self.incidents.note_action(ctx, recovery.incident, effect)
        self.state.recovery = replace(self.state.recovery or recovery, told=tuple(told.items()))

    def _parking(
        self, ctx: Context, recovery: Recovery, ranks: tuple[RankView, ...]
    ) -> bool:
        """Whether ranks that nothing ails are still on their way to the end of a step.  The
        document tells every node; ranks that do not come in time are stopped as any others."""
        plan = self.state.document.plan
        if self.park_is_over(ctx) or not any(r.state in LIVE and r.ended is None for r in ranks):
            return False
        if plan is not None and not plan.park:
            why = recovery.cause.reason
            self.ending.document.put(ctx, replace(
                plan, park=why, saves=recovery.cause.saves,
                park_after=self.park_after(ctx, ranks, recovery.cause.saves)), why)
        ctx.wake(LOOK_AGAIN_S)
        return True

    def park_is_over(self, ctx: Context) -> bool:
        """Whether the ranks had their time to leave at the end of a step: who is still there is
        stopped, and the order to leave must not stand in the way of that."""
        recovery = self.state.recovery
        if recovery is None or recovery.planned or not recovery.cause.parks:
            return False
        saves, steps_s = recovery.cause.saves, PARK_STEPS * self.state.history.step_s
        limit_s = max(SAVE_LIMIT_S if saves else PARK_LIMIT_S,
                      PARK_NOTICE_S + (HEARD_SAVE_S if saves else HEARD_LIMIT_S) + steps_s)
        return ctx.now.boot_s - self.state.progress.broken_boot_s > limit_s

    def park_after(self, ctx: Context, ranks: tuple[RankView, ...], saves: bool) -> int:
        """The first step that no rank has ended when the last node hears of it: all ranks leave
        behind the same one, or the checkpoint on the way lacks somebody's part.  A node without
        ranks has none to leave, and one that was lost has not been heard of for long."""
        plan = self.state.document.plan
        nodes = {node for _, node in plan.ranks} if plan else set[str]()
        heard_s = [ctx.now.boot_s - beat.boot_s for beat in ctx.observed.beats
                   if beat.run == self.state.run and beat.node in nodes]
        most_s = HEARD_SAVE_S if saves else HEARD_LIMIT_S
        ahead_s = PARK_NOTICE_S + min(most_s, max(heard_s, default=0.0))
        step_s = self.state.history.step_s
        steps = ceil(ahead_s / step_s) if step_s > 0 else 0
        return max((r.step for r in ranks), default=0) + 2 + steps

    def _grace_s(self, ctx: Context, cause: Cause) -> float:
        if not cause.charged:
            return ctx.settings.stop_grace_s
        if ctx.view.grade == TRAINER:
            return 0.0
        return min(FAULT_GRACE_S, ctx.settings.stop_grace_s)

    def _stop(self, ctx: Context, recovery: Recovery, ranks: tuple[int, ...]) -> float:
        """Orders these ranks to stop; returns when ranks were first ordered to stop for the cause.
        """
        cause, now_s = recovery.cause, ctx.now.boot_s
        grace_s, since_s = self._grace_s(ctx, cause), recovery.stop_boot_s
        again = since_s > 0 and set(ranks) <= set(recovery.stop_ranks)
        if again and now_s - since_s < grace_s + STOP_WAIT_S:
            return since_s  # said once; those still there have their grace before it is said again
        draft = drafts.stop(ctx.view, ranks, grace_s, cause.reason, cause.fault)
        effect = ctx.emit(ctx.view.generation, draft)
        if effect is None:
            return since_s
        self.state.recovery = replace(recovery, stop_boot_s=since_s or now_s, stop_ranks=ranks)
        self.incidents.note_action(ctx, recovery.incident, effect)
        return since_s or now_s


def _has_left_whole(ranks: tuple[RankView, ...]) -> bool:
    """Whether those that left hold every shard of one step."""
    held = [rank.parked for rank in ranks if rank.parked and rank.state == "parked"]
    return any(is_whole(held, one.step) for one in held)
