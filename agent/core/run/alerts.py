"""What becomes of the alerts about one run that came from outside.

Owns which alerts are a run's and which a node's, when one of a run is settled and with which words,
and which of them may still become the cause of a restart.  An alert is answered once, by the
generation that is planned for it or by any later one, or by one that was started for its runbook
minutes ago, so that a storm of them is one restart; and it never ends a run that trains.
"""

from __future__ import annotations

from collections.abc import Callable

from ..actions import ACTIONS, NODE, RUN, TAKE_EVIDENCE, by_alert, restarting
from ..detect.ranks.ended import Cause
from ..ladder import first
from ..model import Alert, Answer, Plan, Runbook
from .policy import CHARGED, RESTART, Grant
from .state import Context, RunState

DETECTOR = "alerts"
# Alertmanager tells what joins a group it has told of only after `group_interval`, 5 minutes unless
# set otherwise: the rest of a storm comes when the restart is long over.
STORM_S = 600.0
Outlook = Callable[[Cause], Grant | None]  # what a cause would be granted now
LOOKED = "looked:"  # before an alert, among what a plan was granted: its ranks are looked at
ACT_OFF = f"shown alone: detect.act does not name {DETECTOR!r}"


def is_of_run(alert: Alert, book: Runbook | None) -> bool:
    """Whether the leader of the run answers it; else the agent of the node that it names."""
    if not alert.run or book is None:
        return bool(alert.run)
    return bool(first(book, restarting())) or not first(book, by_alert(NODE))


def wants_look(book: Runbook) -> bool:
    """Whether evidence is what its ladder has for an alert, and no new generation."""
    return bool(first(book, (TAKE_EVIDENCE,))) and not first(book, restarting())


def label_missing(alert: Alert, book: Runbook | None) -> str:
    """Which label it lacks for what its runbook asks for first; "" = none."""
    if not alert.run and not alert.node:
        return f"nothing is done: the alert has neither label `{RUN}` nor `{NODE}`"
    wanted = first(book, (*by_alert(RUN), *by_alert(NODE)))
    label = ACTIONS[wanted].alert_label if wanted else ""
    lacks = label == RUN and not alert.run or label == NODE and not alert.node
    return f"{wanted}: the alert has no label `{label}`" if lacks else ""


def said(alert: Alert) -> str:
    """It in words; one of many may have lost them."""
    name = alert.name or alert.runbook
    return f"{name}: {alert.summary}" if alert.summary else name


def unknown_book(alert: Alert) -> str:
    return f"no runbook is named {alert.runbook!r}: shown alone"


def pending(
    ctx: Context, state: RunState, plan: Plan | None, outlook: Outlook
) -> tuple[Cause, ...]:
    """What alerts ask of this run now; those that can be settled are, in `ctx.answers`.  Of several
    with one runbook the first asks for all: what is granted answers each of them."""
    asking: dict[str, tuple[Cause, str]] = {}  # runbook -> the first's cause, why it is refused
    for alert in ctx.observed.alerts:
        book = ctx.runbooks.get(alert.runbook)
        if alert.run != ctx.view.run or plan is None or not ctx.leader:
            continue
        if not is_of_run(alert, book):
            continue
        answer = _answer(ctx, state, alert, plan)
        if answer is None and not (book is not None and wants_look(book)):
            if alert.runbook not in asking:
                cause = _cause(ctx, alert, plan)
                asking[alert.runbook] = cause, _refusal(outlook(cause))
            if refusal := asking[alert.runbook][1]:
                answer = Answer(alert.id, False, refusal)
        if answer is not None:
            ctx.answers.append(answer)
    if plan is None or state.cause is not None or state.held.rests or plan.paused:
        return ()
    return tuple(cause for cause, refusal in asking.values() if not refusal)


def _cause(ctx: Context, alert: Alert, plan: Plan) -> Cause:
    """The restart that an alert asks for; its runbook says what is done about it."""
    book = ctx.runbooks.get(alert.runbook)
    there = {node for _, node in plan.ranks}
    return Cause(
        fault=alert.runbook, generation=plan.generation, reason=f"alert {said(alert)}",
        detector=DETECTOR, severity=book.severity if book else "",
        node=alert.node if alert.node in there else "", evidence=(("alert", alert.id),),
        request=alert.id)


def _answer(ctx: Context, state: RunState, alert: Alert, plan: Plan) -> Answer | None:
    """What is settled without asking what it would cost; None for what is not."""
    book = ctx.runbooks.get(alert.runbook)
    if alert.id in plan.granted:
        return Answer(alert.id, True, f"generation {plan.generation} was started for it")
    if f"{LOOKED}{alert.id}" in plan.granted:
        return Answer(alert.id, True, f"ranks of generation {plan.generation} are looked at for it")
    if alert.generation < plan.generation:
        return Answer(alert.id, False, f"generation {plan.generation} was started since: nothing "
                      "more is done")
    if state.finish_code >= 0 or plan.finished >= 0:
        return Answer(alert.id, False, "the run is over")
    age_s = ctx.now.boot_s - state.progress.began_boot_s
    if age_s < STORM_S and any(
            one.startswith(f"{CHARGED}{alert.runbook}/") for one in plan.granted):
        return Answer(alert.id, False, f"generation {plan.generation} was started for "
                      f"{alert.runbook} {age_s:.0f} s ago: one restart answers a storm")
    if book is None:
        return Answer(alert.id, False, unknown_book(alert))
    if DETECTOR not in ctx.settings.act:
        would = first(book, restarting()) or first(book, (TAKE_EVIDENCE,))
        return Answer(alert.id, False, ACT_OFF + (f"; it would have: {would}" if would else ""))
    return None


def _refusal(grant: Grant | None) -> str:
    """Why nothing is done; "" for a restart.  Anything else would end a run that trains, for a word
    from outside."""
    return "" if grant is None or grant.action == RESTART else f"nothing is done: {grant.reason}"
