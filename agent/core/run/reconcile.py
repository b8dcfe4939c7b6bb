"""Plan against what this node's launcher says: what to start, stop, finish, delete.

Owns the drafts of effects (bodies, subjects, deadlines); the outbox gives them ids and decides
whether they may go.  Pure: it never makes a plan and never judges health.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..actions import ACTIONS, RESTART_RANKS, STOP_RUN, TAKE_EVIDENCE
from ..model import (
    SCRIPT,
    Commit,
    Delete,
    Effect,
    Finish,
    Plan,
    RankView,
    RunView,
    Start,
    Stop,
    StoreWrite,
    TakeEvidence,
)
from . import validity

PUT_S = 5.0
START_S = ACTIONS[RESTART_RANKS].deadline_s
FINISH_S = ACTIONS[STOP_RUN].deadline_s
EVIDENCE_S = ACTIONS[TAKE_EVIDENCE].deadline_s
DELETE_S = 60.0
LOGS_S = 12.0  # the launcher gives its child less
STOP_MARGIN_S = 5.0

LIVE = ("starting", "running", "parked")


def run_subject(run: str) -> str:
    return f"run/{run}"


def start_draft(plan: Plan, view: RunView, permit_s: float) -> Effect | None:
    """Start this node's ranks of the newest plan, once, when the launcher is behind it."""
    mine = tuple(sorted(rank for rank, node in plan.ranks if node == view.node))
    if plan.finished >= 0 or plan.generation <= view.generation or not mine:
        return None
    parked = {r.rank for r in view.ranks if r.state == "parked" and r.ended is None}
    body = Start(
        run=view.run, generation=plan.generation, ranks=mine,
        keep=tuple(r for r in plan.keep if r in mine and r in parked), world=len(plan.ranks),
        resume=plan.resume, reason=plan.reason, history=plan.history,
        permit_s=permit_s if view.grade == SCRIPT else 0.0,
    )
    return _draft("start", view.run, plan.reason, START_S, body)


def stale_draft(plan: Plan, view: RunView) -> Effect | None:
    """Stop ranks of an older generation on a node that the newest plan gives none."""
    mine = any(node == view.node for _, node in plan.ranks)
    old = any(r.state in LIVE and r.generation < plan.generation for r in view.ranks)
    if mine or not old:
        return None
    reason = f"generation {plan.generation} runs elsewhere"
    return stop_draft(view, (), 0.0, reason, "")


def stop_draft(
    view: RunView, ranks: tuple[int, ...], grace_s: float, reason: str, fault: str,
    leave: bool = False,
) -> Effect:
    body = Stop(
        run=view.run, generation=view.generation, ranks=ranks, grace_s=grace_s, reason=reason,
        leave=leave,
    )
    return _draft("stop", view.run, reason, grace_s + STOP_MARGIN_S, body, fault)


def finish_draft(view: RunView, code: int, reason: str, fault: str = "") -> Effect:
    body = Finish(run=view.run, code=code, reason=reason)
    return _draft("finish", view.run, reason, FINISH_S, body, fault)


def put_draft(key: str, version: int, body: bytes, reason: str, lease: str = "") -> Effect:
    write = StoreWrite(key=key, expect_version=version, body=body, lease=lease)
    return Effect(
        id="", kind="put", subject=key if key.startswith("lease/") else f"store/{key}",
        reason=reason, deadline_s=PUT_S, body=write,
    )


def evidence_draft(view: RunView, rank: RankView, reason: str) -> Effect:
    body = TakeEvidence(
        run=view.run, generation=rank.generation, rank=rank.rank, pid=rank.pid, reason=reason
    )
    return Effect(
        id="", kind="evidence", subject=f"run/{view.run}/rank/{rank.rank}", reason=reason,
        deadline_s=EVIDENCE_S, body=body,
    )


def logs_subject(run: str) -> str:
    return f"run/{run}/logs"


def logs_draft(view: RunView, generation: int, incident: str) -> Effect:
    """Read the end of every rank's logs; rank -1 stands for all.  `request` names whose answer it
    is."""
    reason = "what the ranks wrote before it"
    body = TakeEvidence(run=view.run, generation=generation, rank=-1, pid=0, reason=reason)
    return Effect(
        id="", kind="logs", subject=logs_subject(view.run), reason=reason, deadline_s=LOGS_S,
        body=body, request=incident,
    )


def delete_draft(plan: Plan, view: RunView, paths: tuple[str, ...]) -> Effect:
    body = Delete(run=view.run, generation=plan.generation, paths=paths)
    return Effect(
        id="", kind="delete", subject=f"run/{view.run}/checkpoints",
        reason=f"{len(paths)} checkpoints beyond those kept", deadline_s=DELETE_S, body=body,
        outlives_node=True,
    )


def may_delete(plan: Plan, view: RunView, leader: bool) -> bool:
    """Only the leader, and only while the newest plan is what runs here."""
    runs = view.generation == plan.generation and view.state == "running"
    newer = any(c.generation > plan.generation for c in view.commits)
    same = plan.checkpoint_dir == view.checkpoint_dir
    return leader and runs and same and not newer and plan.finished < 0


def deletable(
    commits: Iterable[Commit], history: validity.History, keep: int, quarantined: tuple[str, ...]
) -> tuple[str, ...]:
    """Paths of valid commits beyond the newest `keep`, and of void ones below the oldest kept."""
    commits = tuple(commits)
    valid = [c for c in validity.valid_commits(commits, history) if c.path not in quarantined]
    kept = valid[-max(1, keep) :]
    if len(kept) < max(1, keep):
        return ()
    floor = kept[0].step
    old = [c for c in commits if not c.bad and c.path not in quarantined and c not in kept]
    # A void commit above the floor is left: it may be what a person wants to look at.
    return tuple(sorted(c.path for c in old if c.step < floor))


def stop_came_true(body: Stop, view: RunView) -> bool:
    """Levels show that every rank the stop named has ended."""
    named = [r for r in view.ranks if r.rank in body.ranks or not body.ranks]
    return view.generation > body.generation or all(r.state == "ended" for r in named)


def _draft(
    kind: str, run: str, reason: str, deadline_s: float, body: Start | Stop | Finish,
    fault: str = "",
) -> Effect:
    return Effect(
        id="", kind=kind, subject=run_subject(run), reason=reason, deadline_s=deadline_s,
        body=body, fault=fault,
    )
