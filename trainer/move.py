"""Parts of the state that change ranks between two steps, and the proof that all of them arrived.

Owns the going over from one layout to another within a generation.  Must not decide that one is
due: the strategy does (engines/strategy.py's Movable).  Until every rank has said that it holds its
new part whole, nobody has left the old one; a rank that is lost before leaves the others with it.
"""

from __future__ import annotations

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
    except (ConfigError, RuntimeError) as error:  # no memory, or torch cannot cut it so
        why = " ".join(str(error).split())[:200] or type(error).__name__
    elastic.phase("collective")
    sent = 0
    if group.any(bool(why)):
        why = why or "another rank cannot hold its part"
    else:
        sent, good = _carry(group, before, after, strategy.moves(group.layout, layout))
        after.empty = not good
        if group.any(not good):
            why = "what was sent arrived damaged"
    took = torch.tensor([sent, time.monotonic() - began], dtype=torch.float64, device=group.device)
    every = [one.tolist() for one in group.gather(took)]
    return Moved(None if why else after, int(sum(one[0] for one in every)),
                 max(one[1] for one in every), why)


def _carry(
    group: Group, before: State, after: State, moves: Sequence[Move]
) -> tuple[int, bool]:
    """Fills `after` from what this rank holds and what others send; returns the bytes that this
    rank sent, and whether what it holds now is whole and as it was."""
    here = {entry.name for entry in before.entries}
    for entry in after.entries:
        if entry.name in here:
            after.views[entry.name].copy_(before.views[entry.name])
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


def _pair(move: Move) -> tuple[int, int]:
    return move.source, move.target


def _bytes(state: State, name: str) -> Tensor:
    """A tensor's place in the state, as bytes."""
    entry = state.place(name)
    return state.data[entry.offset : entry.offset + entry.nbytes]


def _digest(flat: Tensor) -> str:
    return files.digest(memoryview(flat.cpu().numpy()))  # type: ignore[arg-type]
