"""Plan against what this node's launcher says: what to start, stop, finish, delete.

Owns the comparison alone: what an order says is effects/drafts.py's.  Pure: it never makes a plan
and never judges health.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..effects import drafts
from ..model import TRAINER, Commit, Effect, Plan, RunView, Start, Stop
from . import validity
from .layout import labels_at

LIVE = ("starting", "running", "parked")


def start(plan: Plan, view: RunView, permit_s: float) -> Effect | None:
    """Start this node's ranks of the newest plan, once, when the launcher is behind it."""
    mine = tuple(sorted(rank for rank, node in plan.ranks if node == view.node))
    if plan.finished >= 0 or plan.generation <= view.generation or not mine:
        return None
    known = sorted(view.ranks, key=lambda r: r.rank)
    parked = {place for place, r in enumerate(known) if r.state == "parked"}
    body = Start(
        run=view.run, generation=plan.generation, ranks=mine,
        keep=tuple(rank for place, rank in enumerate(mine)
                   if rank in plan.keep and place in parked), world=len(plan.ranks),
        resume=plan.resume, reason=plan.reason, history=plan.history,
        permit_s=permit_s if view.grade != TRAINER else 0.0,
        labels=labels_at(plan, view.node),
    )
    return drafts.start(view, body)


def stale(plan: Plan, view: RunView) -> Effect | None:
    """Stop ranks of an older generation on a node that the newest plan gives none."""
    mine = any(node == view.node for _, node in plan.ranks)
    old = any(r.state in LIVE and r.generation < plan.generation for r in view.ranks)
    if mine or not old:
        return None
    reason = f"generation {plan.generation} runs elsewhere"
    return drafts.stop(view, (), 0.0, reason, "")


def park(plan: Plan, view: RunView, grace_s: float) -> Effect | None:
    """Have this node's ranks leave their generation at the end of their step, as the plan says."""
    here = view.generation == plan.generation and plan.finished < 0
    live = any(r.state in ("starting", "running") and r.ended is None for r in view.ranks)
    if not plan.park or not here or not live:
        return None
    return drafts.stop(view, (), grace_s, plan.park, "", park=True, save=plan.saves,
                       after=plan.park_after)


def may_delete(plan: Plan, view: RunView, commits: Iterable[Commit], leader: bool) -> bool:
    """Only the leader, and only while the newest plan is what runs here; a spare that leads has
    nothing of it to run."""
    runs = view.node not in plan.members or (
        view.generation == plan.generation and view.state == "running")
    newer = view.generation > plan.generation or any(
        c.generation > plan.generation for c in commits)
    same = plan.checkpoint_dir == view.checkpoint_dir
    return leader and runs and same and not newer and plan.finished < 0


def deletable(
    commits: Iterable[Commit], history: validity.History, keep: int, quarantined: tuple[str, ...]
) -> tuple[str, ...]:
    """Paths of commits older than the newest `keep` that are valid and verified.

    What is not read back does not count: `keep` damaged ones would cost the last good one.
    """
    commits = tuple(commits)
    kept = [c for c in validity.valid_commits(commits, history)
            if c.verified and c.path not in quarantined][-max(1, keep) :]
    if len(kept) < max(1, keep):
        return ()
    floor = kept[0].step
    old = [c for c in commits if not c.bad and c.path not in quarantined and c not in kept]
    # A void commit above the floor is left: it may be what a person wants to look at.
    return tuple(sorted(c.path for c in old if c.step < floor))


def stop_came_true(body: Stop, view: RunView) -> bool:
    """Levels show that every rank the stop named has ended."""
    named = [r for r in view.ranks if r.rank in body.ranks or not body.ranks]
    if body.park:
        return all(r.state in ("parked", "ended") for r in named)
    return view.generation > body.generation or all(r.state == "ended" for r in named)
