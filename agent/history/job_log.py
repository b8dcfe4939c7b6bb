"""Jobs: each attempt of a run, when it began and trained, how it ended, and where its time went.

Owns what becomes a record in the journal, and when.  One attempt is one launcher.  Decides nothing;
the categories are the ledger's, the outcome is the core's word or the launcher's absence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.worker import exits

from ..core.ledger import CATEGORIES, WORKING
from ..core.model import UNREADABLE, RunView
from ..system.procfs import process_alive
from .journal import Count, JobRecord

JOBS_MAX = 1000
PRICED = tuple(name for name in CATEGORIES if name not in WORKING)  # what brings no training
HOUR_S = 3600.0
LOST_S = 60.0  # without its launcher: an agent that was restarted waits for it that long
KEEP_EVERY_S = 60.0  # what an agent that is killed forgets of a job at most
START_BUCKETS_S = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
RUNNING, LOST = "running", "lost"
GONE = "its launcher is gone"
OUTCOMES = {exits.DONE: "done", exits.RETRY: "retry", exits.BUDGET_SPENT: "budget_spent",
            exits.CONFIGURATION: "configuration"}


Attempts = Mapping[str, Sequence[tuple[float, int]]]  # run -> (wall_s of its begin, its number)


class Job(msgspec.Struct):
    """One attempt on this node.  Times are wall clock; 0 = not yet, or not known."""

    key: str  # of its launcher
    run: str
    attempt: int
    user: str = ""
    uid: int = -1
    team: str = ""
    grade: str = ""
    nproc: int = 0
    queued_wall_s: float = 0.0
    begun_wall_s: float = 0.0
    ranks_wall_s: float = 0.0
    stepped_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    outcome: str = RUNNING
    code: int = -1
    reason: str = ""
    step: int = 0
    generations: int = 0
    seconds: dict[str, float] = {}  # ledger category -> of this attempt
    node_hour: float = 0.0  # price of this node when it began
    currency: str = ""
    base: dict[str, float] = {}  # of the run when it began: a name may be used again

    def ended(self) -> bool:
        return self.outcome != RUNNING

    def ettr(self, now_wall_s: float, queued: bool) -> float | None:
        """Share of its time in which it trained, from its begin or from when it was queued."""
        begun = self.queued_wall_s if queued else self.begun_wall_s
        wall_s = (self.ended_wall_s or now_wall_s) - begun
        if begun <= 0 or wall_s <= 0:
            return None
        return min(1.0, sum(self.seconds.get(name, 0.0) for name in WORKING) / wall_s)


class Seen(NamedTuple):
    """A launcher as it is now."""

    view: RunView
    key: str
    user: str
    team: str
    queued_wall_s: float
    begun_wall_s: float
    price: tuple[float, str] = (0.0, "")  # of an hour of this node, currency


class JobLog:
    """The newest jobs of this node, oldest first."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.jobs: OrderedDict[str, Job] = OrderedDict((job.key, job) for job in jobs)
        self._absent: dict[str, float] = {}  # key -> wall_s since when
        self._kept: dict[str, float] = {}

    def follow(
        self, now_wall_s: float, launchers: Iterable[Seen],
        run_ledger: Iterable[tuple[str, str, float]], endings: Mapping[str, tuple[int, str]],
    ) -> list[JobRecord]:
        """Compares what is here with what is known; only changes come out."""
        spent: dict[str, dict[str, float]] = {}
        for run, category, seconds in run_ledger:
            spent.setdefault(run, {})[category] = seconds
        records, present = [], set()
        for seen in launchers:
            present.add(seen.key)
            records += self._here(now_wall_s, seen, spent.get(seen.view.run, {}), endings)
        for job in [one for one in self.jobs.values() if not one.ended()]:
            if job.key in present:
                self._absent.pop(job.key, None)
            elif now_wall_s - self._absent.setdefault(job.key, now_wall_s) > LOST_S:
                records.append(self._end(job, self._absent.pop(job.key), LOST, -1,
                                         GONE))
        while len(self.jobs) > JOBS_MAX:
            self.jobs.popitem(last=False)
        return records

    def attempts(self) -> Attempts:
        """Of each run that is known, oldest first."""
        found: dict[str, list[tuple[float, int]]] = {}
        for job in self.jobs.values():
            found.setdefault(job.run, []).append((job.begun_wall_s, job.attempt))
        return found

    def lose(self, wall_s: float) -> list[JobRecord]:
        """Ends all that go on: their launchers were gone by then, and nobody looks again."""
        return [self._end(job, wall_s, LOST, -1, GONE)
                for job in self.jobs.values() if not job.ended()]

    def _here(
        self, now_wall_s: float, seen: Seen, spent: dict[str, float],
        endings: Mapping[str, tuple[int, str]],
    ) -> list[JobRecord]:
        job, view = self.jobs.get(seen.key), seen.view
        if job is None:
            attempt = 1 + max((one.attempt for one in self.jobs.values() if one.run == view.run),
                              default=0)
            job = self.jobs[seen.key] = Job(
                seen.key, view.run, attempt, seen.user, view.uid, seen.team, view.grade, view.nproc,
                seen.queued_wall_s, seen.begun_wall_s or now_wall_s, base=dict(spent),
                node_hour=seen.price[0], currency=seen.price[1])
            counts = start_counts("queue", job.begun_wall_s - job.queued_wall_s) if (
                job.queued_wall_s) else []
            return [self._record(job, now_wall_s, counts)]
        if job.ended() or not view.connected:
            return []
        job.seconds = {name: more for name, all_s in spent.items()
                       if (more := max(0.0, all_s - job.base.get(name, 0.0))) > 0.0}
        job.step = max([job.step, *(rank.step for rank in view.ranks)])
        job.generations = max(job.generations, view.generation)
        counts = self._began(job, view, now_wall_s)
        code, reason = endings.get(view.run, (-1, ""))
        if code >= 0:
            outcome = view.shutdown or OUTCOMES.get(code, "failed")
            return [self._end(job, now_wall_s, outcome, code, reason, counts)]
        if counts or now_wall_s - self._kept.get(job.key, 0.0) > KEEP_EVERY_S:
            return [self._record(job, now_wall_s, counts)]
        return []

    def _began(self, job: Job, view: RunView, now_wall_s: float) -> list[Count]:
        counts: list[Count] = []
        if not job.ranks_wall_s and any(rank.state == "running" for rank in view.ranks):
            job.ranks_wall_s = now_wall_s
            counts += start_counts("ranks", now_wall_s - job.begun_wall_s)
        if not job.stepped_wall_s and job.ranks_wall_s and job.step > 0:
            job.stepped_wall_s = now_wall_s
            counts += start_counts("first_step", now_wall_s - job.ranks_wall_s)
            counts += start_counts("total", now_wall_s - job.begun_wall_s)
        return counts

    def _end(self, job: Job, wall_s: float, outcome: str, code: int, reason: str,
             counts: Iterable[Count] = ()) -> JobRecord:
        job.outcome, job.code, job.reason = outcome, code, reason[:500]
        job.ended_wall_s = max(wall_s, job.begun_wall_s)
        worked_s = sum(job.seconds.get(name, 0.0) for name in WORKING)
        queued_s = max(0.0, job.begun_wall_s - job.queued_wall_s) if job.queued_wall_s else 0.0
        return self._record(job, wall_s, [
            *counts, Count("jobs", (outcome,)), Count("job_seconds", ("training",), worked_s),
            Count("job_seconds", ("wall",), job.ended_wall_s - job.begun_wall_s),
            Count("job_seconds", ("queued",), queued_s)])

    def _record(self, job: Job, wall_s: float, counts: Iterable[Count]) -> JobRecord:
        if job.ended():
            self._kept.pop(job.key, None)
        else:
            self._kept[job.key] = wall_s
        return JobRecord(job.key, job.begun_wall_s, msgspec.json.encode(job), tuple(counts))


def start_counts(phase: str, seconds: float) -> list[Count]:
    """One observation of the histogram of starts, as counters (cumulative buckets)."""
    seconds = max(0.0, seconds)
    counts = [Count("job_start_bucket", (phase, f"{bound:g}"))
              for bound in START_BUCKETS_S if seconds <= bound]
    return [*counts, Count("job_start_bucket", (phase, "+Inf")),
            Count("job_start_sum", (phase,), seconds)]


def read_jobs(bodies: Iterable[bytes]) -> list[Job]:
    """Those that this release can read."""
    found = []
    for body in bodies:
        try:
            found.append(msgspec.json.decode(body, type=Job))
        except UNREADABLE:
            continue
    return found


def as_found(job: Job, boot_id: str, quiet_s: float) -> Job:
    """As it stands in a journal whose agent was killed with its launcher, so that no end was
    written: lost then, and over when its last counted second was.

    quiet_s: since when nothing was written there.  A living agent writes each minute; it may be one
    of another machine that shares this home, or of another pid namespace.
    """
    pid, boot = job.key.partition(" ")[0], job.key.rpartition(" ")[2]
    lives = boot == boot_id and pid.isdecimal() and process_alive(int(pid))
    if job.ended() or lives or quiet_s < 2 * KEEP_EVERY_S:
        return job
    return msgspec.structs.replace(job, outcome=LOST, reason=GONE, ended_wall_s=(
        job.begun_wall_s + sum(job.seconds.values())))


def attempt_at(run: str, wall_s: float, attempts: Attempts) -> int | None:
    """Which attempt of a run was the newest then; None where none of it is known."""
    known = attempts.get(run, ())
    return max((number for begun_wall_s, number in known if begun_wall_s <= wall_s),
               default=known[0][1] if known else None)


def money(node_hour: float, currency: str, seconds: dict[str, float]) -> dict[str, Any] | None:
    """What these seconds cost, and of that what brought no training; None without a price."""
    if not node_hour:
        return None
    price_s = node_hour / HOUR_S
    return {
        "currency": currency, "node_hour": node_hour,
        "all": round(sum(seconds.values()) * price_s, 4),
        "lost": round(sum(seconds.get(name, 0.0) for name in PRICED) * price_s, 4),
        "categories": {name: round(spent * price_s, 4) for name, spent in seconds.items()},
    }


def job_row(job: Job, now_wall_s: float) -> dict[str, Any]:
    """As the API tells it."""
    row: dict[str, Any] = msgspec.to_builtins(job)
    for name in ("key", "base"):
        del row[name]
    wall_s = (job.ended_wall_s or now_wall_s) - job.begun_wall_s
    queued_s = job.begun_wall_s - job.queued_wall_s if job.queued_wall_s else None
    return row | {
        "wall_s": round(max(0.0, wall_s), 3), "queued_s": queued_s,
        "ettr": job.ettr(now_wall_s, queued=False),
        "ettr_queued": job.ettr(now_wall_s, queued=True),
        "cost": money(job.node_hour, job.currency, job.seconds),
        "seconds": {name: round(spent, 3) for name, spent in job.seconds.items()},
    }
