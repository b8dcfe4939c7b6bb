"""The name of what a run is doing, and what must be true of its state whatever it does.

Owns the order of precedence between stages.  Pure: case.py acts on the name, people read it.
"""

from __future__ import annotations

from enum import StrEnum

from ..model import TRAINER, Plan, RunView, Value
from .fences import may_renew
from .state import RunState

# So that who knows better (the store was restored) may tell it from the others.
OLDER_VERSION = "an older version of the document was taken"


class Stage(StrEnum):
    UNKNOWN = "unknown"  # the launcher is not connected
    IDLE = "idle"  # nothing runs, or not yet
    STARTING = "starting"  # the newest plan is not what the launcher runs
    TRAINING = "training"
    WAITING = "waiting"  # its ranks here have ended, and other nodes have the run
    SUSPENDED = "suspended"  # stopped from outside: nothing is done until it goes on
    RECOVERING = "recovering"  # between a cause and the first new step
    ENDING = "ending"  # the caller wants the end, or it is decided
    OVER = "over"  # the launcher was ordered to leave, and said yes


class StageView(Value, frozen=True):
    """What of a step decides the stage."""

    view: RunView
    plan: Plan | None = None
    single_node: bool = True
    elsewhere: bool = False  # another node runs the newest plan, as far as its beats say
    leader: bool = True
    answered: bool = True  # the store, once in this life of the agent
    up: bool = True  # the store, now


def stage(state: RunState, seen: StageView) -> Stage:
    """The first that holds; an end that is wanted goes before everything."""
    view, ending = seen.view, state.ending
    if not view.connected:
        return Stage.UNKNOWN
    if view.shutdown or state.held.drain:
        return Stage.ENDING
    if ending is not None and ending.code >= 0:
        return Stage.OVER if ending.left else Stage.ENDING
    if state.suspects.suspension is not None:
        return Stage.SUSPENDED
    if may_start(state, seen):
        return Stage.STARTING
    if wants_plan(state, seen):
        return Stage.IDLE
    if state.recovery is not None:
        return Stage.RECOVERING
    if view.generation == 0:
        return Stage.IDLE
    if any(rank.state == "starting" for rank in view.ranks):
        return Stage.STARTING
    return Stage.WAITING if _is_left_out(seen) else Stage.TRAINING


def _is_left_out(seen: StageView) -> bool:
    """Whether nothing of the run lives here any more, and others decide what becomes of it."""
    lives = any(rank.state != "ended" for rank in seen.view.ranks)
    return not (seen.single_node or seen.leader or lives)


def may_start(state: RunState, seen: StageView) -> bool:
    """The launcher is behind a plan that is meant for it."""
    view, plan = seen.view, seen.plan
    # A spare that leads is behind for ever: it has nothing to start, and must go on to recover.
    if plan is None or plan.finished >= 0 or not _has_ranks(plan, view.node):
        return False
    if not seen.single_node and not seen.answered:
        return False  # a plan out of memory alone: others may be many generations further
    if view.grade != TRAINER and not (seen.single_node or seen.up and may_renew(plan, view.node)):
        return False  # whoever leads counts from that word on when no rank can be left here
    behind = plan.generation > view.generation
    if seen.single_node:
        return behind and state.document.meant == plan.generation
    return behind and plan.generation > state.launcher.top


def wants_plan(state: RunState, seen: StageView) -> bool:
    """An idle launcher asks for a plan only where no other node runs the newest one."""
    view, plan = seen.view, seen.plan
    if view.generation != 0 or view.state != "idle":
        return False
    if seen.single_node or plan is None or plan.finished >= 0:
        return True
    known = _has_ranks(plan, view.node) or plan.generation <= state.launcher.top
    return known and not seen.elsewhere


def check_invariants(state: RunState, before: RunState | None = None) -> tuple[str, ...]:
    """What of a state is broken, in words; this holds after a step, whatever was observed.

    before: a copy of the state after the step before, of the same life of the agent.
    """
    document, progress, recovery = state.document, state.progress, state.recovery
    plan, grant = document.plan, state.grant
    spent = (*(plan.spent if plan else ()), *(grant.spent if grant else ()))
    broken = {
        "a launcher showed more than the top": state.launcher.generation > state.launcher.top,
        "a generation is meant that no plan has":
            document.meant > (plan.generation if plan else 0),
        "training was broken off above its peak": progress.base_step > progress.peak_step,
        "a cause earned less than nothing": progress.earned_steps < 0,
        "a budget is negative": any(count < 0 for _, count in spent),
        "what is planned is still granted": recovery is not None and recovery.planned
            and recovery.grant is not None,
        "ranks were stopped without a grant": recovery is not None
            and recovery.stop_boot_s > 0 and recovery.grant is None,
        "the launcher left before the end": state.ending is not None and state.ending.left
            and state.ending.code < 0,
    }
    for key, item in state.incidents.book.open.items():
        one, suspected = item.incident, key == state.incidents.suspicion
        broken[f"{key} is not of this run"] = (one.id, one.run) != (key, state.run)
        broken[f"{key} is a suspicion that nobody has"] = item.suspicion and not suspected
        broken[f"{key} is {one.state} and in the book"] = one.state not in ("open", "acted")
    if before is not None:
        broken |= _steps_wrong(before, state)
    return tuple(text for text, wrong in broken.items() if wrong)


def _steps_wrong(before: RunState, state: RunState) -> dict[str, bool]:
    """What no step may do, and whether this one did."""
    old, new = before.document, state.document
    ends = before.finish_code >= 0 and state.finish_code >= 0
    return {
        OLDER_VERSION: new.version < old.version,
        "the top generation fell": state.launcher.top < before.launcher.top,
        "an older plan was taken": old.plan is not None
            and (new.plan is None or new.plan.generation < old.plan.generation),
        "the end was decided twice": ends and state.finish_code != before.finish_code,
        "a generation was planned for a run that ends": ends and new.wrote != old.wrote,
        "a recovery began in a run that ends": ends and before.recovery is None
            and state.recovery is not None,
    }


def _has_ranks(plan: Plan, node: str) -> bool:
    return any(place == node for _, place in plan.ranks)
