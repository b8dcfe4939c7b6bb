"""How far training came: what the ranks' levels teach about steps, waits and numbers.

Owns RunState.progress and what is added to its history.  It suspects nobody: causes.py does.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..detect.ranks import collective
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..model import OPAQUE, TRAINER, Plan, RankView
from ..series.wait_history import Seen
from .state import Context, RunState

BACKOFF_MAX = 64.0
OOM_PIDS_MAX = 64


def learn(
    ctx: Context, state: RunState, plan: Plan | None, ranks: tuple[RankView, ...],
    seen: dict[int, Seen],
) -> None:
    """Windows, the highest step, kernel lines about our pids; `seen` is replaced by this look."""
    now = state.progress
    peak_step, peak_boot_s = now.peak_step, now.peak_boot_s
    for rank in ranks:
        if rank.step > peak_step:
            peak_step, peak_boot_s = rank.step, ctx.now.boot_s - rank.still_s
    killed = ends.oom_pids(ctx.observed.events, tuple(rank.pid for rank in ctx.view.ranks))
    if not ctx.frozen:
        state.history.look(ranks, seen, ctx.now.boot_s)
    bases, generation = now.bases, now.bases_generation
    if plan is not None and generation != plan.generation:
        # The trainer's pages count from the end of its restore; a script's must be learnt.
        bases, generation = {} if ctx.view.grade == TRAINER else None, plan.generation
    if ctx.view.grade != TRAINER and (bases is None or not collective.advance(ranks)):
        bases = collective.learn_bases(ranks)
    state.progress = replace(
        now, peak_step=peak_step, peak_boot_s=peak_boot_s, bases=bases,
        bases_generation=generation, oom_pids=(*now.oom_pids, *killed)[-OOM_PIDS_MAX:],
    )


def broken_off(state: RunState, cause: Cause, by_cost: bool, boot_s: float) -> None:
    """A cause was found: what came after the last one is what this generation earned."""
    now = state.progress
    backoff, step = now.backoff, now.backoff_step
    if by_cost:
        # A slow step that was cut short would be slow again: the next wait there is longer.
        backoff = min(BACKOFF_MAX, backoff * 2) if step == cause.step else 2.0
        step = cause.step
    state.progress = replace(
        now, earned_steps=now.peak_step - now.base_step, base_step=now.peak_step,
        broken_boot_s=boot_s, backoff=backoff, backoff_step=step,
    )


def goes_on(ctx: Context, state: RunState, ranks: tuple[RankView, ...]) -> bool:
    """Whether training goes on: on every rank a step that nobody had finished before.

    A script's step counter may begin anew in each process, so its first finished step counts; an
    opaque job shows no steps, so its running does.
    """
    if all(r.ended is not None and ends.ended_well(r.ended) for r in ranks):
        return True
    if any(r.state != "running" and r.ended is None for r in ranks):
        return False
    if ctx.view.grade == OPAQUE:
        return True
    if ctx.view.grade != TRAINER:
        return all(r.step >= 1 for r in ranks)
    return all(r.step > state.progress.base_step for r in ranks)


def restarted(state: RunState, first_boot_s: float) -> None:
    """A restart is over: what it took is what the next one will cost."""
    state.history.add_restart(max(0.0, first_boot_s - state.progress.broken_boot_s))


def new_boot(state: RunState, boot_s: float) -> None:
    """Another boot's seconds mean nothing here."""
    now = state.progress
    state.progress = replace(now, broken_boot_s=min(now.broken_boot_s, boot_s))
