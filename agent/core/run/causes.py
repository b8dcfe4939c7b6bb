"""Whether what the ranks' levels show is a cause to replace the generation.

Owns when the detectors of a run are asked, what becomes of their word, and RunState.suspects.  It
orders nothing but evidence: what a cause is answered with is decided in recovery.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from ..detect import registry
from ..detect.detector import Look, RanksView
from ..detect.ranks import compiling, known_causes
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import WARN, Condition, Plan, RankView, TakeEvidence
from ..series.wait_history import Seen
from . import alerts, members, policy, progress
from .incidents import RunIncidents, Where, read_where
from .operator import Operator
from .recovery import Recoveries
from .state import Context, RunState, Suspects, Suspension

THAW_S = 1.5  # after a suspension, until pages prove anything again
EXPLAINED_S = 30.0  # after a known cause of a wait is gone: a server's clients take their time
EVIDENCE_KEPT = 64


class Causes:
    """What is found out about one run's ranks."""

    def __init__(
        self, state: RunState, incidents: RunIncidents, recovery: Recoveries, operator: Operator
    ) -> None:
        self.state, self.incidents = state, incidents
        self.recovery, self.operator = recovery, operator
        self.detectors = registry.of_run()
        # The look before this one.  No memory: written down with every step it would be a row for
        # each of thousands of ranks, and without it one wait goes unmeasured.
        self.seen: dict[int, Seen] = {}

    # ------------------------------------------------------------ learning

    def learn(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        """What the levels teach before anything is judged; a new plan ends the old cause."""
        if self.recovery.planned(plan):
            self._lonely_since(0.0)
        progress.learn(ctx, self.state, plan, ranks, self.seen)

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """Where a rank stands, as the evidence child saw it."""
        body = done.effect.body
        if done.effect.kind != "evidence" or not isinstance(body, TakeEvidence):
            return
        shown = self._shown(ctx, body)
        step = next((r.step for r in shown if r.rank == body.rank), 0)
        found = read_where(done.detail) if done.ok else Where()
        key = f"{body.generation}/{body.rank}/{step}"
        if key not in self.state.suspects.where:
            return  # it was looked at while it moved, or for somebody else: not where it stands
        self._stands(key, found.where)
        wait = known_causes.Wait(found.wchan, found.path, found.open)
        waits = {**self.state.suspects.waits, key: wait}
        self.state.suspects = replace(
            self.state.suspects, waits=dict(list(waits.items())[-EVIDENCE_KEPT:]))

    def _shown(self, ctx: Context, body: TakeEvidence) -> tuple[RankView, ...]:
        """The ranks of the node that was asked, as it shows them."""
        if not body.node:
            return ctx.view.ranks
        beats = tuple(one for one in ctx.observed.beats if one.node == body.node)
        return members.ranks_of(ctx.view, body.generation, beats, ctx.now, ctx.settings)

    def new_boot(self) -> None:
        """Another boot's seconds mean nothing here: they may be far ahead of this one's."""
        was = self.state.suspects
        self.state.suspects = Suspects(waits=was.waits, where=was.where)

    def _lonely_since(self, boot_s: float) -> None:
        self.state.suspects = replace(self.state.suspects, lonely_boot_s=boot_s)

    def _stands(self, key: str, where: str) -> None:
        kept = {**self.state.suspects.where, key: where}
        kept = dict(list(kept.items())[-EVIDENCE_KEPT:])
        self.state.suspects = replace(self.state.suspects, where=kept)

    def see_suspension(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        """Whether the run was stopped from outside: that is shown, is no fault, and teaches
        nothing.  Of a run that ends, or whose launcher is not here, it is not asked."""
        suspects, ends_now = self.state.suspects, self._ends(ctx)
        asked = ctx.view.connected and not ends_now
        launchers = members.stopped_launchers(
            ctx.view, ctx.observed.beats, ctx.observed.store, ctx.now, ctx.settings)
        why = known_causes.suspended(ctx.view, ranks, launchers) if asked else ""
        if why:
            was, now_s = suspects.suspension, ctx.now.boot_s
            self.state.suspects = replace(suspects, suspended_boot_s=now_s, suspension=Suspension(
                was.since_boot_s if was is not None else now_s, why))
            self.seen.clear()
            ctx.reason = f"suspended: {why}; nothing is done until it goes on"
        elif suspects.suspension is not None:
            self.state.suspects = replace(suspects, suspension=None)
        # For a moment after a suspension the pages still show ranks that stand still.
        if asked and ctx.now.boot_s - self.state.suspects.suspended_boot_s < THAW_S:
            ctx.frozen = True

    def _ends(self, ctx: Context) -> bool:
        wanted = bool(ctx.view.shutdown or self.state.held.drain)
        return wanted or self.state.finish_code >= 0

    # ------------------------------------------------------------ detecting

    def detect(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        state, cause = self.state, self.state.cause
        asked = alerts.pending(ctx, state, plan, partial(self.recovery.outlook, ctx, plan))
        if cause is not None:
            ctx.verdicts.append(ends.verdict_of(cause, state.run))
            return
        if not ctx.leader:
            self.operator.restart = None  # now or never, and who leads was not asked
            for detector in self.detectors:
                self.incidents.close_of(ctx, detector.name, "another node leads the run")
        if plan is None or plan.finished >= 0 or self._ends(ctx) or not ctx.leader:
            return
        view = RanksView(
            state, ctx.view, plan, max(state.progress.began_boot_s, ctx.since_boot_s),
            self._with_where(ranks), ctx.now, ctx.observed, ctx.settings,
            ctx.runbooks, ctx.since_boot_s, ctx.frozen, ctx.causes, self.operator.restart, asked,
            ctx.nodes(plan),
        )
        self._ask(ctx, view)

    def _ask(self, ctx: Context, view: RanksView) -> None:
        """The detectors in the order of their table, until one finds a cause.  A bug of ours in
        one leaves the run unjudged (node.py): the next would judge without knowing what it knew."""
        doubt = Look()
        for detector in self.detectors:
            look = self._waited_out(ctx, view.ranks, detector.look(view))
            ctx.verdicts.extend(look.verdicts)
            ctx.reason = look.reason or ctx.reason
            ctx.wake(look.wake_s)
            self._ticket(ctx, detector.name, look)
            if look.growth is not None and look.growth != self.state.suspects.growth:
                self.state.suspects = replace(self.state.suspects, growth=look.growth)
            if look.heard:
                self.operator.restart = None
            if look.lonely:
                self._lonely_since(self.state.suspects.lonely_boot_s or ctx.now.boot_s)
            for number in look.evidence:
                self._ask_evidence(ctx, view.ranks, number)
            if look.ends:
                return self.recovery.give_up(look.ends)
            if look.cause is not None:
                return self._begin(ctx, view.ranks, look.cause, look.by_cost)
            if look.suspicion is not None or look.moves:
                doubt = look
        told = compiling.compiling(
            self._compiling(ctx), view.ranks, view.plan.resume.step, ctx.conditions)
        if told is not None:
            doubt = Look(suspicion=told[0], would_have=told[1])
        if doubt.suspicion is not None:
            ctx.verdicts.append(ends.verdict_of(doubt.suspicion, self.state.run, act=False))
            self.incidents.suspect(ctx, doubt.suspicion, doubt.would_have)
        elif doubt.moves:
            self.incidents.take_back(ctx, "it moves again")

    def _compiling(self, ctx: Context) -> tuple[str, ...]:
        return members.compiling(ctx.view, ctx.observed.beats, ctx.now, ctx.settings)

    def _ticket(self, ctx: Context, detector: str, look: Look) -> None:
        """Kept as a note while the detector says so, once for a fault."""
        if look.ticket is not None:
            self.incidents.keep(ctx, look.ticket)
        elif look.clears:
            self.incidents.close_of(ctx, detector, look.clears)

    def _waited_out(self, ctx: Context, ranks: tuple[RankView, ...], look: Look) -> Look:
        """The look without its cause where a known condition explains the stillness, or did a
        moment ago: such a wait is waited out.  A limit of the user's own is no cost to weigh."""
        blamed = look.cause if look.by_cost else look.suspicion
        if blamed is None:
            return look
        suspects = self.state.suspects
        them = [rank for rank in ranks if blamed.rank in (-1, rank.rank)]
        found = compiling.lock_left(ctx.conditions, self._compiling(ctx)) or self._waits_for(
            ctx, ctx.conditions, them, len({rank.node for rank in ranks}))
        if found is not None:
            self.state.suspects = replace(suspects, explained_boot_s=ctx.now.boot_s)
        elif ctx.now.boot_s - suspects.explained_boot_s >= EXPLAINED_S:
            return look
        known = found.reason if found is not None else "what it waited for was mended just now"
        if ctx.view.hang_limit_s > 0:
            known += f"; the run's own limit of {ctx.view.hang_limit_s:g} s holds all the same"
        return look._replace(cause=None, suspicion=replace(blamed, severity=WARN),
                             would_have=f"waits, and no restart is spent: {known}")

    def holds(self, ctx: Context, ranks: tuple[RankView, ...]) -> bool:
        """Whether what ended the generation stands on: the next would end of it too.  That is
        waited for, and costs no restart."""
        recovery = self.state.recovery
        if recovery is None or recovery.planned or recovery.grant is not None or not ctx.leader:
            return False
        cause = recovery.cause
        # A card or a switch that is lost is another matter: another node may do without it.
        storage = tuple(one for one in ctx.conditions if one.fault in known_causes.STORAGE)
        found = known_causes.explains_end(
            storage, cause.node, cause.error, ctx.view.checkpoint_dir
        ) or self._waits_for(ctx, storage, ranks, 1)
        if found is None or cause.detector != ends.DETECTOR:
            return False  # nothing ended by itself: a limit of the user's own, a person's wish
        ctx.reason = f"waits with the next start, and no restart is spent: {found.reason}"
        if not cause.excused:
            self.recovery.excuse(ctx, ctx.reason)
        return True

    def _waits_for(
        self, ctx: Context, found: tuple[Condition, ...], ranks: Iterable[RankView], nodes: int
    ) -> Condition | None:
        """The one of these conditions that one of these ranks waits for."""
        waits = self.state.suspects.waits
        waiting = [(r, waits.get(f"{r.generation}/{r.rank}/{r.step}", known_causes.Wait()))
                   for r in ranks]
        return known_causes.explains(found, waiting, ctx.view.checkpoint_dir, nodes)

    def _begin(
        self, ctx: Context, ranks: tuple[RankView, ...], cause: Cause, by_cost: bool = False
    ) -> None:
        progress.broken_off(ctx, self.state, cause, by_cost)
        self._lonely_since(0.0)
        ctx.verdicts.append(ends.verdict_of(cause, self.state.run))
        self.recovery.begin(cause, self.incidents.open_cause(ctx, cause))
        if cause.charged and policy.wants_evidence(ctx.runbooks, cause.fault):
            elsewhere = [rank for rank in ranks if rank.node != ctx.view.node]
            self._ask_evidence(ctx, (*ctx.view.ranks, *elsewhere), cause.rank)

    def _with_where(self, ranks: tuple[RankView, ...]) -> tuple[RankView, ...]:
        """With where each stands, of those at which evidence was looked."""
        found = self.state.suspects.where
        if not any(found.values()):
            return ranks
        places = [found.get(f"{rank.generation}/{rank.rank}/{rank.step}", "") for rank in ranks]
        return tuple(replace(rank, where=where) if where and not rank.where else rank
                     for rank, where in zip(ranks, places, strict=True))

    def _ask_evidence(self, ctx: Context, ranks: tuple[RankView, ...], number: int) -> None:
        """Asks once for each suspicion and rank, on the node where the rank is."""
        rank = next((r for r in ranks if r.rank == number), None)
        if rank is None or rank.state not in ("starting", "running"):
            return
        key = f"{rank.generation}/{rank.rank}/{rank.step}"
        if key in self.state.suspects.where:
            return
        draft = drafts.evidence(ctx.view, rank, "it stands still")
        if ctx.emit(rank.generation, draft) is not None:
            self._stands(key, "")
