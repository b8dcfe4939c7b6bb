"""What a cause is answered with: the runbook's ladder, its budgets, the crash loop.

Owns the decision restart / finish / observe and what is charged for it.  Budgets live in the
plan's document (`spent`), so that a new leader inherits them by reading; only the age of a budget's
window is local, and starts anew where it is unknown, which is the careful side.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.worker import exits

from .. import ladder
from ..actions import RESTART_RANKS, restarting
from ..detect.ranks.ended import Cause, subject_of
from ..model import FATAL, Plan, Runbook, Settings, Value

RESTART, FINISH, OBSERVE = "restart", "finish", "observe"
RESTARTS = "restarts"  # budget key of the run's own --max-restarts
PROGRESS_STEPS = 10  # new steps after which a generation gives its restart back
SIGNATURES_MAX = 32
ERROR_MAX = 120  # of a signature's error line
INFRASTRUCTURE = exits.RETRY

UNKNOWN_BOOK = Runbook("", FATAL, "run", (RESTART_RANKS,))


class Grant(Value, frozen=True):
    """The answer to one cause."""

    action: str  # restart | finish | observe
    reason: str
    code: int = 0  # for finish
    fault: str = ""  # crash_loop | budget_spent when that is why
    spent: tuple[tuple[str, int], ...] = ()
    charged: tuple[str, ...] = ()  # budget keys, given back on progress


class Account(Value, frozen=True):
    """What the run has left."""

    run: str
    max_restarts: int
    spent: tuple[tuple[str, int], ...] = ()
    expired: tuple[str, ...] = ()  # keys whose window is over
    hang_limit_s: float = 0.0


def grant(
    cause: Cause, account: Account, runbooks: Mapping[str, Runbook], settings: Settings
) -> Grant:
    """Restart within every budget, else finish with the code that says whose fault it was."""
    spent = {k: n for k, n in account.spent if k not in account.expired}
    if cause.detector not in settings.act and cause.charged:
        return Grant(OBSERVE, f"detector {cause.detector} only observes", spent=account.spent)
    if not cause.charged:
        return Grant(RESTART, cause.reason, spent=account.spent)
    sign = signature(cause)
    spent[sign] = spent.get(sign, 0) + 1
    if spent[sign] >= settings.crash_loop_count:
        why = f"the same failure {spent[sign]} times at step {cause.step}: {cause.reason}"
        return _finish(cause, why, "crash_loop", spent)
    subject = subject_of(account.run, cause.rank)
    rung, why = ladder.next_rung(
        runbooks.get(cause.fault, UNKNOWN_BOOK),
        lambda action: spent.get(f"{cause.fault}/{action}/{subject}", 0),
        lambda action: ladder.MAY if action in restarting() else ladder.PASS,
        climbs=False,
    )
    if rung is None and not why:
        return _finish(cause, f"the runbook of {cause.fault} has no restart", "", spent)
    if rung is None:
        return _finish(cause, f"{cause.fault} {why} restarts", "budget_spent", spent)
    own = f"{cause.fault}/{rung}/{subject}"
    # A bad checkpoint is left out and the next older one tried: that costs the job no restart.
    keys = (own,) if cause.fault == "checkpoint_bad" else (own, RESTARTS)
    if RESTARTS in keys and spent.get(RESTARTS, 0) >= account.max_restarts:
        why = (f"all {account.max_restarts} restarts are used up" if account.max_restarts
               else "no restart is allowed (--max-restarts 0)")
        return _finish(cause, why, "budget_spent", spent)
    for key in keys:
        spent[key] = spent.get(key, 0) + 1
    return Grant(RESTART, cause.reason, spent=bounded(spent), charged=keys)


def finish_code(cause: Cause) -> int:
    """The script's own code for the job's own fault; else infrastructure used the budget up.

    A script that ends with a code of ours would tell the scheduler something untrue: it becomes 1.
    """
    if not cause.user:
        return exits.BUDGET_SPENT
    return exits.FAILED if cause.code in exits.OURS else cause.code or exits.FAILED


def signature(cause: Cause) -> str:
    """What makes two failures the same one."""
    return f"signature/{cause.fault}/{cause.step}/{cause.error[:ERROR_MAX]}"


def made_progress(plan: Plan, new_steps: int, newest_commit: tuple[int, int] | None) -> bool:
    """The plan's generation finished enough new steps, or made something durable."""
    committed = newest_commit is not None and newest_commit[0] == plan.generation
    return new_steps >= PROGRESS_STEPS or committed


def give_back(spent: tuple[tuple[str, int], ...], plan: Plan) -> tuple[tuple[str, int], ...]:
    """Budgets after the plan's generation made progress: what it was charged is returned."""
    keys = {g.removeprefix("charged:") for g in plan.granted if g.startswith("charged:")}
    left = [(k, n - 1 if k in keys else n) for k, n in spent]
    return tuple((k, n) for k, n in left if n > 0)


def bounded(spent: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """Budgets in order, with the least repeated signatures dropped beyond the maximum."""
    signs = sorted((k for k in spent if k.startswith("signature/")), key=lambda k: (-spent[k], k))
    dropped = set(signs[SIGNATURES_MAX:])
    return tuple(sorted((k, n) for k, n in spent.items() if k not in dropped))


def _finish(cause: Cause, why: str, fault: str, spent: dict[str, int]) -> Grant:
    code = finish_code(cause)
    if cause.user and cause.code in exits.OURS:
        why += f"; the script's own code {cause.code} is given on as 1"
    return Grant(FINISH, why, code=code, fault=fault, spent=bounded(spent))
