"""The run's next plan: members, ranks and resume point, as a pure function with its reason.

Owns what a plan contains.  Whether one is due (a cause was granted, a launcher is idle) is
agent/core/run/case.py's question; whether it may be written is the store's compare-and-set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..model import (
    OPAQUE,
    TRAINER,
    Commit,
    Lease,
    Now,
    Parked,
    Plan,
    RankView,
    Resume,
    SnapshotView,
    Value,
)
from . import validity
from .layout import Member as Member
from .layout import World, arranged, labelled

# How the reason begins where a run that has trained has nothing to go on from any more.
NOTHING_LEFT = "no checkpoint of this run is left to resume from"
NAMED_MAX = 3  # checkpoints that a reason names


class PlanView(Value, frozen=True):
    """All that a plan is made from."""

    run: str
    grade: str
    leader: bool
    highest: int  # generation: highest in store, launchers, commits
    nproc: int
    reason: str
    members: tuple[Member, ...]
    world: World = World()
    current: Plan | None = None
    ranks: tuple[RankView, ...] = ()  # of the broken generation; () when the run starts
    commits: tuple[Commit, ...] = ()
    checkpoint_dir: str = ""
    snapshots: tuple[tuple[str, SnapshotView], ...] = ()  # node -> the shards in memory there
    listed: tuple[tuple[str, frozenset[str]], ...] = ()  # node -> the checkpoints that it can see
    owner: int = -1
    bad_from: int = 0  # results of this step and later are wrong on every rank; 0 = none
    quarantined: tuple[str, ...] = ()
    unread: str = ""  # what is taken only where there is no other: a rank could not read it
    spent: tuple[tuple[str, int], ...] = ()
    granted: tuple[str, ...] = ()
    paused: bool = False
    peak: int = 0
    attempt: int = 0  # of the submission that goes on; 0 = it is a new one, or not known
    node: str = ""  # who plans


def plan_run(view: PlanView) -> tuple[Plan | None, str]:
    """(plan, why) or (None, why not).  The reason is never empty."""
    if not view.leader:
        return None, "another member leads this run, or nobody does"
    if view.paused:
        return None, "paused by an operator"
    nodes, why = layout(view)
    if not nodes:
        return None, why
    generation = view.highest + 1
    nproc = {m.node: m.nproc or view.nproc for m in view.members}
    ranks = tuple(enumerate(node for node in nodes for _ in range(nproc[node])))
    resume, keep = resume_from(view, dict(ranks))
    if why := all_put_aside(view, resume):
        return None, why
    history = validity.history_of(view.current, view.checkpoint_dir)
    # A node not heard of now may be the only one left later: it stays named, and so may lead.  So
    # does who leads, fit or not: by a plan without it others' permits would not ask it.
    placed = set(nodes)
    named = [m.node for m in view.members if m.node not in placed and (m.node == view.node or not (
        m.fatal or m.excluded or m.draining or m.held))]
    return Plan(
        run=view.run, generation=generation, members=nodes, ranks=ranks, resume=resume,
        reason=view.reason, keep=keep, spares=tuple(named),
        granted=view.granted, spent=view.spent, quarantined=view.quarantined,
        peak=max(view.peak, resume.step),
        history=validity.extend_history(history, generation, resume.step),
        checkpoint_dir=view.checkpoint_dir,
        other_histories=validity.other_histories(view.current, view.checkpoint_dir),
        owner=view.owner,
        labels=labelled(view.members, nodes) if view.grade == TRAINER and len(nodes) > 1 else (),
        attempt=view.attempt or generation,
    ), f"{view.reason}; resume: {resume.kind} at step {resume.step}"


def is_leader(run: str, node: str, leases: tuple[Lease, ...], now: Now) -> bool:
    """The lease is mine, and by my own clock it has not run out."""
    return any(
        lease.run == run and lease.holder == node and now.boot_s < lease.until_boot_s
        for lease in leases)


def layout(view: PlanView) -> tuple[tuple[str, ...], str]:
    """The nodes by slot: those of the current plan where fit, others replaced by spares.

    A member that is unknown holds the plan up until it is heard of again or lost: unknown is no
    reason to move anything.
    """
    by_name = {m.node: m for m in view.members}
    before = slots_of(view.current) if view.current else []
    unknown = [n for n in before if n in by_name and not (by_name[n].fresh or by_name[n].lost)]
    if unknown and view.ranks:
        return (), f"waiting until {', '.join(unknown)} is heard of again or lost"
    return arranged(view.world, view.members, before)


def resume_from(view: PlanView, places: dict[int, str]) -> tuple[Resume, tuple[int, ...]]:
    """(where to resume, ranks whose process lives on), newest proven state first."""
    history = validity.history_of(view.current, view.checkpoint_dir)
    quarantined = view.quarantined
    usable = tuple(c for c in view.commits if within(c.step, view.bad_from))
    nodes = set(places.values())
    # Of a shared folder all nodes list the same; what only some can see is on their own disks, and
    # is taken where there is nothing else: it may still be read and sent, and nothing is lost.
    lists = [paths for node, paths in view.listed if node in nodes]
    common = tuple(c for c in usable if all(_can_read(paths, c, usable, lists) for paths in lists))
    others = (*quarantined, view.unread)
    commit = (validity.newest_valid(common, history, others)
              or validity.newest_valid(usable, history, others)
              or validity.newest_valid(usable, history, quarantined))
    if view.grade == OPAQUE:
        return Resume(kind="fresh"), ()
    if view.grade != TRAINER:
        step = commit.step if commit else 0
        known = commit is not None or bool(view.ranks)
        return Resume(kind="own" if known else "fresh", step=step), ()
    survivor = survivor_resume(view, places)
    if survivor is not None:
        return survivor
    snapshot = whole_snapshot(view, places)
    if snapshot and _snapshot_usable(view, snapshot, commit):
        step = snapshot.step
        return Resume(kind="snapshot", step=step, generation=snapshot.generation), ()
    if commit:
        return Resume(
            kind="disk", step=commit.step, generation=commit.generation, path=commit.path
        ), ()
    return Resume(kind="fresh"), ()


def all_put_aside(view: PlanView, resume: Resume) -> str:
    """Why a run that would begin at step 0 must not: what it had trained is in checkpoints of this
    folder that were refused, and whether it is lost is for a person to say.  "" = it may."""
    folder, had = view.checkpoint_dir, view.current.peak if view.current else 0
    refused = [path for path in view.quarantined if path.rpartition("/")[0] == folder]
    history = validity.history_of(view.current, folder)
    left = validity.newest_valid(view.commits, history, view.quarantined)  # void or not
    trained = view.grade == TRAINER and max(view.peak, had) > 0
    if resume.kind != "fresh" or not trained or not refused or left:
        return ""
    more = len(refused) - NAMED_MAX
    named = ", ".join(refused[-NAMED_MAX:]) + (f" and {more} more" if more > 0 else "")
    return (f"{NOTHING_LEFT}: put aside as bad: {named}; set checkpoint.dir to a folder with a "
            "good copy to go on from it, or to an empty one to begin at step 0")


def _can_read(
    paths: frozenset[str], commit: Commit, known: tuple[Commit, ...], lists: list[frozenset[str]]
) -> bool:
    """Whether the node of this list can read a commit: it lists it, or has only not heard of it
    yet.  That is so where all lists have a path in common, so that they are of one folder (a
    marker is written on one node alone), and all that this one lists is older."""
    if commit.path in paths:
        return True
    one_folder = bool(frozenset.intersection(*lists))
    return one_folder and all(
        (c.generation, c.step) < (commit.generation, commit.step)
        for c in known if c.path in paths)


def survivor_resume(
    view: PlanView, places: dict[int, str]
) -> tuple[Resume, tuple[int, ...]] | None:
    """The highest step of which parked ranks hold every shard untorn; the others live on to
    receive it."""
    moved = heirs(view.current.ranks if view.current else tuple(places.items()), places)
    parked = [r for r in view.ranks
              if r.parked and r.state == "parked" and (r.rank, r.node) in moved]
    # A rank that never took over its generation's state holds nothing to resume from.
    floor = view.current.resume.step if view.current else 0
    steps = [
        r.parked.step
        for r in parked
        if r.parked and not r.parked.torn and r.parked.step >= floor
        and within(r.parked.step, view.bad_from)
    ]
    held = [r.parked for r in parked if r.parked]
    step = next((step for step in sorted(set(steps), reverse=True) if is_whole(held, step)), None)
    if step is None:
        return None
    generation = max(r.generation for r in parked)
    keep = tuple(sorted(moved[r.rank, r.node] for r in parked))
    return Resume(kind="survivor", step=step, generation=generation), keep


def heirs(
    before: tuple[tuple[int, str], ...], places: dict[int, str]
) -> dict[tuple[int, str], int]:
    """(rank, node) -> the rank that its process lives on as.  A node may have other ranks than
    before, where a smaller world moved it: its processes keep their order."""
    after = seats(places.items())
    return {(rank, seat[0]): after[seat] for seat, rank in seats(before).items() if seat in after}


def seats(ranks: Iterable[tuple[int, str]]) -> dict[tuple[str, int], int]:
    """(node, place among its ranks) -> rank."""
    found: dict[tuple[str, int], int] = {}
    count = defaultdict[str, int](int)
    for rank, node in sorted(ranks):
        found[node, count[node]] = rank
        count[node] += 1
    return found


def is_whole(held: list[Parked], step: int) -> bool:
    """Whether these have every shard after `step` steps, or can end that step by themselves."""
    good = [p for p in held if not p.torn and (p.step == step or (p.ready and p.step + 1 == step))]
    shards = max((p.shards for p in good), default=1)
    return len({p.shard for p in good if p.shards == shards and p.shard < shards}) == shards


def within(step: int, bad_from: int) -> bool:
    """True for state made before the first step whose result is wrong."""
    return bad_from == 0 or step < bad_from


def whole_snapshot(view: PlanView, places: dict[int, str]) -> SnapshotView | None:
    """What all nodes of the new world hold in memory of one step, each the shards of its own ranks:
    a world whose ranks moved, or that lost a node, has none."""
    if view.current is None or dict(view.current.ranks) != places:
        return None
    held, nodes = dict(view.snapshots), set(places.values())
    shards = dict.fromkeys(nodes, 0)
    for node in places.values():
        shards[node] += 1
    found = [held[node] for node in sorted(nodes) if node in held]
    same = {(one.generation, one.step) for one in found}
    if len(nodes) > 1 and any(one.generation != view.current.generation for one in found):
        return None  # of a generation whose ranks may have been elsewhere
    if len(found) < len(nodes) or len(same) != 1:
        return None
    return found[0] if all(held[node].shards >= shards[node] for node in nodes) else None


def _snapshot_usable(view: PlanView, snapshot: SnapshotView, commit: Commit | None) -> bool:
    history = validity.history_of(view.current, view.checkpoint_dir)
    newer = commit is None or snapshot.step > commit.step
    valid = validity.is_valid(snapshot.generation, snapshot.step, history)
    return newer and valid and within(snapshot.step, view.bad_from)


def slots_of(plan: Plan) -> list[str]:
    """Nodes of a plan in the order of their ranks."""
    return list(dict.fromkeys(node for _, node in sorted(plan.ranks)))
