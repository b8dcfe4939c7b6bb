"""How long a wait may last before it is suspect, and before acting on it is the cheaper choice.

Owns the arithmetic of "suspect early, act by cost" (DESIGN section 3).  Pure; it names nobody.
All limits are seconds of stillness of one rank; math.inf-like NEVER means no limit by cost.
"""

from __future__ import annotations

from ...model import OPAQUE, SCRIPT, TRAINER, RankView, Settings, Value
from ...series.wait_history import History

NEVER = 1e12  # seconds; JSON has no infinity
COMPILE = "compile"
STARTUP = "startup"
DATA = "data"
EXIT = "exit"  # handlers and uploads after a good end; a failed rank keeps nobody waiting
QUIET = ("checkpoint", "eval", STARTUP, EXIT)
KNOWN_SAMPLES = 5  # fewer waits than this say nothing about a phase's p99
ENDED_WELL = 3.0  # never act before this many times the longest wait that ended well


class Costs(Value, frozen=True):
    """What a restart of this run would cost now."""

    grade: str
    startup_s: float = 0.0
    steps_to_redo: int = 0  # since the newest resumable state
    hang_limit_s: float = 0.0
    compiling: str = ""
    started: bool = True  # a step was finished in this run
    backoff: float = 1.0  # grows with each act by cost at the same step


def suspect_s(rank: RankView, costs: Costs, history: History, settings: Settings) -> float:
    """Stillness from which the rank is suspect."""
    base_s = base(history, settings)
    phase = effective_phase(rank, costs)
    if phase not in QUIET and phase != COMPILE:
        limited = costs.hang_limit_s > 0 and user_limit_applies(rank, costs)
        return min(base_s, costs.hang_limit_s) if limited else base_s
    if _known(phase, history):
        return max(base_s, ENDED_WELL * history.longest_s(phase))
    return act_s(rank, costs, history, settings) / 3


def act_s(rank: RankView, costs: Costs, history: History, settings: Settings) -> float:
    """Stillness from which ending the rank costs less than waiting on."""
    if costs.hang_limit_s > 0 and user_limit_applies(rank, costs):
        return costs.hang_limit_s
    if costs.grade == OPAQUE:
        return NEVER
    phase = effective_phase(rank, costs)
    base_s = base(history, settings)
    if phase == COMPILE or phase in QUIET:
        unknown_s = settings.compile_limit_s if phase == COMPILE else settings.quiet_limit_s
        if phase == STARTUP and costs.startup_s > 0 and costs.started:
            # This run started before: a later start is measured against the first.
            return max(settings.phase_factor * costs.startup_s, settings.script_floor_s)
        if costs.grade == SCRIPT and not costs.started and rank.active:
            return NEVER  # it works, and has no optimizer that would show its steps
        if not _known(phase, history):
            return unknown_s * costs.backoff
        p99_s = settings.phase_factor * history.p99_s(phase)
        longest_s = ENDED_WELL * history.longest_s(phase)
        return max(p99_s, longest_s, settings.script_floor_s, base_s)
    limit_s = max(base_s, _cost_s(rank, costs, history, settings))
    limit_s = max(limit_s, ENDED_WELL * history.longest_s(phase))
    if phase == DATA and rank.reading:
        # Its input comes, if slowly: begun anew it would be read anew.
        limit_s = max(limit_s, settings.quiet_limit_s)
    if costs.grade != TRAINER:
        p99_s = settings.phase_factor * history.p99_s(phase)
        limit_s = max(limit_s, settings.script_floor_s, p99_s)
    return limit_s * costs.backoff


def alike(rank: RankView) -> tuple[object, ...]:
    """All of a rank that its limits depend on."""
    return rank.phase, rank.state, rank.active, rank.reading, rank.step == 0


def base(history: History, settings: Settings) -> float:
    """Seconds of stillness that are suspect in an ordinary phase."""
    return settings.suspect_floor_s + settings.suspect_steps * history.step_s


def effective_phase(rank: RankView, costs: Costs) -> str:
    """The phase whose limits hold: a compile covers all, and before the first step all is start."""
    if costs.compiling or rank.phase == COMPILE:
        return COMPILE
    if rank.phase == EXIT:
        return EXIT
    if rank.state == "starting" or not costs.started:
        return STARTUP
    return rank.phase


def user_limit_applies(rank: RankView, costs: Costs) -> bool:
    """A user's limit is about steps: it does not count while the rank starts up or exits."""
    starting = rank.phase in (STARTUP, EXIT) or rank.state == "starting"
    before_first_step = costs.grade != TRAINER and rank.step == 0 and costs.grade != OPAQUE
    return not starting and not before_first_step


def _known(phase: str, history: History) -> bool:
    waits = history.waits.get(phase)
    return waits is not None and len(waits.recent_s) >= KNOWN_SAMPLES


def _cost_s(rank: RankView, costs: Costs, history: History, settings: Settings) -> float:
    odds = settings.odds_active if rank.active else settings.odds
    restart_s = history.restart_cost_s(costs.startup_s)
    if restart_s <= 0:
        return settings.quiet_limit_s  # nothing measured yet: no cost to weigh against
    total_s = odds * (restart_s + costs.steps_to_redo * history.step_s)
    # A script's own checkpoints are unseen, so its redone steps are an upper bound only.
    return total_s if costs.grade == TRAINER else min(total_s, settings.quiet_limit_s)
