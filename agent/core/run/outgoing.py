"""What this node tells the others: itself, and each of its runs, as beats.

Owns the choice of what other nodes need for their plans and verdicts.  A pure view of one step's
levels: times are this node's own clock, with the moment of sending beside them, for a receiver
knows ages alone.  Whom they are sent to, and when, is the edge's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..model import FATAL, TRAINER, Beat, Condition, Incident, Now, Observed, RunView, subject_of
from ..nodes import kernel_incidents
from .start_gate import INCIDENTS, OWN_SCOPES, Names, uses
from .state import Context

COMMITS_MAX = 16  # of one run's folder, the newest
COMMITS_MORE = 4  # beyond those kept: not read back yet, or about to go
COMPILING_MAX = 300  # characters: a lock's path, and who waits for it


def beats(
    ctx: Context, name: str, opened: Iterable[Incident], names: Names,
    conditions: tuple[Condition, ...],
) -> tuple[Beat, ...]:
    """One of the node alone, and one of each run whose launcher is here; `conditions`: what is so
    on the node and its ranks may wait for."""
    bad = tuple(_breaking(ctx, opened))
    own = Beat(node=name, run="", generation=0, boot_s=0.0, sent_boot_s=ctx.now.boot_s,
               fatal=bad[0].fault if bad else "", labels=ctx.observed.labels)
    return (own, *(of_run(view, ctx.now, ctx.observed, _fatal(view, bad, names), conditions)
                   for view in ctx.observed.runs if view.connected))


def of_run(
    view: RunView, now: Now, observed: Observed, fatal: str,
    conditions: tuple[Condition, ...],
) -> Beat:
    """One run, as its launcher here shows it."""
    commits = sorted(view.commits, key=lambda one: (one.step, one.generation))
    # Who leads lets go what is beyond keep-N, and hears of the newest N from rank 0's node alone.
    of_rank_0 = any(rank.rank == 0 for rank in view.ranks)
    told = max(COMMITS_MAX, view.keep + COMMITS_MORE) if of_rank_0 else COMMITS_MAX
    return Beat(
        node=view.node, run=view.run, generation=view.generation, boot_s=0.0, ranks=view.ranks,
        fatal=fatal, sent_boot_s=now.boot_s, labels=observed.labels, grade=view.grade,
        nproc=view.nproc, nnodes_min=view.nnodes_min, nnodes_max=view.nnodes_max, uid=view.uid,
        commits=tuple(commits[-told:]) if view.grade == TRAINER else (),
        snapshot=view.snapshot, checkpoint_dir=view.checkpoint_dir, shutdown=view.shutdown,
        node_rank=view.node_rank, suspended=view.suspended,
        compiling=view.compiling[:COMPILING_MAX], conditions=conditions,
    )


def _breaking(ctx: Context, opened: Iterable[Incident]) -> Iterable[Incident]:
    """The open incidents with which this node may carry no ranks; observed ones stop nobody."""
    if kernel_incidents.DETECTOR not in ctx.settings.act:
        return
    for one in sorted(opened, key=lambda one: (one.opened_wall_s, one.id)):
        book = ctx.runbooks.get(one.fault)
        if one.severity == FATAL and (book is None or book.scope in OWN_SCOPES):
            yield one


def _fatal(view: RunView, bad: tuple[Incident, ...], names: Names) -> str:
    """The first of them under a device that the run may use, unless a person has it start with
    them all the same."""
    if INCIDENTS in view.ignored_checks:
        return ""
    return next((one.fault for one in bad if uses(view, subject_of(one.subject).part, names)), "")
