"""What a cause is answered with: the runbook's ladder, its budgets, the crash loop.

Owns the decision restart / finish / observe and what is charged for it.  Budgets live in the
plan's document (`spent`), so that a new leader inherits them by reading; only the age of a budget's
window is local, and starts anew where it is unknown, which is the careful side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from holdfast.worker import exits

from .. import ladder
from ..actions import (
    ACTIONS,
    EXCLUDE_NODE,
    RESTART_RANKS,
    RUN,
    STOP_RUN,
    TAKE_EVIDENCE,
    beside,
    restarting,
)
from ..detect.ranks.ended import Cause
from ..model import (
    FATAL,
    OPAQUE,
    TRAINER,
    Plan,
    Runbook,
    Settings,
    Value,
    node_subject,
    rank_subject,
)

RESTART, FINISH, OBSERVE = "restart", "finish", "observe"
CHARGED = "charged:"  # before a budget key, among what a plan was granted
RESTARTS = "restarts"  # budget key of the run's own --max-restarts
PROGRESS_STEPS = 10  # new steps after which a generation gives its restart back
SIGNATURES_MAX = 32
ERROR_MAX = 120  # of a signature's error line
INFRASTRUCTURE = exits.RETRY

UNKNOWN_BOOK = Runbook("", FATAL, "run", (TAKE_EVIDENCE, RESTART_RANKS))


class Grant(Value, frozen=True):
    """The answer to one cause."""

    action: str  # restart | finish | observe
    reason: str
    code: int = 0  # for finish
    fault: str = ""  # crash_loop | budget_spent when that is why
    spent: tuple[tuple[str, int], ...] = ()
    charged: tuple[str, ...] = ()  # budget keys, given back on progress
    rung: str = ""  # of the runbook; "" where none answers it
    would: str = ""  # what acting would have done, where it is off


class Account(Value, frozen=True):
    """What the run has left."""

    run: str
    max_restarts: int
    spent: tuple[tuple[str, int], ...] = ()
    expired: tuple[str, ...] = ()  # keys whose window is over
    trained: bool = True  # a step was finished under this launcher
    grade: str = TRAINER
    quick: bool = True  # the generation broke within moments


# cause, action beyond the run -> how often it was done within its window, whether it may be done
Beyond = Callable[[Cause, str], tuple[int, ladder.Leave]]


def nothing_beyond(cause: Cause, action: str) -> tuple[int, ladder.Leave]:
    """For a node on which nobody performs actions beyond the run."""
    return 0, ladder.PASS


def grant(
    cause: Cause, account: Account, runbooks: Mapping[str, Runbook], settings: Settings,
    beyond: Beyond = nothing_beyond,
) -> Grant:
    """The first rung that may be taken and has budget left; without one the run ends with the code
    that says whose fault it was."""
    spent = {k: n for k, n in account.spent if k not in account.expired}
    if cause.detector not in settings.act and cause.charged:
        acting = msgspec.structs.replace(settings, act=(*settings.act, cause.detector))
        would = grant(cause, account, runbooks, acting, beyond)
        return Grant(OBSERVE, f"detector {cause.detector} only observes", spent=account.spent,
                     would=_would(would))
    if cause.excused or not cause.charged:
        return Grant(RESTART, cause.reason, spent=account.spent)
    # An opaque job shows no steps: it has trained if it lasted.
    begun = account.trained or account.grade == OPAQUE and not account.quick
    if cause.final and not begun:
        why = f"{cause.reason}; before anything was trained: another start would end the same way"
        return _finish(cause, why, "", spent)
    if account.grade == TRAINER and cause.user and cause.code == exits.CONFIGURATION:
        # Our own trainer's word, and not a script's that happens to be the same.
        return Grant(FINISH, f"{cause.reason}: a setting is wrong, and no restart cures that; its "
                     "log says which", code=exits.CONFIGURATION, spent=bounded(spent))
    sign = signature(cause, account)
    if sign:
        spent[sign] = spent.get(sign, 0) + 1
    if sign and spent[sign] >= settings.crash_loop_count:
        where = f"at step {cause.step}" if cause.step > 0 else "before its first step"
        where = "within moments of its start" if account.grade == OPAQUE else where
        why = f"the same failure {spent[sign]} times {where}: {cause.reason}"
        return _finish(cause, why, "crash_loop", spent)
    book = runbooks.get(cause.fault, UNKNOWN_BOOK)
    subject = subject_of(cause, account)
    # A bad checkpoint is left out and the next older one tried: that costs the job no restart.
    free = cause.fault == "checkpoint_bad"
    out = not free and spent.get(RESTARTS, 0) >= account.max_restarts

    def spent_of(action: str) -> int:
        own = spent.get(f"{cause.fault}/{action}/{subject}", 0)
        return own if ACTIONS[action].scope == RUN else max(own, beyond(cause, action)[0])

    def leave(action: str) -> ladder.Leave:
        if action in beside():
            return ladder.PASS
        if action in restarting():
            return ladder.PASS if out else ladder.MAY
        if action == EXCLUDE_NODE and out:
            return ladder.PASS  # the run would go on without that node: one more start
        return ladder.MAY if action == STOP_RUN else beyond(cause, action)[1]

    rung, asked = ladder.next_rung(book, spent_of, leave)
    if rung in (*restarting(), EXCLUDE_NODE):
        keys = (f"{cause.fault}/{rung}/{subject}", *(() if free else (RESTARTS,)))
        for key in keys:
            spent[key] = spent.get(key, 0) + 1
        return Grant(RESTART, cause.reason, spent=bounded(spent), charged=keys, rung=rung or "")
    why, fault = _used_up(cause, book, account, spent_of, out)
    if rung is not None and rung != STOP_RUN:
        return Grant(FINISH, f"{why}; {rung} is the next rung", code=INFRASTRUCTURE,
                     spent=bounded(spent), rung=rung)
    over = _finish(cause, f"{why}; {asked}" if asked else why, fault, spent)
    return msgspec.structs.replace(over, rung=rung or "")


def _would(granted: Grant) -> str:
    """The action, and in a person's words what it would have done."""
    if granted.action == FINISH:
        return f"{STOP_RUN}: the run would have ended with {granted.code}: {granted.reason}"
    return (f"{granted.rung or RESTART_RANKS}: what is left of the generation would have ended, "
            "and another one started")


def unexcluded(granted: Grant, why: str) -> Grant:
    """The same while the breaker is open: no node is taken out, and none is paid for.  The run is
    not ended for what many nodes have: it waits for nodes that are fit."""
    out = [key for key in granted.charged if key != RESTARTS]
    spent = {key: n - (key in out) for key, n in granted.spent}
    return msgspec.structs.replace(
        granted, rung="", reason=f"{granted.reason}; no node is excluded: the breaker is open: "
        f"{why}", charged=tuple(key for key in granted.charged if key == RESTARTS),
        spent=bounded({key: n for key, n in spent.items() if n}))


def _used_up(
    cause: Cause, book: Runbook, account: Account, spent_of: Callable[[str], int], out: bool
) -> tuple[str, str]:
    """(why no restart answers the cause, the fault that this makes of it: crash_loop,
    budget_spent)."""
    again = ladder.first(book, restarting())
    if not again:
        return f"the runbook of {cause.fault} has no restart", ""
    if spent_of(again) >= book.budget_count or not out:
        total = dict(account.spent).get(RESTARTS, 0)
        # No rank and no node is at fault of it: what there is to mend, its own words say.
        said = f": {cause.reason}" if cause.fault == "checkpoint_bad" else ""
        return (f"{cause.fault} of {subject_of(cause, account)} used up its "
                f"{spent_of(again)} restarts within {book.budget_window_h:g} h, all that its "
                f"runbook allows ({total} of the run's {account.max_restarts}){said}"
                ), "budget_spent"
    if account.max_restarts:
        return f"all {account.max_restarts} restarts are used up", "budget_spent"
    return "no restart is allowed (--max-restarts 0)", "budget_spent"


def subject_of(cause: Cause, account: Account) -> str:
    """Whose budget pays: the rank's, else the node's where one is named, else the run's."""
    if cause.rank < 0 and cause.node:
        return node_subject(cause.node)
    return rank_subject(account.run, cause.rank)


def wants_evidence(runbooks: Mapping[str, Runbook], fault: str) -> bool:
    """Whether the runbook has the rank looked at."""
    return ladder.holds(runbooks.get(fault, UNKNOWN_BOOK), TAKE_EVIDENCE)


def finish_code(cause: Cause) -> int:
    """The script's own code for the job's own fault; else infrastructure used the budget up.

    A script that ends with a code of ours would tell the scheduler something untrue: it becomes 1.
    """
    if not cause.user:
        return exits.BUDGET_SPENT
    return exits.FAILED if cause.code in exits.OURS else cause.code or exits.FAILED


def signature(cause: Cause, account: Account) -> str:
    """The key under which equal failures are counted; "" where nothing can show that two are equal.

    The trainer's step is the true one.  A script counts its steps anew in each generation, so that
    equal numbers prove nothing, but for 0.  A command shows no steps, only that it hardly began.
    """
    if account.grade == OPAQUE:
        where = "begin" if account.quick else ""
    else:
        first = cause.step == 0 or account.grade == TRAINER and cause.step > 0
        where = str(cause.step) if first else ""
    return f"signature/{cause.fault}/{where}/{cause.error[:ERROR_MAX]}" if where else ""


def times(cause: Cause, spent: tuple[tuple[str, int], ...]) -> int:
    """How often this very failure was counted, wherever it was."""
    begin, end = f"signature/{cause.fault}/", f"/{cause.error[:ERROR_MAX]}"
    return sum(n for key, n in spent if key.startswith(begin) and key.endswith(end))


def made_progress(plan: Plan, new_steps: int, newest_commit: tuple[int, int] | None) -> bool:
    """The plan's generation finished enough new steps, or made something durable."""
    committed = newest_commit is not None and newest_commit[0] == plan.generation
    return new_steps >= PROGRESS_STEPS or committed


def give_back(
    spent: tuple[tuple[str, int], ...], plan: Plan, kept: tuple[str, ...] = ()
) -> tuple[tuple[str, int], ...]:
    """Budgets after the plan's generation made progress: what it was charged is returned, but for
    what is `kept`."""
    keys = {g.removeprefix(CHARGED) for g in plan.granted if g.startswith(CHARGED)} - {*kept}
    left = [(k, n - 1 if k in keys else n) for k, n in spent]
    return tuple((k, n) for k, n in left if n > 0)


def cleared(spent: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Budgets after progress: what failed before it is not failing in the same place now."""
    return tuple((k, n) for k, n in spent if not k.startswith("signature/"))


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
