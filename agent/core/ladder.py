"""The one reader of ladders and budgets, for runs and nodes alike.

Owns the order in which a runbook's actions are taken and what a spent budget means.  What may be
done now is the caller's to say, action by action; how often it was done as well, because runs keep
their budgets in the plan's document and nodes in their own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from .model import Runbook


class Leave(NamedTuple):
    """How an action of the ladder stands for its caller."""

    may: bool
    stops: bool = False  # nothing behind it may be done either
    reason: str = ""  # why it may not, for people


MAY, PASS, STOP = Leave(True), Leave(False), Leave(False, stops=True)


def next_rung(
    runbook: Runbook, spent: Callable[[str], int], allowed: Callable[[str], Leave],
) -> tuple[str | None, str]:
    """(the action to be done now or none, why none).  An action whose budget is spent is followed
    by the one behind it.  "" is the reason when the ladder came to its end, or to an action that
    stops without a word."""
    passed = ""
    for action in runbook.ladder:
        leave = allowed(action)
        if leave.may and spent(action) < runbook.budget_count:
            return action, ""
        passed = passed or leave.reason
        if leave.stops:
            break
    return None, passed


def first(runbook: Runbook | None, wanted: Collection[str]) -> str:
    """The first action of the ladder that is one of those; "" without one."""
    return next((one for one in runbook.ladder if one in wanted), "") if runbook else ""


def holds(runbook: Runbook, action: str) -> bool:
    return action in runbook.ladder


def before(runbook: Runbook, action: str, since: str) -> tuple[str, ...]:
    """What the ladder has before that action, back to the last `since` where it holds one."""
    ahead = runbook.ladder[: runbook.ladder.index(action)]
    at = max((number for number, one in enumerate(ahead, 1) if one == since), default=0)
    return ahead[at:]


def behind(runbook: Runbook, action: str) -> tuple[str, ...]:
    """What the ladder has behind that action; the whole ladder where it does not hold it."""
    at = runbook.ladder.index(action) + 1 if holds(runbook, action) else 0
    return runbook.ladder[at:]
