"""A rank that compiles while others wait for it: told as what it is, and never as a hang.

Owns what a launcher's word "rank 1: neuronx-cc" means: a graph that was compiled again in
mid-training, which is kept as a ticket; or a lock that a killed compile left, for which the rank
waits without end.  The first compile of a start is expected, and no ticket.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...model import WARN, Condition, RankView
from .ended import Cause
from .known_causes import LOCK

DETECTOR = "compile"
RECOMPILED = "graph_recompiled"
NAMED_MAX = 200  # characters of a path that a launcher waits for (worker/launcher/compiling.py)
RANK = re.compile(r"rank (\d{1,9})\b")


def compiling(
    said: Iterable[str], ranks: tuple[RankView, ...], resumed_step: int,
    conditions: tuple[Condition, ...],
) -> tuple[Cause, str] | None:
    """(what is said of a rank, what is done about it), None where no rank waits for a compiler;
    `said`: by the launchers of the run."""
    return next((told for one in said
                 if (told := _told(one, ranks, resumed_step, conditions)) is not None), None)


def _told(
    said: str, ranks: tuple[RankView, ...], resumed_step: int, conditions: tuple[Condition, ...]
) -> tuple[Cause, str] | None:
    named = RANK.match(said)
    if named is None:
        return None
    rank = next((one for one in ranks if one.rank == int(named[1])), None)
    if rank is None:
        return None
    who = rank.who
    left = lock_left(conditions, (said,))
    if left is not None:
        reason = f"{who} stands still for {rank.still_s:.0f} s before a lock: {left.reason}"
        return _cause(rank, "rank_hung", "hang", reason, said), (
            f"waits, and no restart is spent: rm {left.path}, and the run goes "
            "on by itself")
    if rank.step <= resumed_step:
        return None
    what = said.partition(": ")[2] or said
    reason = (f"{who} compiles in mid-training ({what}) at step {rank.step}, for "
              f"{rank.still_s:.0f} s: the other ranks wait for it")
    return _cause(rank, RECOMPILED, DETECTOR, reason, said), ""


def lock_left(conditions: Iterable[Condition], said: tuple[str, ...]) -> Condition | None:
    """The lock for which a rank waits, where a killed compile left that."""
    return next((one for one in conditions if one.fault == LOCK and one.path
                 and any(one.path[:NAMED_MAX] in words for words in said)), None)


def _cause(rank: RankView, fault: str, detector: str, reason: str, said: str) -> Cause:
    return Cause(
        fault=fault, generation=rank.generation, reason=reason, rank=rank.rank, node=rank.node,
        pid=rank.pid, step=rank.step, detector=detector, severity=WARN, confidence=1.0,
        evidence=(("step", str(rank.step)), ("compiles", said)))
