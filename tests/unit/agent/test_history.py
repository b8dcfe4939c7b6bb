"""The history of a node: bounded while it runs, and nobody's runs push out what others went
through."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque

from fakes import until
from msgspec.structs import replace

from holdfast.agent.actions import evidence_store, performer
from holdfast.agent.core.model import Decision, Incident, StoreWrite
from holdfast.agent.history import incident_log, journal, retention
from holdfast.agent.history.incident_log import IncidentLog
from holdfast.agent.history.journal import Count, Finished, Forgotten, Happened, Intent, Journal
from holdfast.agent.store import sqlite
from holdfast.agent.store.sqlite import SqliteStore

OPEN = Incident("demo/1", "rank_killed", "run/demo/rank/0", "fatal", "demo", 1, 1.0, 1.0, "killed",
                "rank 0")


def closed(number: int, run: str = "", **more) -> Incident:
    return replace(OPEN, id=f"{run or 'node'}/{number}", run=run, state="closed",
                   opened_wall_s=float(number), closed_wall_s=number + 1.0, **more)


def test_whoever_has_most_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(incident_log, "INCIDENTS_MAX", 50)
    owners = {"victim": 1000, "flood-a": 1001, "flood-b": 1001}
    log = IncidentLog((), {}, lambda run: owners[run])
    forgotten, records = [], []

    def tell(*incidents):
        told = log.follow(Decision(incidents=incidents))
        forgotten.extend(told.forgotten)
        records.extend(told.records)

    tell(*(closed(number, "victim") for number in range(10)))
    tell(*(closed(number) for number in range(10)))
    for number in range(10, 200):
        tell(closed(number, "flood-a"), closed(number, "flood-b"))
    tell()
    kept = [one.run for one in log.incidents.values()]
    assert (kept.count("victim"), kept.count(""), len(kept)) == (10, 10, 50)
    assert {one.run for one in forgotten} == {"flood-a", "flood-b"} and len(forgotten) == 350
    assert {one.owner for one in records} == {incident_log.NODE, 1000, 1001}
    tell(*(closed(number) for number in range(200, 300)))
    tell()  # even the node does not push out a user
    kept = [one.run for one in log.incidents.values()]
    assert kept.count("victim") == 10 and kept.count("") == 20


def test_what_is_open_is_never_forgotten_and_so_never_told_twice(monkeypatch):
    monkeypatch.setattr(incident_log, "INCIDENTS_MAX", 5)
    log = IncidentLog(tuple(closed(number) for number in range(5)))
    many = tuple(replace(OPEN, id=f"demo/{number}") for number in range(8))
    first = log.follow(Decision(incidents=many))
    assert len(first.records) == 8 and not first.forgotten
    for _ in range(3):
        again = log.follow(Decision(incidents=many))
        assert again == incident_log.Changes((), ()) and len(log.incidents) == 13
    assert len(log.follow(Decision(incidents=many[5:])).forgotten) == 5


def test_journal_and_store_hold_what_the_history_holds(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(incident_log, "INCIDENTS_MAX", 5)
    kept = tmp_path / "kept"

    async def life(numbers):
        async with agent(evidence__store=str(kept)) as (daemon, node):
            await until(lambda: node.steps)
            for number in numbers:
                node.incidents = (closed(number),)
                daemon.wake("test")
                await until(lambda id=f"node/{number}": id in daemon.incident_log.incidents)
            node.incidents = ()
            daemon.wake("test")
            await until(lambda: len(daemon.incident_log.incidents) == 5)
            newest = list(daemon.incident_log.incidents)
            files = {f"{id.replace('/', '_')}.json" for id in newest}
            await until(lambda: {path.name for path in kept.glob("*.json")} == files)
        return newest

    def in_journal():
        database = sqlite3.connect(tmp_path / "state" / "journal.db")
        tables = [{id for (id,) in database.execute(f"SELECT id FROM {table}")}
                  for table in ("incidents", "owners")]
        database.close()
        return tables

    for numbers in (range(12), range(12, 20)):  # the second life goes on where the first ended
        newest = asyncio.run(life(numbers))
        assert newest == [f"node/{number}" for number in numbers[-5:]]
        assert in_journal() == [set(newest)] * 2


def test_only_a_file_of_this_very_incident_is_taken_away(tmp_path):
    ours, other = closed(1), closed(2, reason="another node's")
    evidence_store.write_incident(tmp_path, ours)
    evidence_store.write_incident(tmp_path, other)
    (tmp_path / "node_3.json").write_text("no incident")
    (tmp_path / "node_4.json").symlink_to(tmp_path / "node_2.json")
    gone = [ours, replace(other, opened_wall_s=7.0), *(closed(number) for number in (3, 5))]
    evidence_store.remove(tmp_path, deque(gone))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"node_2.json", "node_3.json", "node_4.json"}
    assert json.loads((tmp_path / "node_2.json").read_text())["reason"] == "another node's"


def test_the_owner_of_an_incident_outlives_the_agent(tmp_path):
    async def first_life():
        written = Journal(tmp_path)
        records = [Happened(closed(number, "a"), (), 1000 + number) for number in range(3)]
        await written.append(*records, Happened(closed(0, "a"), (), -1), wait=True)
        await written.append(Forgotten(("a/1",)), wait=True)
        written.close()

    asyncio.run(first_life())
    seed = Journal(tmp_path).seed
    assert seed.owners == {"a/0": 1000, "a/2": 1002}
    assert {one.id for one in seed.incidents} == {"a/0", "a/2"}


def test_a_name_that_was_forgotten_and_comes_again_is_another_incident(tmp_path):
    async def life():
        written = Journal(tmp_path)
        again = replace(closed(0, "a"), opened_wall_s=closed(0, "a").opened_wall_s + 5.0)
        count = (Count("incidents", ("hang", "rank_hung", "fatal")),)
        await written.append(Happened(closed(0, "a"), count, 1000), Happened(again, count, 1001),
                             wait=True)
        written.close()

    asyncio.run(life())
    seed = Journal(tmp_path).seed
    assert seed.owners == {"a/0": 1001}
    assert list(seed.counters.values()) == [2.0]


def test_the_journal_does_not_grow_while_the_agent_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "INTENTS_MAX", 10)
    monkeypatch.setattr(retention, "RUNS_MAX", 10)
    monkeypatch.setattr(journal, "PRUNE_EVERY", 20)

    async def scenario():
        written = Journal(tmp_path)
        for number in range(100):
            count = Count("restarts", (f"run-{number}", "rank_killed"))
            await written.append(
                Intent(f"i{number}", "start", "run/x", "f", "", "r", 1.0),
                Finished(f"i{number}", True, "", 2.0, (count, Count("actions", ("start",)))),
                wait=True,
            )
        written.close()

    asyncio.run(scenario())
    database = sqlite3.connect(tmp_path / "journal.db")
    rows = [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("intents", "counters")]
    assert rows[0] <= 30 and rows[1] <= 31
    total = database.execute("SELECT value FROM counters WHERE name = 'actions'").fetchone()
    database.close()
    assert total == (100.0,)


def test_counters_of_runs_do_not_grow_while_the_agent_runs(agent, monkeypatch):
    monkeypatch.setattr(performer, "RUNS_MAX", 10)

    async def scenario():
        async with agent() as (daemon, _node):
            for number in range(100):
                daemon.performer.count(Count("lost_steps", (f"run-{number}",)),
                                       Count("lost_steps", ("run-99",)),
                                       Count("actions", ("start", "", "ok")))
            steps = {key: value for key, value in daemon.performer.counters.items()
                     if key[0] == "lost_steps"}
            assert len(steps) == 10 and ("lost_steps", ("run-98",)) in steps
            assert daemon.performer.counters[("actions", ("start", "", "ok"))] == 100

    asyncio.run(scenario())


def test_documents_of_runs_that_are_over_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "DOCUMENTS_MAX", 20)
    monkeypatch.setattr(sqlite, "PRUNED_AT_ONCE", 5)

    def keys(store):
        return {doc.key for doc in store.view().docs}

    async def scenario():
        store = SqliteStore(tmp_path)
        store.living = lambda: ("long", "new")
        for key in ("run/long", "run/old", "node/a"):
            await store.put(StoreWrite(key, 0, b"1"))
        for number in range(100):
            await store.put(StoreWrite(f"run/{number}", 0, b"1"))
            assert len(store.view().docs) <= 25
        assert await store.put(StoreWrite("run/long", 1, b"2")) == 2  # known as if written now
        assert {"run/long", "node/a", "run/99"} <= keys(store) and "run/old" not in keys(store)
        assert await store.put(StoreWrite("run/old", 0, b"1")) == 1  # comes anew
        before = keys(store)
        await store.refresh()
        assert keys(store) == before
        store.close()
        monkeypatch.setattr(sqlite, "DOCUMENTS_MAX", 8)  # what lay beyond is gone, not just unseen
        again = SqliteStore(tmp_path)
        assert {"run/long", "node/a", "run/old", "run/99"} <= keys(again) and len(keys(again)) <= 9
        await again.put(StoreWrite("run/98", 1, b"2"))
        await again.put(StoreWrite("run/0", 0, b"1"))
        again.close()

    asyncio.run(scenario())
