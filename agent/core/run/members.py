"""What a node can see of a run: its own launcher, other members' beats, the store's documents.

Owns the reading of views: which plan is the newest, who is heard of, which ranks belong to the
generation that runs.  Pure; a stale beat is unknown, never evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from ..model import (
    TRAINER,
    UNREADABLE,
    Beat,
    Commit,
    Condition,
    Doc,
    Now,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
    SnapshotView,
    StoreView,
    Value,
    node_subject,
)
from .plan import Member

Body = TypeVar("Body")
STALE_LEASES = 0.6  # three beats, one each fifth of a lease, are missing
# A permit's one, and a margin: for clocks, and until a killed process is gone.  Counted from when
# the document lists a node as missed (fences.py): from its last beat alone it would be too short.
FENCE_LEASES = 1.2
LOST_LEASES = 1.5  # the lease and its margin: an old leader and old permits have run out
ASKING = "its checks are not through yet"  # of a node's gate: no refusal, who leads waits for it


class NodeDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of node/NAME: what concerns a node beyond one run."""

    excluded: bool = False
    reason: str = ""
    by: str = ""
    fault: str = ""  # "" where a person excluded it
    draining: bool = False  # its ranks are still on their way to other nodes
    request: str = ""  # of a drain, whose answer is owed
    since_wall_s: float = 0.0  # of the present state
    strikes: tuple[float, ...] = ()  # wall_s of the exclusions for a fault, newest last


def doc_of(store: StoreView, key: str) -> Doc:
    """The document, or one of version 0 where the store has none."""
    return store.docs.get(key)


def body_of(doc: Doc, kind: type[Body]) -> Body | None:
    """None for an absent or unreadable body: content of the store is input from outside."""
    try:
        return msgspec.json.decode(doc.body, type=kind) if doc.body else None
    except UNREADABLE:
        return None


def read_plan(doc: Doc) -> Plan | None:
    return body_of(doc, Plan)


def read_node(doc: Doc) -> NodeDoc:
    return body_of(doc, NodeDoc) or NodeDoc()


def is_fresh(beat: Beat, now: Now, settings: Settings) -> bool:
    return not beat.lost and now.boot_s - beat.boot_s <= STALE_LEASES * settings.lease_s


def is_refused(held: str) -> bool:
    """Whether these are the words of a gate that lets no rank of the run begin on its node."""
    return held not in ("", ASKING)


def is_lost(last_boot_s: float, now: Now, settings: Settings) -> bool:
    return now.boot_s - last_boot_s > LOST_LEASES * settings.lease_s


def members(
    view: RunView, plan: Plan | None, beats: tuple[Beat, ...], store: StoreView, now: Now,
    settings: Settings, since_boot_s: float,
) -> tuple[Member, ...]:
    """Every node that has a launcher of this run, or a place in its plan, by name.

    since_boot_s: when this node began to listen; a member never heard of counts from then.
    """
    heard = {b.node: b for b in beats if b.run == view.run}
    docs = store.docs
    planned = {*plan.members, *plan.spares} if plan else set()
    if settings.single_node:
        heard, planned = {n: b for n, b in heard.items() if n == view.node}, set()
    heard = {n: b for n, b in heard.items() if not is_anothers(b.uid, view.uid)}
    rows = []
    for node in sorted({*heard, *planned, view.node}):
        beat = heard.get(node)
        mine = node == view.node
        last_s = beat.boot_s if beat else since_boot_s
        doc = docs.decoded(node_subject(node), read_node)
        rows.append(
            Member(
                node=node,
                fresh=view.connected if mine else bool(beat and is_fresh(beat, now, settings)),
                lost=not mine and (
                    is_lost(last_s, now, settings) or _is_dead(beat, view, now, settings)),
                fatal=beat.fatal if beat else "",
                excluded=doc.excluded and not doc.draining,
                draining=doc.draining,
                labels=beat.labels if beat else (), nproc=beat.nproc if beat else 0,
                held=(beat.held or ending_words(beat.shutdown)) if beat else "",
                node_rank=view.node_rank if mine else beat.node_rank if beat else -1,
            )
        )
    return tuple(rows)


def ending_words(shutdown: str) -> str:
    """What is against ranks on a node whose launcher was asked to end; "" = it was not."""
    return f"its launcher was {shutdown}" if shutdown else ""


def asked_to_end(
    view: RunView, plan: Plan, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> str:
    """Why the ranks of a plan in force are to leave it, where a launcher of theirs was asked to end
    and no step is agreed yet; "" = they go on."""
    if plan.park or plan.finished >= 0:
        return ""
    asked = {b.node: b.shutdown for b in beats if b.run == view.run and is_fresh(b, now, settings)}
    asked[view.node] = view.shutdown
    return next((f"{node}: {ending_words(asked[node])}" for _, node in plan.ranks
                 if asked.get(node)), "")


def _is_dead(beat: Beat | None, view: RunView, now: Now, settings: Settings) -> bool:
    """Known to be lost before its silence alone would say so.  A trainer's old commits are void; a
    script's old ranks may save until their permits have run out, and are waited for so long."""
    if beat is None or not beat.lost:
        return False
    return view.grade == TRAINER or now.boot_s - beat.boot_s > FENCE_LEASES * settings.lease_s


def is_anothers(uid: int, own: int) -> bool:
    """Whether two user ids are known, and are two."""
    return uid >= 0 and own >= 0 and uid != own


class Known(Value, frozen=True):
    """What of a run's state is known on any of its nodes: a spare that leads has none of it."""

    checkpoint_dir: str = ""
    commits: tuple[Commit, ...] = ()
    listed: tuple[tuple[str, frozenset[str]], ...] = ()  # node -> the paths of its list
    snapshots: tuple[tuple[str, SnapshotView], ...] = ()  # node -> the shards in memory there


def of_rank_0(view: RunView, plan: Plan, beats: tuple[Beat, ...]) -> Beat | None:
    """The last word of rank 0's node, however old it is; None where rank 0 is here."""
    host = next((node for rank, node in plan.ranks if rank == 0), view.node)
    if host == view.node:
        return None
    return next((b for b in beats if b.node == host and b.run == view.run
                 and not is_anothers(b.uid, view.uid)), None)


def known(
    view: RunView, beats: tuple[Beat, ...], now: Now, settings: Settings,
    heard: Mapping[str, tuple[Commit, ...]],
) -> Known:
    """Own first hand, the others' from fresh beats, and the checkpoints `heard` of by folder."""
    own = ((view.node, view.snapshot),) if view.snapshot else ()
    others = _others(view, beats, now, settings)
    folder = view.checkpoint_dir or next((b.checkpoint_dir for b in others if b.checkpoint_dir), "")
    commits = {c.path: c for c in view.commits}
    listed = [(view.node, frozenset(commits))] if view.commits else []
    for beat in others:
        if beat.checkpoint_dir != folder:
            continue
        # A beat names the newest alone: what is older than all of them may be there as well.
        oldest = min((c.step for c in beat.commits), default=0)
        more = (c.path for c in view.commits if c.step < oldest)
        if beat.commits:
            listed.append((beat.node, frozenset((*(c.path for c in beat.commits), *more))))
            _add(commits, beat.commits)
    if not settings.single_node:
        _add(commits, heard.get(folder, ()))
    more_snapshots = [(b.node, b.snapshot) for b in others if b.snapshot]
    return Known(folder, tuple(commits.values()), tuple(listed), (*own, *more_snapshots))


def kept_commits(
    view: RunView, plan: Plan, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> tuple[Commit, ...]:
    """What this node knows of the run's checkpoints, and what rank 0's node does: there alone the
    launcher hears that one was committed, and that it was read back."""
    beat = None if settings.single_node else of_rank_0(view, plan, beats)
    if (beat is None or beat.generation != plan.generation
            or beat.checkpoint_dir != plan.checkpoint_dir or not is_fresh(beat, now, settings)):
        return view.commits
    commits = {c.path: c for c in view.commits}
    _add(commits, beat.commits)
    return tuple(commits.values())


def _add(commits: dict[str, Commit], told: tuple[Commit, ...]) -> None:
    """By path.  Bad on one node is bad; read back on one is read back."""
    for one in told:
        mine = commits.get(one.path, one)
        commits[one.path] = replace(
            mine, bad=mine.bad or one.bad, verified=mine.verified or one.verified)


def _others(
    view: RunView, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> list[Beat]:
    """What the other nodes of a run say of it now."""
    return [] if settings.single_node else [
        b for b in beats if b.run == view.run and b.node != view.node
        and is_fresh(b, now, settings) and not is_anothers(b.uid, view.uid)]


def compiling(
    view: RunView, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> tuple[str, ...]:
    """What each node says of a compiler below its ranks, or of a lock that they wait for."""
    said = (view.compiling, *(b.compiling for b in _others(view, beats, now, settings)))
    return tuple(one for one in said if one)


def stopped_launchers(
    view: RunView, beats: tuple[Beat, ...], store: StoreView, now: Now, settings: Settings
) -> tuple[str, ...]:
    """The other nodes whose launcher of this run stands still; not one that the run is to leave,
    for its fault or by a person's word: nobody waits for that."""
    return tuple(sorted(
        b.node for b in _others(view, beats, now, settings) if b.suspended and not b.fatal
        and not store.docs.decoded(node_subject(b.node), read_node).excluded))


def conditions(
    view: RunView, own: tuple[Condition, ...], beats: tuple[Beat, ...], now: Now,
    settings: Settings,
) -> tuple[Condition, ...]:
    """What is so on any node of the run, and its ranks may wait for.  A node speaks for itself
    alone."""
    return (*own, *(replace(one, node=b.node) for b in _others(view, beats, now, settings)
                    for one in b.conditions))


def ranks_of(
    view: RunView, generation: int, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> tuple[RankView, ...]:
    """The generation's ranks, this node's own first hand, others' from fresh beats."""
    found = {r.rank: r for r in view.ranks if r.generation == generation}
    for beat in sorted(beats, key=lambda b: b.node):
        if beat.run != view.run or beat.node == view.node or not is_fresh(beat, now, settings):
            continue
        for rank in beat.ranks:
            if rank.generation == generation:
                found.setdefault(rank.rank, here(rank, beat, now))
    return tuple(found[n] for n in sorted(found))


def silent(
    view: RunView, plan: Plan, beats: tuple[Beat, ...], now: Now, settings: Settings
) -> tuple[str, ...]:
    """The nodes of the plan's ranks of which nothing is heard now: soon they are lost, or back."""
    if settings.single_node:
        return ()
    fresh = {b.node for b in beats if b.run == view.run and is_fresh(b, now, settings)}
    return tuple(sorted({node for _, node in plan.ranks} - fresh - {view.node}))


def here(rank: RankView, beat: Beat, now: Now) -> RankView:
    """Another machine's rank in this one's time.  What its clock shows means nothing here, and
    machines boot days apart: only how long ago a thing was, when the beat was sent, does."""
    ended, told_s = rank.ended, max(0.0, now.boot_s - beat.boot_s)
    if not beat.sent_boot_s or ended is None and not rank.start_boot_s:
        return replace(rank, told_s=told_s)
    ahead_s = beat.sent_boot_s - beat.boot_s
    if ended is not None:
        ended = replace(ended, boot_s=ended.boot_s - ahead_s)
    start_s = rank.start_boot_s - ahead_s if rank.start_boot_s else 0.0
    return replace(rank, ended=ended, start_boot_s=start_s, told_s=told_s)


def highest_generation(view: RunView, plan: Plan | None, beats: tuple[Beat, ...]) -> int:
    """Generations only grow: the highest in store, launchers, commits and agents' memories."""
    seen = [view.generation, plan.generation if plan else 0]
    seen += [c.generation for c in view.commits]
    seen += [c.generation for b in beats if b.run == view.run for c in b.commits]
    seen += [max(b.generation, b.top) for b in beats if b.run == view.run]
    return max(seen)


def plan_of_launcher(view: RunView) -> Plan:
    """What the launcher runs, for a store that knows nothing of it."""
    ranks = tuple((r.rank, r.node) for r in view.ranks)
    return Plan(
        run=view.run, generation=view.generation, members=(view.node,), ranks=ranks,
        resume=Resume(kind="fresh"), reason="as the launcher runs it")
