"""Parts of the state that change ranks between two steps, and the proof that all of them arrived.

Owns the going over from one layout to another within a generation, and the exchange for it, which
checkpoint/restore.py also asks for where a world became smaller or larger.  Must not decide that
one is due: the strategy does (engines/strategy.py's Movable).  Until every rank has said that it
holds its new part whole, nobody has left the old one; a rank that is lost before leaves the others
with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint import format as files
from .config import ConfigError
from .engines.strategy import Layout, Move
from .group import Group
from .state import State

Piece = tuple[str, int, int]  # of a tensor: its name, the first byte that is held, and how many


class Moved(NamedTuple):
    """What came of it, the same on every rank but for `state`."""

    state: State | None  # of this rank under the new layout; None: all stay with the old one
    sent_bytes: int  # by all ranks together
    seconds: float  # of the slowest rank
    why: str  # not, on the rank that knows


def go_over(group: Group, strategy: Any, before: State, layout: Layout, elastic: Any) -> Moved:
    """Every rank calls it behind the same step.  Raises RuntimeError when a peer is lost; this rank
    then holds its old part, and the new one too if that is whole."""
    began, after, why = time.monotonic(), before, ""
    elastic.phase("compile")  # the model is traced again: no peer is waited for
    try:
        after = strategy.hold(layout, group.rank)
    except (ConfigError, RuntimeError, MemoryError) as error:  # no memory, or no such cut
        why = " ".join(str(error).split())[:200] or type(error).__name__
    elastic.phase("collective")
    sent = 0
    if group.any(bool(why)):
        why = why or "another rank cannot hold its part"
    else:
        sent, good = carry(group, before, after, strategy.moves(group.layout, layout))
        after.empty = not good
        if group.any(not good):
            why = "what was sent arrived damaged"
    took = torch.tensor([sent, time.monotonic() - began], dtype=torch.float64, device=group.device)
    every = [one.tolist() for one in group.gather(took)]
    return Moved(None if why else after, int(sum(one[0] for one in every)),
                 max(one[1] for one in every), why)


def missing(group: Group, before: State | None, after: State) -> list[Move] | None:
    """What ranks have to send each other so that each has its `after`, where each of them knows of
    its own `before` alone.  None where a part of it is with nobody.  All ranks call it."""
    number, mine = group.asked(), [_pieces(before) if before else [], _pieces(after)]
    group.store.set(f"held/{number}/{group.rank}", json.dumps(mine))
    told = [json.loads(text) for text in group.store.multi_get(
        [f"held/{number}/{rank}" for rank in range(group.world)])]
    holders = dict[Piece, list[int]]()
    for rank, (held, _) in enumerate(told):
        for piece in held:
            holders.setdefault(tuple(piece), []).append(rank)
    moves = list[Move]()
    for rank, (_, pieces) in enumerate(told):
        for piece in map(tuple, pieces):
            ranks = holders.get(piece)
            if ranks is None:
                return None
            if rank not in ranks:
                moves.append(Move(piece[0], ranks[rank % len(ranks)], rank))
    return moves


def carry(
    group: Group, before: State | None, after: State, moves: Sequence[Move]
) -> tuple[int, bool]:
    """Fills `after` from what this rank holds and what others send; returns the bytes that this
    rank sent, and whether what it holds now is whole and as it was."""
    before = before or State({}, after.data.device)  # of a rank that has nothing
    here = {name for name, _, _ in {*_pieces(before)} & {*_pieces(after)}}
    for name in here:
        after.views[name].copy_(before.views[name])
    key, rank = f"moved/{group.asked()}", group.rank
    pairs = {pair: [move.name for move in several] for pair, several in groupby(
        sorted(moves, key=_pair), key=_pair)}
    sends, receives, sent = list[Any](), list[tuple[int, list[str], Tensor, Any]](), 0
    for (source, target), names in pairs.items():
        if source == rank:
            flat = torch.cat([_bytes(before, name) for name in names])
            group.store.set(f"{key}/{source}/{target}", _digest(flat))
            sends.append((dist.isend(flat, target, group=group.apart), flat))
            sent += flat.numel()
        elif target == rank:
            flat = torch.cat([_bytes(after, name) for name in names])
            receives.append((source, names, flat, dist.irecv(flat, source, group=group.apart)))
    arrived, good = here, True
    for source, names, flat, work in receives:
        work.wait()
        good &= group.store.get(f"{key}/{source}/{rank}").decode() == _digest(flat)
        arrived = arrived | set(names)
        parts = flat.split([_bytes(after, name).numel() for name in names])
        for name, part in zip(names, parts):
            _bytes(after, name).copy_(part)
    for work, _ in sends:
        work.wait()
    good &= all(entry.name in arrived for entry in after.entries)
    # Those that hold the same compare all of it, as after every restore.
    if rank == group.copies[0]:
        group.store.set(f"{key}/shard/{group.shard}", after.digest())
    return sent, good and group.store.get(f"{key}/shard/{group.shard}").decode() == after.digest()


def _pieces(state: State) -> list[Piece]:
    return [(entry.name, entry.begin, entry.nbytes) for entry in state.entries]


def _pair(move: Move) -> tuple[int, int]:
    return move.source, move.target


def _bytes(state: State, name: str) -> Tensor:
    """A tensor's place in the state, as bytes."""
    entry = state.place(name)
    return state.data[entry.offset : entry.offset + entry.nbytes]


def _digest(flat: Tensor) -> str:
    return files.digest(memoryview(flat.cpu().numpy()))  # type: ignore[arg-type]
