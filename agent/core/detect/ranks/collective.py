"""Proofs that the ranks' collectives cannot match: another operation or size, or one left out.

Owns two comparisons of what the pages hold, over live, parked and ended ranks alike: the rank that
raises is often the innocent one.  Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...model import RankView
from .ended import Cause

DETECTOR = "hang"
Bases = dict[int, int] | None  # rank -> number to count from; None: not comparable
SETTLED_S = 0.5  # a live rank must stand still this long before its page is compared
LOCKSTEP_STEPS = 4  # common steps of equal advance before a script's numbers are compared
REMEMBERED_MIN = 4  # collectives before the odd one, for a rank's own habit to say anything
TIE_CONFIDENCE = 0.8
COMMON_STEPS = 2  # differing ends of step that prove a skip while everything still moves


def proofs(
    ranks: tuple[RankView, ...], resumed_step: int, boot_s: float, bases: Bases
) -> Cause | None:
    """The cause, when the numbers prove one."""
    return mismatch(ranks, boot_s) or skipped(ranks, resumed_step, boot_s, bases)


def learn_bases(ranks: tuple[RankView, ...]) -> Bases:
    """Each rank's own number at a common step, once the ranks have shown that they count alike.

    A script may give its ranks different numbers of collectives for good (a pipeline's stages do),
    and only ranks that advanced by the same numbers for some steps can be compared: None until
    then, for ever where they never do.
    """
    tables = {r.rank: dict(r.step_seq) for r in ranks}
    if len(tables) < 2:
        return None
    common = sorted(set.intersection(*(set(t) for t in tables.values())))
    if len(common) < LOCKSTEP_STEPS:
        return None
    base = {rank: table[common[0]] for rank, table in tables.items()}
    if any(t[b] <= t[a] for t in tables.values() for a, b in zip(common, common[1:], strict=False)):
        return None  # steps without a collective: the ranks may take unequal numbers of them
    steps = {tuple(table[s] - base[rank] for s in common) for rank, table in tables.items()}
    return base if len(steps) == 1 else None


def mismatch(ranks: tuple[RankView, ...], boot_s: float) -> Cause | None:
    """Same sequence number, another operation or size.  The minority is to blame; in a tie nobody
    is.  A tie names as evidence the rank that made an operation for the first time, which may be
    the rank that went on as it should, to an evaluation for example."""
    tables = {r.rank: {n: (op, size) for n, op, size in r.flight} for r in ranks if _settled(r)}
    for number in sorted({n for table in tables.values() for n in table}):
        same = [r for r in ranks if number in tables.get(r.rank, ())]
        kinds = [tables[r.rank][number] for r in same]
        if len(set(kinds)) < 2:
            continue
        least = min(kinds.count(k) for k in kinds)
        odd = [r for r, k in zip(same, kinds, strict=True) if kinds.count(k) == least]
        tie = least == max(kinds.count(k) for k in kinds)
        new = [r.rank for r in same if _is_new(tables[r.rank], number)] if tie else []
        alone = odd[0] if len(odd) == 1 and not tie else None
        rows = tuple(
            (f"rank {r.rank}", f"collective {number}: {op} {size}")
            for r, (op, size) in zip(same, kinds, strict=True))
        what = f"different operations or sizes at collective {number}"
        if len(new) == 1:
            what += f"; rank {new[0]} alone never made one like its own before"
        cause = _cause("collective_mismatch", alone, same, rows, boot_s, what)
        return replace(cause, confidence=TIE_CONFIDENCE) if tie else cause
    return None


def _is_new(table: dict[int, tuple[str, str]], number: int) -> bool:
    """True when nothing remembered before `number` is like it: a loop repeats itself."""
    before = [kind for n, kind in table.items() if n < number]
    return len(before) >= REMEMBERED_MIN and table[number] not in before


def advance(ranks: tuple[RankView, ...]) -> bool:
    """Every step that a page remembers entered a collective."""
    rows = [[number for _, number in r.step_seq] for r in ranks]
    return all(a < b for row in rows for a, b in zip(row, row[1:], strict=False))


def skipped(
    ranks: tuple[RankView, ...], resumed_step: int, boot_s: float, bases: Bases
) -> Cause | None:
    """At the end of an equal step a rank has entered fewer collectives: it left one out."""
    if bases is None:
        return None
    # Of thousands of ranks nearly all show one of a few rows of numbers.
    rows_of = {r.rank: (r.step_seq, bases.get(r.rank, 0)) for r in ranks if r.step_seq}
    if len(rows_of) < 2:
        return None
    tables = {row: {step: number - row[1] for step, number in row[0]}
              for row in set(rows_of.values())}
    common = sorted(set.intersection(*map(set, tables.values())))
    differing = [s for s in common if len({t[s] for t in tables.values()}) > 1]
    if not differing or differing[-1] != common[-1]:
        return None
    trouble = any(r.state in ("parked", "ended") or r.still_s >= SETTLED_S for r in ranks)
    if len(differing) < COMMON_STEPS and not trouble:
        return None
    last = differing[-1]
    most = max(t[last] for t in tables.values())
    entered = {rank: tables[row][last] for rank, row in rows_of.items()}
    behind = [r for r in ranks if entered.get(r.rank, most) < most]
    alone = behind[0] if len(behind) == 1 else None
    rows = tuple((f"rank {n}", f"{entered[n]} collectives by the end of step {last}")
                 for n in sorted(entered))
    # The step before the first difference is good; with none in sight all of the generation is
    # in doubt, back to where it resumed.
    agreed = [s for s in common if s < differing[0]]
    first_bad = differing[0] if agreed else min(differing[0], resumed_step + 1)
    return _cause("collective_skipped", alone, behind, rows, boot_s,
                  f"a collective was left out by the end of step {differing[0]}",
                  bad_from=first_bad)


def _settled(rank: RankView) -> bool:
    return rank.state in ("parked", "ended") or rank.still_s >= SETTLED_S


def _cause(
    fault: str, rank: RankView | None, involved: list[RankView],
    rows: tuple[tuple[str, str], ...], boot_s: float, what: str, bad_from: int = 0,
) -> Cause:
    who = rank.who if rank else "culprit unknown"
    return Cause(
        fault=fault, generation=involved[0].generation, reason=f"{who}: {what}",
        rank=rank.rank if rank else -1, node=rank.node if rank else "",
        pid=rank.pid if rank else 0, place=rank.place if rank else "",
        step=max(r.step for r in involved), boot_s=boot_s,
        detector=DETECTOR, evidence=rows, bad_from=bad_from,
    )
