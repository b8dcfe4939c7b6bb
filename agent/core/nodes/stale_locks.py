"""Has a killed compile's lock removed by the launcher of a run on this node, as the run's user.

Owns when that is asked for: the operator allowed it, nobody paused this node, the runbook's budget
for that file has something left, and a run of the lock's owner is here: nobody else may remove it.
Which lock is stale is detect/devices/compile_cache.py's; the launcher looks again before it removes
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..actions import ACTIONS, REMOVE_LOCK
from ..detect.devices import compile_cache
from ..detect.ranks.compiling import NAMED_MAX
from ..ladder import first
from ..model import Effect, RemoveLock, Runbook, Verdict, run_subject
from ..run.state import Context

FAULT = "compile_lock_stale"
KEPT_MAX = 64
AGAIN_S = 60.0  # behind an order, until what was read before it is old


def step(
    ctx: Context, verdicts: Iterable[Verdict], asked: dict[str, list[float]], paused: str
) -> None:
    """At most one order a step.  `asked`: path -> wall_s of the orders, kept by the node."""
    if REMOVE_LOCK not in ctx.settings.allow or paused or ctx.observed.journal_stalled:
        return
    views = [v for v in ctx.observed.runs if v.connected and v.state == "running"]
    book = ctx.runbooks.get(FAULT)
    if compile_cache.AGE in ctx.observed.samples.silent:
        return  # what is known may be long over
    if not views or book is None or not first(book, (REMOVE_LOCK,)):
        return
    for verdict in verdicts:
        evidence = dict(verdict.evidence)
        path, owner = evidence.get("path", ""), evidence.get("uid", "")
        if verdict.fault != FAULT or not path or _spent(ctx, asked.get(path, ()), book):
            continue
        if float(evidence.get("age_s", "inf")) < compile_cache.STALE_S:
            continue  # the launcher would refuse it, and the order be spent
        theirs = [view for view in views if str(view.uid) == owner]
        if not theirs:
            continue
        view = min(theirs, key=lambda one: (path[:NAMED_MAX] not in one.compiling, one.run))
        draft = Effect(
            id="", kind=REMOVE_LOCK, subject=run_subject(view.run, "lock"), reason=verdict.reason,
            deadline_s=ACTIONS[REMOVE_LOCK].deadline_s, fault=FAULT,
            body=RemoveLock(view.run, path))
        if ctx.emit(view.generation, draft) is not None:
            asked[path] = [*asked.pop(path, ()), ctx.now.wall_s][-book.budget_count:]
            for old in list(asked)[:-KEPT_MAX]:
                del asked[old]
        return


def _spent(ctx: Context, times: Sequence[float], book: Runbook) -> bool:
    """As many orders a file as the runbook gives a window; a clock that was set back gives none."""
    if times and abs(ctx.now.wall_s - times[-1]) < AGAIN_S:
        return True
    since_s = ctx.now.wall_s - book.budget_window_h * 3600.0
    return len([one for one in times if one > since_s]) >= book.budget_count
