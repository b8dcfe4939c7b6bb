"""The truth of a run: what was planned, and what each restart cost it and gave back.

Owns the comparison of each plan's budgets with what its generations really did: acts cost, and only
progress gives back.  The core's own numbers are never asked: steps come from the job, checkpoints
from its disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.model import TRAINER, Plan
from .job import Job

PROGRESS_STEPS = 10  # README: that many new steps, or one checkpoint, give a restart back
UNSEEN_STEPS = 2  # a leader's last look at a page may be this old
SEEN_S = 2.0  # after this a checkpoint stands in everybody's listing
RESTARTS = "restarts"  # the budget that --max-restarts is
BOUGHT = "charged:"  # how a plan names what it was charged for
ANEW = "the launcher is idle"  # another submission of the run has its own budgets


class RunTruth:
    """What the monitor remembers of one run."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.planned_s: dict[int, float] = {}  # generation -> when it was written
        self.resumes: dict[str, list[tuple[int, int]]] = {}  # folder -> (generation, step)
        self.fruitless = 0  # generations in a row without a new step
        self.best_at_plan = 0
        self.end_heard = True  # whether who ended it had heard of its last generation's checkpoints

    def forget(self, generation: int) -> None:
        """This plan was lost by the store, and with the only node that knew of it."""
        self.plans.pop(generation)
        self.planned_s.pop(generation)
        self.resumes = {folder: [one for one in told if one[0] != generation]
                        for folder, told in self.resumes.items()}
        self.fruitless -= 1


def bought(plan: Plan) -> tuple[str, ...]:
    """The budgets that this plan was charged to."""
    return tuple(one.removeprefix(BOUGHT) for one in plan.granted if one.startswith(BOUGHT))


def looped(job: Job, plans: dict[int, Plan], plan: Plan, most: int) -> list[int]:
    """The last generations, where so many in a row died of one bug at one step and each death was
    what `plan` and those before it answered.

    A checkpoint between two deaths is progress, and clears what was counted before it.  Who leads
    may have lost a node at the time of a death there: it answers that loss instead.
    """
    died = job.bug_hits[-most:]
    if len(died) < most or died != sorted(plans)[-most:] \
            or not job.committed.keys().isdisjoint(died[1:]):
        return []
    answers = (*(plans[one] for one in died[1:]), plan)
    return died if all(_own(each) for each in answers) else []


def _own(plan: Plan) -> bool:
    return any(one != RESTARTS and not one.startswith("node_lost/") for one in bought(plan))


def gained(job: Job, plan: Plan, all_seen: bool) -> bool:
    """Did this generation truly come further than any before, or leave something durable?  Where
    nodes may have trained on unseen, further than its plan knew."""
    gang = job.gangs.get(plan.generation)
    before = max(plan.peak, gang.best_before if all_seen and gang is not None else 0)
    steps = gang.peak - before if gang is not None and gang.formed else 0
    return plan.generation in job.committed or steps >= PROGRESS_STEPS - UNSEEN_STEPS


def lasted(job: Job, plan: Plan) -> bool:
    """Did a script's or a command's generation begin?  How far one came proves nothing, and gives
    back what a runbook allows, never what the caller does."""
    gang = job.gangs.get(plan.generation)
    return job.grade != TRAINER and gang is not None and gang.formed


def must_give_back(job: Job, generation: int) -> bool:
    """A checkpoint of it was to be seen by everybody well before it broke."""
    if job.grade != TRAINER:
        return False
    durable = [each for each in job.disk.commits.values()
               if each.generation == generation and not each.bad]
    hurt_s = job.hurt.get(generation, 0.0)
    return bool(durable) and job.committed.get(generation, 1e9) + SEEN_S < hurt_s


def wrong(job: Job, before: Plan, plan: Plan, all_seen: bool, heard: bool) -> str:
    """What of this plan's budgets is not true; "" when all is.  `heard`: whether a checkpoint of
    the generation before is known where it was planned."""
    if plan.reason == ANEW:
        return "" if not plan.spent else f"another submission begins with {plan.spent}"
    if plan.peak < max(plan.resume.step, job.best - UNSEEN_STEPS if all_seen else 0):
        return f"step {plan.peak} is said to be the highest, true is {job.best}"
    if not before.peak <= plan.peak <= max(job.best, before.peak):
        return f"step {plan.peak} is said to be the highest, behind {before.peak} and {job.best}"
    was, now = _counts(before.spent), _counts(plan.spent)
    paid, back = bought(plan), bought(before)
    for key in sorted({*was, *now, *paid}):
        most = was.get(key, 0) + (key in paid)
        may = gained(job, before, all_seen) or key != RESTARTS and lasted(job, before)
        least = most - (key in back and may)
        count = now.get(key, 0)
        if not least <= count <= most:
            return (f"{key} stands at {count} behind gen {before.generation}, true is {least} to "
                    f"{most}")
        given = key in back and count <= most - 1
        if key in back and not given and heard and must_give_back(job, before.generation):
            return f"{key} was not given back for the checkpoint of gen {before.generation}"
    return ""


def _counts(spent: Iterable[tuple[str, int]]) -> dict[str, int]:
    return {key: count for key, count in spent if not key.startswith("signature/")}
