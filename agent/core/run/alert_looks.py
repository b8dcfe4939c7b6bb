"""The ranks of a run that an alert has looked at: a runbook whose ladder asks for evidence alone.

Owns the notes that such alerts open.  The leader of the run has it done; the budget is the
document's, so that a new leader inherits it, and what he did not charge himself he does not do.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..actions import TAKE_EVIDENCE
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..model import Alert, Answer, Plan, RankView, Runbook, run_subject
from . import policy
from .alerts import DETECTOR, LOOKED, STORM_S, is_of_run, said, wants_look
from .incidents import RunIncidents
from .plan_document import Document
from .recovery import LIVE, Recoveries
from .state import Context, RunState

LOOKS_MAX = 16  # ranks that are looked at for one alert
CHARGED_MAX = 16


class AlertLooks:
    """Answers the alerts of one run that want its ranks looked at."""

    def __init__(self, state: RunState, incidents: RunIncidents, document: Document,
                 recovery: Recoveries) -> None:
        self.state, self.incidents = state, incidents
        self.document, self.recovery = document, recovery
        # Written by this agent and not seen in force yet; of a write that was refused, never.
        self.charged: dict[str, Alert] = {}
        self.looked_boot_s: dict[str, float] = {}  # runbook -> when ranks were looked at for it

    def step(self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]) -> None:
        if plan is None or not ctx.leader or plan is not self.state.document.plan:
            return
        self._close(ctx)
        for id in [id for id in self.charged if f"{LOOKED}{id}" in plan.granted]:
            self._look(ctx, self.charged.pop(id), plan, ranks)
        answered = {one.id for one in ctx.answers}
        rests = self.state.cause is not None or self.state.held.rests or plan.paused
        for alert in ctx.observed.alerts:
            book = ctx.runbooks.get(alert.runbook)
            if book is None or alert.run != self.state.run or alert.id in answered:
                continue
            if is_of_run(alert, book) and wants_look(book) and not rests:
                why = self._charge(ctx, alert, book, plan, ranks)
                if why:
                    ctx.answers.append(Answer(alert.id, False, why))

    def _charge(self, ctx: Context, alert: Alert, book: Runbook, plan: Plan,
                ranks: tuple[RankView, ...]) -> str:
        """Writes down that it will be done; why it will not be."""
        since_s = ctx.now.boot_s - self.looked_boot_s.get(book.fault, -1e9)
        if 0.0 <= since_s < STORM_S:
            return (f"ranks were looked at for {book.fault} {since_s:.0f} s ago: one action "
                    "answers a storm")
        if not _named(alert, ranks):
            return "nothing is done: no rank of it runs" + f" on {alert.node}" * bool(alert.node)
        key = f"{book.fault}/{TAKE_EVIDENCE}/{run_subject(self.state.run)}"
        spent = self.recovery.unexpired(ctx, plan)
        if spent.get(key, 0) >= book.budget_count:
            return (f"nothing is done: {key} used up what its runbook allows: {book.budget_count} "
                    f"within {book.budget_window_h:g} h")
        spent[key] = spent.get(key, 0) + 1
        changed = replace(plan, spent=policy.bounded(spent),
                          granted=(*plan.granted, f"{LOOKED}{alert.id}"))
        if self.document.put(ctx, changed, f"alert {said(alert)}") is not None:
            self.charged[alert.id] = alert
            for old in list(self.charged)[:-CHARGED_MAX]:
                del self.charged[old]
        return ""

    def _look(self, ctx: Context, alert: Alert, plan: Plan, ranks: tuple[RankView, ...]) -> None:
        """What is seen of them joins the note, which names no rank."""
        book = ctx.runbooks.get(alert.runbook)
        self.looked_boot_s[alert.runbook] = ctx.now.boot_s
        note = self.incidents.open_note(ctx, Cause(
            fault=alert.runbook, generation=plan.generation, reason=f"alert {said(alert)}",
            detector=DETECTOR, severity=book.severity if book else "", charged=False,
            evidence=(("alert", alert.id),), request=alert.id))
        for rank in _named(alert, ranks)[:LOOKS_MAX]:
            draft = drafts.evidence(ctx.view, rank, f"alert {said(alert)}")
            effect = ctx.emit(rank.generation, replace(draft, request=alert.id))
            if effect is not None:
                self.incidents.note_action(ctx, note, effect)

    def _close(self, ctx: Context) -> None:
        if not ctx.observed.store.up:
            return
        for id in self.incidents.notes_of(DETECTOR):
            evidence = dict(self.incidents.book.open[id].incident.evidence)
            if evidence.get("alert") not in ctx.observed.firing:
                self.incidents.close_note(ctx, id, "resolved")


def _named(alert: Alert, ranks: tuple[RankView, ...]) -> list[RankView]:
    """Whom it means: all of the run, or of the node that it names besides."""
    return [one for one in ranks if one.state in LIVE and alert.node in ("", one.node)]
