"""The journal: kills at every point, stalls, damage."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
import traceback

import pytest
from fakes import until
from msgspec.structs import replace
from waiting import LIMIT_S

from holdfast.agent.actions.performer import Performer
from holdfast.agent.core.model import Effect, Incident, Resume, Start, Stop, StoreView
from holdfast.agent.history.journal import (
    Answered,
    Asked,
    Count,
    Finished,
    Happened,
    Intent,
    JobRecord,
    Journal,
    Memory,
    Review,
    intent_of,
    needs_sync,
)
from holdfast.agent.launchers import protocol
from holdfast.agent.store.base import Store, StoreError

KILLS = 520
EFFECTS_PER_LIFE = 4


class Point:
    """Ends the process like SIGKILL at the n-th point where the journal could be hurt."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left <= 0:
            os._exit(9)


def record_in_world(path, effect_id: str) -> None:
    """The effect itself: one line that no kill takes back."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{effect_id}\n".encode())
    os.close(fd)


class NoStore(Store):
    """None of these effects asks it anything."""

    def view(self):
        return StoreView()


async def one_life(directory, life: int, at: int, crash_after_effect: bool) -> None:
    """An agent whose performer carries effects out until it is killed: intent, effect, outcome."""
    journal = Journal(directory, Point(at))
    told = asyncio.Queue()

    def order(run: str, fields) -> str:
        """The launcher: does it, and says so twice."""
        record_in_world(directory / "world", fields["id"])
        if crash_after_effect and fields["body"]["generation"] % EFFECTS_PER_LIFE == (
                life % EFFECTS_PER_LIFE):
            os._exit(9)
        told.put_nowait(fields["id"])
        return ""

    async def node(effect, body) -> str:
        raise AssertionError("no order to the node was asked for")

    performer = Performer(journal, NoStore(), order, lambda why: None,
                          lambda part, error: told.put_nowait(error), lambda run: (1, 1.0), node,
                          node)
    left = [intent.id for intent in journal.seed.unfinished]
    again = [replace(start_of(int(id.partition("/")[0])), id=id) for id in left]
    assert performer.fresh(again) == [], "an intent without an outcome is never replayed"
    for number in range(EFFECTS_PER_LIFE):
        start = start_of(life * EFFECTS_PER_LIFE + number)
        assert performer.fresh([start]) == [start]
        performer.perform([start], b"attempts:%d" % life)
        assert performer.fresh([start]) == [] and await told.get() == start.id
        for _ in range(2):
            performer.launcher_outcome("x", protocol.Outcome(id=start.id, ok=True))
        assert performer.fresh([start]) == []
        incident = Incident(
            f"i{start.id}", "f", "s", "warn", "x", 1, 0.0, 0.0, "r", "c", state="closed"
        )
        journal.append(Happened(incident, (Count("closed", ("x",)),)))
        await journal.append(Happened(incident, (Count("closed", ("x",)),)), wait=True)
    os._exit(0)


def start_of(generation: int) -> Effect:
    body = Start("x", generation, (0,), (), 1, Resume("own"), "test")
    return Effect(f"{generation}/run/x/start/1", "start", "run/x", "test", 60.0, body,
                  fault="rank_killed")


def live(directory, life: int, at: int, crash_after_effect: bool) -> int:
    """One life in a child process; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(one_life(directory, life, at, crash_after_effect))
        except BaseException:
            (directory / "why").write_text(traceback.format_exc())
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process")  # forks of a threaded pytest, on purpose
def test_kills_at_every_point_lose_no_intent_and_count_nothing_twice(tmp_path, monkeypatch):
    # On a busy machine a commit may take longer than an order waits for it, and is no stall here.
    monkeypatch.setattr("holdfast.agent.actions.performer.JOURNAL_WAIT_S", LIMIT_S)
    monkeypatch.setattr("holdfast.agent.history.journal.STALL_S", LIMIT_S)
    seed = int(os.environ.get("HOLDFAST_SEED", "20"))
    chance = random.Random(seed)
    kills, life, lives = 0, 0, 0
    while kills < KILLS:
        life += 1
        lives += 1
        status = live(tmp_path, life, chance.randint(1, 45), chance.random() < 0.2)
        why = (tmp_path / "why").read_text() if status == 3 else ""
        assert status in (0, 9), f"seed {seed}, life {life}: status {status}: {why}"
        kills += status == 9
        if life % 40 == 0 or kills == KILLS:
            check(tmp_path, seed, life)
    assert lives >= KILLS


def check(directory, seed: int, life: int) -> None:
    database = sqlite3.connect(directory / "journal.db")
    intents = dict(database.execute("SELECT id, ok FROM intents"))
    counters = dict(database.execute("SELECT name, sum(value) FROM counters GROUP BY name"))
    closed = database.execute("SELECT count(*) FROM incidents").fetchone()[0]
    memory = database.execute("SELECT body FROM memory").fetchone()
    database.close()
    world = (directory / "world").read_text().split()
    where = f"seed {seed}, life {life}"
    assert len(world) == len(set(world)), f"{where}: an effect was performed twice"
    missing = set(world) - set(intents)
    assert not missing, f"{where}: performed without an intent: {missing}"
    good = sum(ok == 1 for ok in intents.values())
    failed = sum(ok == 0 for ok in intents.values())
    assert counters.get("restarts", 0) == good, where
    assert counters.get("actions", 0) == good + failed, where
    assert counters.get("closed", 0) == closed, where
    assert len([ok for ok in intents.values() if ok is None]) <= EFFECTS_PER_LIFE, where
    latest = max(int(effect.split("/")[0]) for effect in intents)
    assert memory[0] == b"attempts:%d" % (latest // EFFECTS_PER_LIFE), (
        f"{where}: memory is not that of the last intent")


def test_what_was_written_is_the_seed_of_the_next_life(tmp_path):
    async def first_life():
        journal = Journal(tmp_path)
        await journal.append(
            Intent("a", "start", "run/x", "f", "", "r", 1.0),
            Intent("b", "stop", "run/x", "f", "", "r", 2.0), Memory(b"m"), wait=True,
        )
        counts = (Count("n", ("x", "y"), 2.0),)
        await journal.append(Finished("a", True, "", 3.0, counts), wait=True)
        journal.close()

    asyncio.run(first_life())
    seed = Journal(tmp_path).seed
    assert seed.memory == b"m"
    assert [intent.id for intent in seed.unfinished] == ["b"]
    assert [done.id for done in seed.finished] == ["a"] and seed.finished[0].ok
    assert seed.counters == {("n", ("x", "y")): 2.0}


def test_a_locked_file_is_a_stalled_journal_that_recovers(tmp_path):
    async def scenario():
        journal = Journal(tmp_path)
        journal._database.execute("PRAGMA busy_timeout=50")
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        done = journal.append(Memory(b"1"), wait=True)
        deadline_s = time.monotonic() + 30.0
        while not journal.stalled:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert not done.done()
        other.execute("ROLLBACK")
        other.close()
        await asyncio.wait_for(done, 30.0)
        assert not journal.stalled
        journal.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["taken", "told"])
def test_a_journal_whose_oldest_record_waits_is_stalled_before_any_error(
    where, tmp_path, monkeypatch
):
    """A disk that does not answer says nothing: the age of what waits for it does."""
    monkeypatch.setattr("holdfast.agent.history.journal.STALL_S", 0.2)
    reached, go = threading.Event(), threading.Event()

    def hook(point):
        if point == where:
            reached.set()
            assert go.wait(LIMIT_S)

    async def scenario():
        journal = Journal(tmp_path, hook)
        journal.append(Memory(b"1"))
        assert await asyncio.to_thread(reached.wait, LIMIT_S)
        if where == "told":
            assert not journal.stalled, "what was written is not late"
            journal.append(Memory(b"2"))
        await until(lambda: journal.stalled)
        journal.append(Memory(b"3"))
        assert journal.stalled and not journal.error
        go.set()
        await asyncio.wait_for(journal.append(Memory(b"4"), wait=True), LIMIT_S)
        assert not journal.stalled
        journal.close()

    asyncio.run(scenario())


def test_a_disk_that_takes_nothing_is_asked_again_at_a_pace(tmp_path):
    tries = []

    async def scenario():
        journal = Journal(tmp_path, lambda point: point == "taken" and tries.append(
            time.monotonic()))
        journal._database.execute("PRAGMA busy_timeout=0")
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        done = journal.append(Memory(b"1"), wait=True)
        await until(lambda: len(tries) >= 4)
        other.execute("ROLLBACK")
        other.close()
        await asyncio.wait_for(done, LIMIT_S)
        journal.close()

    asyncio.run(scenario())
    assert tries[3] - tries[0] >= 0.5  # a fifth of a second apart


def test_old_records_go_after_each_thousand(tmp_path, monkeypatch):
    pruned = []
    monkeypatch.setattr("holdfast.agent.history.journal.prune", pruned.append)

    async def scenario():
        journal = Journal(tmp_path)
        for count, times in ((999, 1), (1, 2), (999, 2), (1, 3)):
            await journal.append(*[Memory(b"")] * count, wait=True)
            assert len(pruned) == times
        journal.close()

    asyncio.run(scenario())


def test_what_people_asked_and_said_is_the_seed_of_the_next_life(tmp_path):
    incident = Incident("i", "f", "run/r", "warn", "r", 1, 1.0, 1.0, "x", "c")
    asked = [Asked(id, "pause", "run/r", "why", "ann", wall_s)
             for wall_s, id in enumerate(("waits", "done", "refused"), 1)]
    jobs = [JobRecord(f"{number:04d}", float(number), b"%d" % number) for number in range(1001)]

    async def first_life():
        journal = Journal(tmp_path)
        await journal.append(
            Happened(incident), *asked, Answered("done", True, "it rests", 5.0),
            Answered("refused", False, "not yours", 6.0), Review("i", "ann", 7.0), *jobs, wait=True)
        journal.close()

    asyncio.run(first_life())
    seed = Journal(tmp_path).seed
    assert [(one.id, one.state, one.text) for one in seed.asked] == [
        ("waits", "waiting", ""), ("done", "done", "it rests"), ("refused", "refused", "not yours")]
    assert seed.reviews == (Review("i", "ann", 7.0, "", "", 0.0, ""),), "nothing else was said"
    assert seed.jobs == tuple(one.body for one in jobs[1:]), "a thousand, the newest last"


def test_the_queue_is_bounded_while_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.history.journal.BATCHES_MAX", 20)

    async def scenario():
        journal = Journal(tmp_path)
        pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
        journal._database.execute(f"PRAGMA max_page_count={pages}")
        for number in range(200):
            journal.append(Intent(f"{number}" * 100, "s", "s" * 900, "", "", "", 0.0))
        deadline_s = time.monotonic() + 30.0
        while not journal.stalled:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)
        assert "full" in journal.error
        assert journal.dropped > 0
        journal.close(0.5)

    asyncio.run(scenario())


def test_text_that_is_none_is_mended_and_a_number_beyond_64_bits_costs_its_own_record(tmp_path):
    odd = Incident("i\udcff", "host_oom", "node/a/\udce9", "warn", "", 0, 1.0, 1.0, "r\ud800", "c",
                   evidence=(("cgroup", "/job\udcff"),))

    async def scenario():
        said: list[str] = []
        journal = Journal(tmp_path, on_error=said.append)
        journal.append(Intent("1", "start", "run/x", "", "", "why \udcff", 0.0), Memory(b"\xff"))
        journal.append(Count("actions", ("x",), 2.0), Happened(odd, (Count("n", ("\udcff",)),)),
                       Finished("1", 1 << 70, "", 0.0), Count("actions", ("x",), 3.0))
        await asyncio.wait_for(journal.append(Count("late", ("x",)), wait=True), 30.0)
        assert not journal.stalled and journal.dropped == 1
        assert len(said) == 3 and all("could not be written as it was" in one for one in said)
        journal.close()
        again = Journal(tmp_path)
        (intent,), (incident,) = again.seed.unfinished, again.seed.incidents
        assert intent.reason == "why \ufffd" and again.seed.memory == b"\xff"
        assert incident.id == "i\ufffd" and incident.evidence == (("cgroup", "/job\ufffd"),)
        assert again.seed.counters == {
            ("actions", ("x",)): 5.0, ("n", ("\ufffd",)): 1.0, ("late", ("x",)): 1.0}
        again.close()

    asyncio.run(scenario())


def test_only_what_outlives_the_node_is_synced():
    stop = Effect("1", "stop", "run/x", "r", 1.0, Stop("x", 1, (), 1.0, "r"))
    assert not needs_sync(stop)
    from msgspec.structs import replace

    assert needs_sync(replace(stop, kind="reboot_node"))
    assert needs_sync(replace(stop, outlives_node=True))
    assert intent_of(stop, 5.0).wall_s == 5.0


@pytest.mark.parametrize("content", [b"not a database at all, but long enough" * 50, b"SQLite"])
def test_a_foreign_file_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="journal.db.*move"):
        Journal(tmp_path)
    assert path.read_bytes() == content


def test_another_programs_database_is_refused(tmp_path):
    database = sqlite3.connect(tmp_path / "journal.db")
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.commit()
    database.close()
    with pytest.raises(StoreError, match="another program"):
        Journal(tmp_path)
