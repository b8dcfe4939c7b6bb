"""Which commits count: the chain rule, as a pure function of manifests and plan history.

Owns the rule that fences commits (docs/decisions: fence commits, not clocks).  It decides nothing
else: not which commit is read, and never from a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..model import Commit, Plan

# A plan travels in one 64 KiB packet; 256 entries of two integers stay far below that.
HISTORY_MAX = 256

OTHERS_MAX = 4  # folders beside the present one whose histories are kept

History = tuple[tuple[int, int], ...]


def is_valid(generation: int, step: int, history: History) -> bool:
    """True unless a later plan resumed below this step: then what was written is void."""
    return not any(later > generation and resumed < step for later, resumed in history)


def history_of(plan: Plan | None, checkpoint_dir: str) -> History:
    """What the plans so far say about the commits in one folder.

    A run's name may come again with another folder, and then with the first: where one resumed
    says nothing about what stands in the other.
    """
    if plan is None:
        return ()
    if plan.checkpoint_dir == checkpoint_dir:
        return plan.history
    return dict(plan.other_histories).get(checkpoint_dir, ())


def other_histories(plan: Plan | None, checkpoint_dir: str) -> tuple[tuple[str, History], ...]:
    """The histories of all folders but one, the latest last, bounded."""
    if plan is None:
        return ()
    others = [(path, kept) for path, kept in plan.other_histories if path != checkpoint_dir]
    if plan.checkpoint_dir != checkpoint_dir and plan.history:
        others.append((plan.checkpoint_dir, plan.history))
    return tuple(others[-OTHERS_MAX:])


def valid_commits(commits: Iterable[Commit], history: History) -> tuple[Commit, ...]:
    """The commits on the one chain, oldest first; those known to be bad are left out."""
    chain = [c for c in commits if not c.bad and is_valid(c.generation, c.step, history)]
    return tuple(sorted(chain, key=lambda c: (c.generation, c.step, c.path)))


def newest_valid(
    commits: Iterable[Commit], history: History, quarantined: tuple[str, ...] = ()
) -> Commit | None:
    """The commit to resume from; on a chain the newest generation also has the highest step."""
    usable = [c for c in valid_commits(commits, history) if c.path not in quarantined]
    return usable[-1] if usable else None


def extend_history(history: History, generation: int, step: int) -> History:
    """History with one more plan, kept short without making any void commit valid again.

    An entry is redundant once a later plan resumed at or below it.  Beyond HISTORY_MAX the two
    oldest entries become one that voids at least as much as both.
    """
    kept = [(g, s) for g, s in history if s < step and g < generation]
    kept.append((generation, step))
    while len(kept) > HISTORY_MAX:
        (_, lower), (newer, _) = kept[0], kept[1]
        kept[:2] = [(newer, lower)]
    return tuple(kept)
