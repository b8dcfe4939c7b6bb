"""How far training came: what the ranks' levels teach about steps, waits and numbers.

Owns RunState.progress and what is added to its history.  It suspects nobody: causes.py does.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from ..detect.ranks import collective
from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..model import OPAQUE, TRAINER, Plan, RankView
from ..series import gradient_pace
from ..series.wait_history import Seen
from .state import Context, RunState

BACKOFF_MAX = 64.0
QUICK_S = 5.0  # a generation that broke sooner hardly began
QUICK_FREE = 5  # of them in a row are answered at once
QUICK_WAIT_S, QUICK_WAIT_MAX_S = 0.1, 30.0  # behind the next one, doubled each time
OOM_PIDS_MAX = 64
# A script's or a command's life that is no loop: so many steps, or so long up to its last one.
LASTED_STEPS, LASTED_S = 10, 60.0


class Life(NamedTuple):
    """What one generation came to: nothing is known of an older one that trained on unseen."""

    steps: int  # that nobody had finished before; of the trainer alone that is known
    moved: bool  # a step that counts as progress was finished
    lasted: bool  # of a script or a command: it did too much to be a loop


def learn(
    ctx: Context, state: RunState, plan: Plan | None, ranks: tuple[RankView, ...],
    seen: dict[int, Seen],
) -> None:
    """Windows, the highest step, kernel lines about our pids; `seen` is replaced by this look."""
    now, trainer = state.progress, ctx.view.grade == TRAINER
    if plan is not None and now.bases_generation != plan.generation:
        # A script counts its steps anew in each generation, a trainer's go on.
        seen_step = plan.resume.step if trainer else 0
        now = replace(now, seen_step=seen_step, began_boot_s=ctx.now.boot_s,
                      earlier_step_boot_s=now.last_step_boot_s)
    peak_step = max([now.peak_step, *(rank.step for rank in ranks)])
    seen_step, last_s, trained = now.seen_step, now.last_step_boot_s, now.trained
    for rank in ranks:
        if rank.step > seen_step:
            seen_step, last_s = rank.step, max(last_s, ctx.now.boot_s - rank.stood_s)
            trained = True
    killed = ends.oom_pids(ctx.observed.events, tuple(rank.pid for rank in ctx.view.ranks))
    if not ctx.frozen:
        state.history.look(ranks, seen, ctx.now.boot_s)
    if plan is not None:
        state.history.gradients = gradient_pace.look(
            state.history.gradients, plan.generation, len(plan.ranks), ranks, ctx.now.wall_s)
    bases, generation = now.bases, now.bases_generation
    if plan is not None and generation != plan.generation:
        # The trainer's pages count from the end of its restore; a script's must be learnt.
        bases, generation = {} if trainer else None, plan.generation
    if not trainer and (bases is None or not collective.advance(ranks)):
        bases = collective.learn_bases(ranks)
    state.progress = replace(
        now, peak_step=peak_step, trained=trained, seen_step=seen_step, last_step_boot_s=last_s,
        bases=bases, bases_generation=generation,
        oom_pids=(*now.oom_pids, *killed)[-OOM_PIDS_MAX:],
    )


def life(ctx: Context, state: RunState, generation: int) -> Life:
    """What the generation that runs, or that a cause has just broken off, came to until now."""
    now, plan, grade = state.progress, state.document.plan, ctx.view.grade
    base = now.base_step
    if plan is not None and plan.generation == generation:
        # Who leads since then, or forgot, never saw what an earlier cause broke off.
        base = max(base, plan.peak)
    if grade == TRAINER:
        # Only this generation's own steps count: an older one that trained on unseen, cut off from
        # the leader, may have made the peak.
        steps = max(0, now.seen_step - base)
        return Life(steps, steps > 0, False)
    # A script's steps begin anew: whether any was finished is all that can be known.
    until_s = ctx.now.boot_s if grade == OPAQUE else now.last_step_boot_s
    lasted = now.seen_step >= LASTED_STEPS or until_s - now.began_boot_s >= LASTED_S
    return Life(0, now.seen_step > 0, lasted)


def broken_off(ctx: Context, state: RunState, cause: Cause, by_cost: bool) -> None:
    """A cause was found: what came after the last one is what this generation earned."""
    now, boot_s = state.progress, ctx.now.boot_s
    steps, moved, lasted = life(ctx, state, cause.generation)
    quick = boot_s - now.began_boot_s < QUICK_S and not (moved and ctx.view.grade == TRAINER)
    backoff, step = now.backoff, now.backoff_step
    if by_cost:
        # A slow step that was cut short would be slow again: the next wait there is longer.
        backoff = min(BACKOFF_MAX, backoff * 2) if step == cause.step else 2.0
        step = cause.step
    state.progress = replace(
        now, earned_steps=steps, base_step=now.peak_step,
        broken_boot_s=boot_s, backoff=backoff, backoff_step=step,
        moved=moved, lasted=lasted, quick=now.quick + 1 if quick and cause.charged else 0,
        trained_s=now.trained_s + max(0.0, now.last_step_boot_s - now.began_boot_s),
    )


def pause_s(state: RunState) -> float:
    """How long the next start waits, so that a loop of quick failures does not spin."""
    more = state.progress.quick - QUICK_FREE
    return min(QUICK_WAIT_MAX_S, QUICK_WAIT_S * 2.0 ** min(more - 1, 20)) if more > 0 else 0.0


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


def went_on_boot_s(ctx: Context, state: RunState, ranks: tuple[RankView, ...]) -> float:
    """When the last rank had finished its first new step.  Another node's ranks are heard of some
    steps later: each of those is taken to have lasted as long as the latest did."""
    first = state.progress.base_step + 1 if ctx.view.grade == TRAINER else 1
    found = max(ctx.now.boot_s - rank.stood_s - max(0, rank.step - first) * rank.step_time_s
                for rank in ranks)
    return max(found, state.progress.broken_boot_s)


def restarted(state: RunState, first_boot_s: float) -> None:
    """A restart is over: what it took, without tests on the way, is what the next one will cost."""
    took_s = first_boot_s - state.progress.broken_boot_s - tested_s(state)
    state.history.add_restart(max(0.0, took_s))


def tested_s(state: RunState) -> float:
    """How long this recovery waited for tests of nodes."""
    tests = state.between
    return tests.held_s if tests.broken_boot_s == state.progress.broken_boot_s else 0.0


def new_boot(state: RunState, boot_s: float) -> None:
    """Another boot's seconds mean nothing here."""
    now = state.progress
    state.progress = replace(
        now, broken_boot_s=min(now.broken_boot_s, boot_s), last_step_boot_s=0.0,
        earlier_step_boot_s=0.0, began_boot_s=boot_s)


def new_launcher(state: RunState, trainer: bool) -> None:
    """What its predecessor's ranks did was not cut short by anything of its own, and does not
    prove that its own script, which may be another one, can run."""
    state.progress = replace(
        state.progress, trained=False, last_step_boot_s=0.0, earlier_step_boot_s=0.0,
        base_step=state.progress.base_step if trainer else 0)
