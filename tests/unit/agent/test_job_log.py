"""Jobs: attempts of runs as the journal keeps them."""

from __future__ import annotations

import os

import msgspec
import pytest
from browsing import INCIDENT, browse
from fakes import until

from holdfast.agent.core.model import RankView, RunView
from holdfast.agent.history import job_log
from holdfast.agent.history.job_log import Job, JobLog, Seen
from holdfast.agent.history.journal import Count, JobRecord


def seen(key: str = "1 2.000 b", run: str = "m5", step: int = -1, **fields: object) -> Seen:
    ranks = () if step < 0 else (RankView(
        rank=0, node="n0", pid=9, generation=1, state="running", step=step),)
    view = RunView(run=run, node="n0", grade="script", nproc=1, generation=int(step >= 0),
                   ranks=ranks, uid=1000, **fields)  # type: ignore[arg-type]
    return Seen(view, key, "ann", "search", 900.0, 1000.0, (36.0, "EUR"))


def counts(records: list[JobRecord]) -> dict[tuple[str, tuple[str, ...]], float]:
    return {(one.name, one.labels): one.more for record in records for one in record.counts
            if isinstance(one, Count) and "bucket" not in one.name}


def test_an_attempt_from_the_queue_to_its_end() -> None:
    log, ledger = JobLog(), [("m5", "training", 5.0)]  # of an attempt before
    assert counts(log.follow(1001.0, [seen()], ledger, {})) == {
        ("job_start_sum", ("queue",)): 100.0}
    assert counts(log.follow(1010.0, [seen(step=0)], ledger, {})) == {
        ("job_start_sum", ("ranks",)): 10.0}
    assert counts(log.follow(1020.0, [seen(step=1)], ledger, {})) == {
        ("job_start_sum", ("first_step",)): 10.0, ("job_start_sum", ("total",)): 20.0}
    assert log.follow(1021.0, [seen(step=2)], ledger, {}) == [], "not each second"
    ledger = [("m5", "training", 55.0), ("m5", "startup", 20.0), ("other", "training", 9.0)]
    ended = log.follow(1100.0, [seen(step=60)], ledger, {"m5": (0, "every rank is done")})
    assert counts(ended) == {
        ("jobs", ("done",)): 1.0, ("job_seconds", ("training",)): 50.0,
        ("job_seconds", ("wall",)): 100.0, ("job_seconds", ("queued",)): 100.0}
    (job,) = log.jobs.values()
    assert (job.outcome, job.step, job.team) == ("done", 60, "search")
    assert (job.ettr(2000.0, queued=False), job.ettr(2000.0, queued=True)) == (0.5, 0.25)
    row = job_log.job_row(job, 2000.0)
    assert row["cost"]["all"] == pytest.approx(0.7) and row["cost"]["lost"] == pytest.approx(0.2)
    assert row["seconds"] == {"training": 50.0, "startup": 20.0}
    assert log.follow(1200.0, [seen(step=60)], ledger, {"m5": (0, "x")}) == [], "counted once"


@pytest.mark.parametrize(("code", "shutdown", "outcome"), [
    (0, "", "done"), (75, "", "retry"), (76, "", "budget_spent"), (78, "", "configuration"),
    (1, "", "failed"), (139, "", "failed"), (75, "preempted", "preempted"),
    (130, "interrupted", "interrupted"),
])
def test_how_an_attempt_ended(code: int, shutdown: str, outcome: str) -> None:
    log = JobLog()
    log.follow(1.0, [seen()], [], {})
    log.follow(2.0, [seen(shutdown=shutdown)], [], {"m5": (code, "why")})
    assert [(one.outcome, one.code) for one in log.jobs.values()] == [(outcome, code)]


def test_a_launcher_that_is_gone_is_lost_after_a_while_and_not_by_an_agents_restart() -> None:
    log = JobLog()
    begun = log.follow(1000.0, [seen()], [], {})
    again = JobLog(job_log.read_jobs([record.body for record in begun] + [b"{}", b"junk"]))
    again.follow(1010.0, [], [], {})
    assert again.follow(1060.0, [seen(step=1)], [], {}), "the same attempt goes on"
    assert len(again.jobs) == 1
    again.follow(1100.0, [], [], {})
    assert counts(again.follow(1161.0, [], [], {}))["jobs", ("lost",)] == 1.0
    (job,) = again.jobs.values()
    assert job.ended_wall_s == 1100.0, "when it was seen last"


def test_a_job_that_nobody_ended_runs_only_while_its_launcher_lives() -> None:
    own = Job(f"{os.getpid()} 2.000 b", "m5", 1, begun_wall_s=100.0, seconds={"training": 7.0})
    assert job_log.as_found(own, "b", 9999.0) is own
    for gone, boot in ((own, "another boot"), (msgspec.structs.replace(own, key="junk"), "b"),
                       (msgspec.structs.replace(own, key=f"{2**22 + 1} 2.000 b"), "b")):
        assert job_log.as_found(gone, boot, 90.0) is gone, "an agent elsewhere writes each minute"
        found = job_log.as_found(gone, boot, 130.0)
        assert (found.outcome, found.ended_wall_s) == ("lost", 107.0)
    done = msgspec.structs.replace(own, outcome="done", key="junk")
    assert job_log.as_found(done, "b", 9999.0) is done


def test_attempts_are_counted_by_run_and_bounded() -> None:
    log = JobLog()
    for number in range(job_log.JOBS_MAX + 5):
        key, run = f"{number} 1.000 b", "ab"[number % 2]
        log.follow(float(number), [seen(key, run)], [], {run: (1, "")})
        log.follow(float(number), [seen(key, run)], [], {run: (1, "")})
    assert len(log.jobs) == job_log.JOBS_MAX
    assert next(reversed(log.jobs.values())).attempt == (job_log.JOBS_MAX + 5 + 1) // 2


def test_a_job_survives_the_journal() -> None:
    log = JobLog()
    (record,) = log.follow(5.0, [seen()], [], {})
    assert msgspec.json.decode(record.body, type=Job) == log.jobs["1 2.000 b"]


def test_a_moment_is_told_as_of_the_attempt_that_was_the_newest_then() -> None:
    log = JobLog(Job(key, run, number, begun_wall_s=begun_s) for key, run, number, begun_s in (
        ("k1", "m5", 3, 100.0), ("k2", "other", 1, 150.0), ("k3", "m5", 4, 200.0)))
    attempts = log.attempts()
    for wall_s, number in ((50.0, 3), (100.0, 3), (199.0, 3), (200.0, 4), (9e9, 4)):
        assert job_log.attempt_at("m5", wall_s, attempts) == number, "1 and 2 are forgotten"
    assert job_log.attempt_at("", 120.0, attempts) is None, "a node's own"


def test_a_name_that_is_used_again_is_told_attempt_by_attempt(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        first = msgspec.structs.replace(INCIDENT, state="closed")
        (key,) = daemon.state.jobs.jobs
        daemon.state.jobs.jobs[key].begun_wall_s = first.opened_wall_s - 60.0
        daemon.state.jobs.jobs["again"] = Job(
            "again", "demo", 2, begun_wall_s=first.opened_wall_s + 60.0)
        second = msgspec.structs.replace(
            INCIDENT, id="demo/2", opened_wall_s=first.opened_wall_s + 90.0)
        own = msgspec.structs.replace(
            INCIDENT, id="node/1", run="", subject="node/node-a", opened_wall_s=1.0)
        node.extra = {"run_ledger": (("demo", "training", 30.0), ("gone", "idle", 1.0))}
        node.incidents = (first, second, own)
        daemon.wake("test")
        await until(lambda: len(daemon.state.incident_log.incidents) == 3)
        (one, two, third), ledger, alone, now = [
            await (await unix.get(f"/api/v1/{route}")).json()
            for route in ("incidents", "ledger", "incidents/demo/2", "status")]
        assert [x.get("attempt") for x in (one, two, third)] == [2, 1, None]
        assert alone["attempt"] == 2 and ledger["attempts"] == {"demo": 2}
        assert {x["id"]: x.get("attempt") for x in now["incidents"]} == {
            "demo/2": 2, "node/1": None}

    browse(scenario, agent, tmp_path)
