"""What becomes of the alerts about one run that came from outside.

Owns when an alert is settled and with which words, and which of them may still become the cause of
a restart.  An alert is answered once, by the generation that is planned for it or by any later one,
so that a storm of them is one restart; and it never ends a run that trains.
"""

from __future__ import annotations

from collections.abc import Callable

from ..actions import restarting
from ..detect.ranks.ended import Cause
from ..ladder import first
from ..model import Alert, Answer, Plan
from .policy import RESTART, Grant
from .state import Context, RunState

DETECTOR = "alerts"
Outlook = Callable[[Cause], Grant | None]  # what a cause would be granted now


def pending(
    ctx: Context, state: RunState, plan: Plan | None, outlook: Outlook
) -> tuple[Cause, ...]:
    """What alerts ask of this run now; those that can be settled are, in `ctx.answers`."""
    found: list[Cause] = []
    for alert in ctx.observed.alerts:
        if alert.run != ctx.view.run or plan is None or not ctx.leader:
            continue
        cause = _cause(ctx, alert, plan)
        answer = _answer(ctx, state, alert, plan) or _refusal(outlook(cause), alert)
        if answer is not None:
            ctx.answers.append(answer)
        elif state.cause is None and not state.held.rests and not plan.paused:
            found.append(cause)
    return tuple(found)


def _cause(ctx: Context, alert: Alert, plan: Plan) -> Cause:
    """The restart that an alert asks for; its runbook says what is done about it."""
    book = ctx.runbooks.get(alert.runbook)
    said = f"{alert.name}: {alert.summary}" if alert.summary else alert.name
    return Cause(
        fault=alert.runbook, generation=plan.generation, reason=f"alert {said}", detector=DETECTOR,
        severity=book.severity if book else "", evidence=(("alert", alert.id),), request=alert.id)


def _answer(ctx: Context, state: RunState, alert: Alert, plan: Plan) -> Answer | None:
    """What is settled without asking what it would cost; None for what is not."""
    book = ctx.runbooks.get(alert.runbook)
    if alert.id in plan.granted:
        return Answer(alert.id, True, f"generation {plan.generation} was started for it")
    if alert.generation < plan.generation:
        return Answer(alert.id, False, f"generation {plan.generation} was started since: nothing "
                      "more is done")
    if state.finish_code >= 0 or plan.finished >= 0:
        return Answer(alert.id, False, "the run is over")
    if book is None:
        return Answer(alert.id, False, f"no runbook is named {alert.runbook!r}: shown alone")
    if DETECTOR not in ctx.settings.act:
        would = first(book, restarting())
        return Answer(alert.id, False, f"shown alone: detect.act does not name {DETECTOR!r}"
                      + (f"; it would have: {would}" if would else ""))
    return None


def _refusal(grant: Grant | None, alert: Alert) -> Answer | None:
    """Anything but a restart would end a run that trains, for a word from outside."""
    if grant is None or grant.action == RESTART:
        return None
    return Answer(alert.id, False, f"nothing is done: {grant.reason}")
