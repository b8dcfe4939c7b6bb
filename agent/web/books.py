"""What a run costs and brings: samples and tokens a second, MFU, when it will be done, jobs.

Owns the arithmetic over what a launcher said of its run, the ranks' pages and the ledger.  Pure but
for reading the agent's state.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from ..core.ledger import WORKING
from ..core.model import RankView, RunView
from ..core.run import policy
from ..daemon.state import AgentState
from ..history.job_log import job_row
from .curves import Point

LEAST_S = 60.0  # of a run's ledger, before its share of training says anything


class Rates(NamedTuple):
    """None: not known."""

    samples_s: float | None = None
    tokens_s: float | None = None
    mfu: float | None = None
    total_steps: int = 0
    eta_s: float | None = None  # until the last step, at the pace of this run so far
    deadline_wall_s: float = 0.0  # 0: none was given
    late_s: float | None = None  # at that pace, after its deadline; below 0 there is time to spare
    team: str = ""
    restarts_left: int | None = None


def rates(state: AgentState, view: RunView) -> Rates:
    session = state.launchers.session(view.run)
    if session is None:
        return Rates()
    goal = session.hello.goal
    running = [rank for rank in view.ranks if rank.state == "running"]
    times = [rank.step_time_s for rank in running if rank.step_time_s > 0]
    step_s = statistics.median(times) if times else 0.0
    pages = [one.view for one in session.monitors.values() if one.view is not None]
    total = goal.total_steps or max((page.total_steps for page in pages), default=0)
    told = max((page.rate for page in pages), default=0.0)  # the trainer's own
    tokens_s = goal.tokens_per_step / step_s if step_s and goal.tokens_per_step else told or None
    step = min((rank.step for rank in running), default=0)
    eta_s = None
    if total and step_s and running:
        eta_s = max(0, total - step) * step_s / share(state, view.run)
    late_s = None
    if eta_s is not None and goal.deadline_wall_s:
        late_s = state.snapshot.now.wall_s + eta_s - goal.deadline_wall_s
    return Rates(
        goal.samples_per_step / step_s if step_s and goal.samples_per_step else None, tokens_s,
        goal.flops_per_step / step_s / goal.peak_flops
        if step_s and goal.flops_per_step and goal.peak_flops else None,
        total, eta_s, goal.deadline_wall_s, late_s, goal.team, _restarts_left(state, view))


def lateness(found: Rates) -> str:
    """What a person has to decide of a run that will be late; "" for any other."""
    late_s = found.late_s or 0.0
    if late_s <= 0.0:
        return ""
    late = f"{late_s / 3600:.1f} h" if late_s >= 7200 else f"{max(1, round(late_s / 60))} min"
    return (f"see to its deadline: at its pace so far it is done {late} after it; holdfast ledger "
            "says what it lost")


def draw(state: AgentState) -> None:
    """A point of each run's curves."""
    views = state.snapshot.observed.runs
    for view in views:
        running = [rank for rank in view.ranks if rank.state == "running"]
        times = [rank.step_time_s for rank in running if rank.step_time_s > 0]
        if running:
            state.curves.add(view.run, Point(
                round(state.snapshot.now.wall_s, 2), min(rank.step for rank in running),
                view.generation, round(statistics.median(times), 6) if times else None,
                loss(state.launchers.session(view.run), running)))
    state.curves.keep({view.run for view in views})


def loss(session: Any, running: list[RankView]) -> float | None:
    """The loss that the lowest running rank wrote on its page; None where none was written."""
    if session is None:
        return None
    for rank in running:
        monitor = session.monitors.get(rank.rank)
        if monitor is not None and monitor.view is not None and monitor.view.step > 0:
            value: float = monitor.view.loss
            return value if math.isfinite(value) and value != 0.0 else None
    return None


def _restarts_left(state: AgentState, view: RunView) -> int | None:
    for plan in state.snapshot.decision.plans:
        if plan.run == view.run:
            return max(0, view.max_restarts - dict(plan.spent).get(policy.RESTARTS, 0))
    return None


def budgets_left(state: AgentState, run: str) -> dict[tuple[str, str], int]:
    """(fault, action) -> how often its runbook still allows it there where it was done most, of
    what the newest plan has charged."""
    left: dict[tuple[str, str], int] = {}
    for plan in state.snapshot.decision.plans:
        for key, spent in plan.spent if plan.run == run else ():
            fault, _, rest = key.partition("/")
            action, book = rest.partition("/")[0], state.runbooks.get(fault)
            if book is not None and action:  # neither the run's own budget nor a signature
                here = max(0, book.budget_count - spent)
                left[fault, action] = min(here, left.get((fault, action), here))
    return left


def share(state: AgentState, run: str) -> float:
    """Which part of this run's time was training so far; 1 while too little has gone by."""
    rows = {category: seconds for name, category, seconds in state.snapshot.decision.run_ledger
            if name == run}
    whole_s = sum(rows.values())
    if whole_s < LEAST_S:
        return 1.0
    return max(0.01, sum(rows.get(name, 0.0) for name in WORKING) / whole_s)


def jobs(state: AgentState) -> list[dict[str, Any]]:
    """GET /api/v1/jobs: the newest first."""
    return [job_row(job, state.snapshot.now.wall_s)
            for job in reversed(state.jobs.jobs.values())]
