"""How a rank comes by proven state at the start of a generation.

Owns the four ways: fresh, from a survivor, from snapshots, from disk.  Every one ends with all
ranks comparing the digest of all their bytes.  Must not train, and must not choose the way: the
plan did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..config import ConfigError
from ..group import BadCheckpoint, Group, RestoreFailed
from ..move import carry, missing
from ..state import Covered, State
from . import format as files

CHUNKS = 8  # of the state, so that one is digested while the next ones travel
TRANSFERS = 2  # a transfer whose digest differs is tried once more
# What a rank says of a checkpoint: its bytes are wrong; it could not read them; rank 0 reads all
# that it needs, and sees that something else is not there.
BAD, UNREAD, LACKS = "bad", "unread", "lacks"
TELL_S = 5.0  # for all ranks to have read what the others say


@dataclasses.dataclass
class Held:
    """What this process holds in memory: `step` optimizer steps, unless torn."""

    step: int = 0
    torn: bool = True  # nothing yet
    snapshot_every: int = 0  # 0 = not chosen yet
    shard: int = 0
    shards: int = 1
    ready: bool = False  # and all gradients of the next step: another's norm is enough to end it
    norm: float = 0.0  # of the gradients of the last step

    @property
    def told(self) -> tuple[int, ...]:
        """As Member.held in engines/strategy.py."""
        if not self.torn:
            return self.shard, self.shards
        return (-1, 0) if self.step else ()


def restore(
    assignment: Any, group: Group, state: State, held: Held, elastic: Any,
    begin: Callable[[], dict[str, Any]], finish: Callable[[int, float], None],
    kept: State | None = None,
) -> dict[str, Any]:
    """Brings `state` and `held` to where the generation starts; returns what it goes on from.
    `begin()` makes the state of step 0, `finish(step, norm)` ends step number `step` with the
    gradients that this rank has kept.  `kept`: what it held, where that is cut otherwise now.

    Raises RestoreFailed (BadCheckpoint) on every rank alike, ConfigError if the state on disk
    belongs to another model, RuntimeError when a peer is lost.
    """
    kind, step, path = assignment.resume_kind, assignment.resume_step, assignment.resume_path
    if kind == "newest":
        kind, step, path = _newest(group, Path(path) if path else None, elastic)
    if state.empty and kept is None:
        held.torn = True  # what this process held was another part
    if kind == "survivor":
        _from_survivor(group, state, held, step, finish, kept)
        state.empty = False
        return {"from": kind, "step": held.step}
    # The cadence is chosen anew by all ranks together: one that is new knows none.
    held.torn, held.ready, held.snapshot_every = True, False, 0
    began: dict[str, Any] = {"from": kind, "step": step, "path": path}
    if kind == "fresh":
        began, step = _begin(group, begin), 0
    elif kind == "snapshot":
        problem = _from_snapshot(assignment, state, elastic)
        if group.any(bool(problem)):
            raise RestoreFailed(problem or "another rank's snapshot shards do not prove")
    elif kind == "disk":
        began["step"] = step = _from_disk(Path(path), group, state, elastic, assignment.node)
    else:
        raise RestoreFailed(f"resume_kind {kind!r} is not known to this trainer")
    if _differs(group, state.digest(), group.copies[0], "state"):
        raise RestoreFailed("ranks hold different bytes after the restore: same code and torch?")
    held.step, held.torn, state.empty = step, False, False
    held.shard, held.shards = group.shard, group.layout.shards
    return began


def _begin(group: Group, begin: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Step 0.  One rank that cannot read what it begins from speaks for all."""
    problems, began = list[str](), dict[str, Any]()
    try:
        began = begin()
    except ConfigError as error:
        problems = list(error.problems)
    group.tell("begin", problems)
    if group.any(bool(problems)):
        # Nobody's words where a rank is of the release before: it does not say any.
        others = [f"rank {rank}: {said[0]}"
                  for rank, said in enumerate(group.all_say("begin")) if said]
        with contextlib.suppress(RuntimeError):  # whoever leaves first takes the store along
            group.meet("begin/told", TELL_S)
        raise ConfigError(problems or others[:1] or ["another rank cannot begin; its log says why"])
    return began


def _differs(group: Group, mine: str, source: int, key: str) -> bool:
    """Compares the digests of all bytes that several ranks hold, through the store, which did not
    carry the bytes.  `source` is the one of them that is believed."""
    key = f"digest/{key}/{group.shard}"
    if group.rank == source:
        group.store.set(key, mine)
    return group.any(group.store.get(key).decode() != mine)


# ------------------------------------------------------------------------------------ survivor


def _from_survivor(
    group: Group, state: State, held: Held, step: int, finish: Callable[[int, float], None],
    kept: State | None,
) -> None:
    """Resumes from the newest step of which every shard is held untorn: the ranks that hold it
    send it to those that hold the same shard in this generation."""
    group.store.set(f"held/{group.rank}", json.dumps(dataclasses.asdict(held)))
    keys = [f"held/{rank}" for rank in range(group.world)]
    ranks = [Held(**json.loads(value)) for value in group.store.multi_get(keys)]
    agreed = agreed_step(ranks, group.layout)
    if agreed is None and group.any(kept is not None):
        _from_other_cuts(group, state, held, ranks, step, kept)
        return
    if agreed is None:
        raise RestoreFailed("no step is held untorn by ranks that have all of it")
    if step >= 0 and agreed != step:
        raise RestoreFailed(f"survivors hold step {agreed}, the plan resumes from step {step}")
    places = group.layout.places
    holders = [r for r in group.copies if holds(ranks[r], agreed, places[r].shard, group.layout)]
    if group.rank in holders and held.step < agreed:
        norm = next(r.norm for r in ranks if not r.torn and r.step == agreed)
        held.torn = True
        finish(held.step, norm)
        held.step, held.torn, held.norm = agreed, False, norm
    held.ready = False
    needy = [r for r in group.copies if r not in holders]
    held.snapshot_every = max(r.snapshot_every for r in ranks if not r.torn)
    if group.rank in needy:
        held.torn = True  # until the last byte is proven
    for attempt in range(TRANSFERS):
        digest = _transfer(group, state, holders, needy)
        if not _differs(group, digest, holders[0], f"{agreed}/{attempt}"):
            held.step, held.torn = agreed, False
            held.shard, held.shards = group.shard, group.layout.shards
            return
    raise RestoreFailed(f"state of step {agreed} arrived damaged {TRANSFERS} times")


def _from_other_cuts(
    group: Group, state: State, held: Held, ranks: Sequence[Held], step: int, kept: State | None
) -> None:
    """Resumes from ranks that hold all of `step` between them, cut into other shards: each sends
    what it held to those whose part it has become, and only what these have not held."""
    mine = kept if not held.torn and held.step == step else None
    moves = missing(group, mine, state)
    if moves is None:
        raise RestoreFailed(f"not all of step {step} is held by survivors, whatever its cut")
    _, good = carry(group, mine, state, moves)
    if group.any(not good):
        raise RestoreFailed(f"state of step {step}, cut anew, arrived damaged")
    held.snapshot_every = max(r.snapshot_every for r in ranks if not r.torn)
    held.step, held.torn, held.ready = step, False, False
    held.shard, held.shards = group.shard, group.layout.shards


def agreed_step(ranks: Sequence[Held], layout: Any) -> int | None:
    """The newest step of which every shard is held, by a rank that keeps this shard."""
    for step in sorted({r.step for r in ranks if not r.torn}, reverse=True):
        held = {place.shard for r, place in zip(ranks, layout.places)
                if holds(r, step, place.shard, layout)}
        if len(held) == layout.shards:
            return step
    return None


def holds(rank: Held, step: int, shard: int, layout: Any) -> bool:
    """Whether this rank has that shard after `step` steps, or can make it: it has the gradients,
    and whoever ended that step has told their norm."""
    same = not rank.torn and (rank.shard, rank.shards) == (shard, layout.shards)
    return same and (rank.step == step or rank.ready and rank.step == step - 1)


def _transfer(group: Group, state: State, holders: list[int], needy: list[int]) -> str:
    """One flat buffer a shard, point to point: several holders serve several newcomers at once.

    Returns the digest of this rank's bytes, taken while they travel: 9 ms of 50 for 64 MB.
    """
    chunks = state.data.chunk(CHUNKS)
    if group.rank in needy:
        source = holders[needy.index(group.rank) % len(holders)]
        return state.digest_while([dist.irecv(c, source, tag=i) for i, c in enumerate(chunks)])
    sends = [
        dist.isend(chunk, rank, tag=number)
        for place, rank in enumerate(needy)
        if holders[place % len(holders)] == group.rank
        for number, chunk in enumerate(chunks)
    ]
    digest = state.digest()
    for send in sends:
        send.wait()  # type: ignore[union-attr]
    return digest


# ------------------------------------------------------------------------------------ snapshot


def _from_snapshot(assignment: Any, state: State, elastic: Any) -> str:
    """Fills the state from the shards in memory; returns what is wrong, "" if nothing."""
    wanted = (assignment.resume_step, assignment.resume_generation)
    shards = {s.rank: s for s in elastic.snapshot_shards() if (s.step, s.generation) == wanted}
    worlds = {shard.world for shard in shards.values()}
    name = f"snapshot of step {wanted[0]} (generation {wanted[1]})"
    if len(worlds) != 1:
        return f"{name}: no shards" if not worlds else f"{name}: shards of several worlds"
    covered: Covered = {}
    for rank in range(worlds.pop()):
        shard = shards.get(rank)
        if shard is None:
            return f"{name}: shard of rank {rank} is missing"
        content = memoryview(bytes(shard.data))  # what was proven is what is used
        if files.digest(content) != shard.digest:
            return f"{name}: shard of rank {rank} differs from what was written"
        try:
            state.fill(*files.read_trailer(content), covered)
        except (files.CheckpointError, ValueError) as error:
            return f"{name}: shard of rank {rank}: {error}"
    if missing := state.missing(covered):
        return f"{name}: tensor {missing!r} is in no shard"
    state.written()
    return ""


# ------------------------------------------------------------------------------------ disk


def _newest(group: Group, root: Path | None, elastic: Any) -> tuple[str, int, str]:
    """Without a launcher rank 0 chooses for all: the newest checkpoint that proves."""
    if group.rank == 0:
        found, passed = files.newest_valid(root) if root else (None, [])
        unread, refused = "", list[str]()
        for one, problem in passed:
            if problem.unread:
                unread = unread or f"{one.path}: {problem}, and no other checkpoint proves"
                elastic.report("checkpoint_failed", f"{one.path}: {problem}; left where it is")
                continue
            place = _put_aside(Path(one.path), problem.what)
            elastic.report("checkpoint_bad", f"{one.path}: {problem}; moved to {place}")
            refused.append(str(place))
        if root and not found and not unread:
            refused = refused or files.put_aside(root)  # by a try before this one
        # What was trained may all be in there: nothing begins anew beside it.
        group.store.set("newest", json.dumps([found, unread, refused]))
    found, unread, refused = json.loads(group.store.get("newest"))
    if found:
        return "disk", int(found[1]), str(found[2])
    if unread:
        raise RestoreFailed(unread)
    if refused:
        raise BadCheckpoint(_all_refused(refused))
    return "fresh", 0, ""


def refusal(root: Path) -> str:
    """Why nothing may begin at step 0 here: all checkpoints of this folder were put aside, by a
    run that the agent need not have known.  "" = it may."""
    refused = files.put_aside(root)
    left = any(not one.bad for one in files.listing(root))
    return _all_refused(refused) if refused and not left else ""


def _all_refused(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if paths[1:] else ""
    # What to do comes first: a long reason is cut.
    return ("no checkpoint is left to resume from; set checkpoint.dir to a folder with a good "
            "copy, or to an empty one to begin at step 0 (or move quarantine/ away); put aside as "
            f"bad: {paths[0]}{more}")


def _from_disk(path: Path, group: Group, state: State, elastic: Any, node: str) -> int:
    """Every rank proves every byte that it uses; one that finds a fault speaks for all.

    It is put aside where bytes were read that differ, or where rank 0 lacks a file as well.  What
    one rank alone cannot read, as on a node without the mount, stays where it is for the others.
    """
    fault, problem, wrong_model, step = "", "", "", 0
    try:
        step = read_into(path, state)
    except files.CheckpointError as error:
        unread = (files.problem_of(error).unread if group.rank == 0
                  else isinstance(error, files.Unreadable))
        fault, problem = UNREAD if unread else BAD, str(error)
    except ConfigError as error:
        wrong_model = str(error)
    lacks = files.lacking(path) if group.rank == 0 and not fault else ""
    # Told before all ask whether anybody has found a fault: behind that all of them know which.
    group.tell("restore", [LACKS, lacks, node] if lacks else [fault, problem, node])
    if group.any(bool(wrong_model)):
        raise ConfigError([wrong_model or "another rank: the checkpoint is of another model"])
    if not group.any(bool(fault)):
        return step
    words = group.all_say("restore")  # none where a rank is of the release before
    with contextlib.suppress(RuntimeError):  # whoever leaves first takes the others' connections
        group.meet("restore/told", TELL_S)
    known = [one[1] for kind in (BAD, LACKS) for one in words if one[0] == kind]
    if known or fault == BAD:
        problem = known[0] if known else problem
        if group.rank == 0:
            place = _put_aside(path, problem.partition(": ")[2])
            elastic.report("checkpoint_bad", f"{path}: {problem}; moved to {place}")
            elastic.bad_checkpoint(str(path), problem)
        raise BadCheckpoint(f"{path}: {problem}")
    said = [f"rank {rank} on {one[2]}: {one[1]}" for rank, one in enumerate(words) if one[0]]
    raise RestoreFailed(f"{path}: {said[0] if said else problem or 'another rank has no proof'}")


def _put_aside(path: Path, why: str) -> Path:
    """Where it lies from now on; a disk that takes no other name leaves it where it is."""
    with contextlib.suppress(OSError):
        return files.quarantine(path, why)
    return path


def read_into(path: Path, state: State) -> int:
    """Proves and loads a checkpoint of any world; returns its step.

    Raises CheckpointError naming the file, ConfigError when it is whole but of another model.
    """
    manifest = files.read_manifest(path)
    model = manifest.get("model")
    if manifest.get("weights_only"):
        raise ConfigError([f"{path} holds weights alone, and cannot be resumed from: set init_from "
                           "to it, and checkpoint.dir to another directory"])
    if not isinstance(model, dict) or model.get("fingerprint") != state.fingerprint:
        raise ConfigError([_other_model(path, model if isinstance(model, dict) else {}, state)])
    listed = {item["file"]: item for item in manifest["shards"]}
    covered: Covered = {}
    for rank in range(manifest["world"]):
        name = files.shard_name(rank, manifest["world"])
        table = json.loads(_proven(path, f"{name}.json", listed))
        entries = files.read_entries(table, f"{name}.json")
        if not state.wants(entries):
            continue
        try:
            content = memoryview(_proven(path, f"{name}.bin", listed))
            state.fill(entries, content, covered)
        except ValueError as error:
            raise files.CheckpointError(f"{name}.json: {error}") from None
    if missing := state.missing(covered):
        raise files.CheckpointError(f"{files.MANIFEST}: tensor {missing!r} is in no shard")
    state.written()
    return int(manifest["step"])


def _proven(path: Path, file: str, listed: dict[str, Any]) -> bytes:
    if file not in listed:
        raise files.CheckpointError(f"{files.MANIFEST}: does not list {file}")
    try:
        content = (path / file).read_bytes()
    except OSError as error:
        raise files.not_read(file, error) from None
    files.check_file(path, listed[file], content)
    return content


def _other_model(path: Path, model: dict[str, Any], state: State) -> str:
    return (
        f"checkpoint {path} holds another model ({model.get('class')}, "
        f"{model.get('parameters')} parameters) than this run builds ({state.model_class}, "
        f"{state.parameters} parameters): set model and model_options as they were, "
        f"or checkpoint.dir to another directory"
    )
