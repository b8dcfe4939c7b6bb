"""A real etcd whose members die, freeze, fill up and forget: nothing acknowledged is lost, nothing
hangs, and each fault is said with what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from etcd_servers import Etcd, etcd
from ports import free_ports
from waiting import until

from holdfast.agent.config import settings
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store import etcd as store_of_etcd
from holdfast.agent.store.base import Conflict, StoreError
from holdfast.agent.store.etcd import EtcdStore, open_etcd
from holdfast.agent.store.memory import MemoryServer, MemoryStore, Network

SLOW_SERVER = Path(__file__).parents[2] / "slow_server.py"
LEASE_S = 2.0
LONGEST_CALL_S = 8.0  # the store's own limit, and as much for a busy machine


@pytest.fixture
def three(tmp_path):
    with etcd(tmp_path / "etcd") as cluster:
        yield cluster


def opened(tmp_path, cluster, node="a", **more) -> EtcdStore:
    folder = tmp_path / node
    folder.mkdir(exist_ok=True)
    lease_s = more.pop("lease_s", LEASE_S)
    return open_etcd(settings.Store(url=cluster.url, **more), node, folder, lambda: lease_s)


@asynccontextmanager
async def following(*stores):
    """Each watched and up; closed afterwards."""
    tasks = [asyncio.create_task(one.watch(lambda why: None)) for one in stores]
    try:
        await until(lambda: all(one.view().up for one in stores))
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in stores:
            await one.close()


class Slowed:
    """The same cluster, reached through ports where its answers come late.  `url` as Etcd's."""

    def __init__(self, url: str, file: Path) -> None:
        self.url, self._file = url, file

    def by(self, least_s: float, most_s: float) -> None:
        """From now on, for every answer."""
        self._file.write_text(f"{least_s} {most_s}")


@contextmanager
def slowed(cluster: Etcd, folder: Path, least_s: float, most_s: float) -> Iterator[Slowed]:
    ports = free_ports(len(cluster.members))
    made = Slowed("etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports), folder / "late")
    made.by(least_s, most_s)
    started = []
    try:
        for port, member in zip(ports, cluster.members, strict=True):
            command = [sys.executable, str(SLOW_SERVER), str(port), member.address, folder / "late"]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            assert started[-1].stdout.readline() == b"ready\n"
        yield made
    finally:
        for process in started:
            process.kill()
            process.communicate()


def version_of(store, key) -> int:
    return next((doc.version for doc in store.view().docs if doc.key == key), 0)


def body_of(store, key) -> bytes:
    return next((doc.body for doc in store.view().docs if doc.key == key), b"")


class Appender:
    """Appends tokens to one document, and remembers what was said of each."""

    def __init__(self, store, name: str) -> None:
        self.store, self.name = store, name
        self.taken: dict[str, int] = {}  # token -> version
        self.refused: set[str] = set()
        self.slowest_s = 0.0

    async def write(self, number: int) -> None:
        token = f"{self.name}{number}"
        doc = next((one for one in self.store.view().docs if one.key == "run/log"), None)
        tokens = json.loads(doc.body) if doc else []
        version = doc.version if doc else 0
        body = json.dumps([*tokens, token]).encode()
        begun_s = time.monotonic()
        try:
            self.taken[token] = await self.store.put(StoreWrite("run/log", version, body))
        except Conflict:
            self.refused.add(token)
        except TimeoutError:
            pass  # may have been taken
        except StoreError:
            self.refused.add(token)
            await asyncio.sleep(0.02)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)


async def append(store, writers, stop: asyncio.Event) -> None:
    async def work(writer) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await writer.write(number)
            await asyncio.sleep(0.002)

    await asyncio.gather(*(work(one) for one in writers))


def judge(final: list[str], version: int, writers) -> None:
    """What was acknowledged is there, at its version, once; what was refused is not."""
    assert len(final) == version == len(set(final))
    for writer in writers:
        assert not writer.refused & set(final)
        for token, at in writer.taken.items():
            assert final[at - 1] == token
        assert writer.slowest_s < LONGEST_CALL_S


def test_a_killed_member_loses_nothing_that_was_acknowledged(tmp_path, three):
    async def scenario():
        stores = [opened(tmp_path, three, name) for name in "abc"]
        writers = [Appender(store, name) for store, name in zip(stores, "abc", strict=True)]
        async with following(*stores):
            stop = asyncio.Event()
            task = asyncio.create_task(append(stores[0], writers, stop))
            await until(lambda: version_of(stores[0], "run/log") > 20)
            loop = asyncio.get_running_loop()
            for turn in range(4):  # the leader twice
                victim = await loop.run_in_executor(None, three.leader)
                if turn % 2:
                    victim = next(one for one in three.members if one is not victim)
                victim.kill()
                reached = max(version_of(one, "run/log") for one in stores)
                await until(lambda r=reached: version_of(stores[1], "run/log") > r + 10)
                three.start(victim)
                await loop.run_in_executor(None, three.wait)
            stop.set()
            await task
            await stores[2].refresh()
            final = json.loads(body_of(stores[2], "run/log"))
            judge(final, version_of(stores[2], "run/log"), writers)
            await until(lambda: all(body_of(one, "run/log") == body_of(stores[2], "run/log")
                                    for one in stores))

    asyncio.run(asyncio.wait_for(scenario(), 180.0))


@pytest.mark.parametrize("seed", range(20))
def test_the_store_in_memory_fails_so_as_well_and_keeps_the_same_word(seed):
    """Its faults are drawn; virtual seconds cost nothing."""
    async def scenario():
        rng = random.Random(seed)
        now_s = [0.0]

        async def sleep(seconds):
            now_s[0] += seconds
            await asyncio.sleep(0)

        server = MemoryServer(lambda: now_s[0], LEASE_S)
        stores = [MemoryStore(server, name, lambda: now_s[0], Network(
            rng.random() * 0.2, rng.random() * 0.2, rng.random() * 0.1), rng.getrandbits(30), sleep)
            for name in "abc"]
        writers = [Appender(store, name) for store, name in zip(stores, "abc", strict=True)]
        for number in range(60):
            await asyncio.gather(*(one.refresh() for one in stores))
            await asyncio.gather(*(one.write(number) for one in writers))
        doc = server.docs["run/log"]
        judge(json.loads(doc.body), doc.version, writers)
        assert any(one.taken for one in writers)

    asyncio.run(scenario())


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
def test_a_frozen_member_holds_nobody_up_for_long(tmp_path, three, leader):
    async def scenario():
        stores = [opened(tmp_path, three, name, lease_s=30.0) for name in "ab"]
        async with following(*stores):
            await stores[0].put(StoreWrite("lease/m", 0, b"a"))
            await stores[0].put(StoreWrite("run/m", 0, b"0", "m"))
            loop = asyncio.get_running_loop()
            victim = await loop.run_in_executor(None, three.leader)
            if not leader:
                victim = next(one for one in three.members if one is not victim)
            victim.signal(signal.SIGSTOP)
            try:
                begun_s = time.monotonic()
                # Below the lease what was sent twice is known to be this node's own: none fails.
                for version in (1, 2, 3):
                    await stores[0].put(StoreWrite("run/m", version, b"%d" % version, "m"))
                assert time.monotonic() - begun_s < LONGEST_CALL_S
                await until(lambda: stores[1].view().docs == stores[0].view().docs,
                            2 * LONGEST_CALL_S)
            finally:
                victim.signal(signal.SIGCONT)
            await until(lambda: all(one.view().up for one in stores))

    asyncio.run(asyncio.wait_for(scenario(), 180.0))


def test_a_watch_goes_on_where_what_it_missed_was_compacted(tmp_path, three):
    async def scenario():
        reader, writer = opened(tmp_path, three, "a"), opened(tmp_path, three, "b", lease_s=30.0)
        await writer.refresh()
        for number in range(5):
            await writer.put(StoreWrite(f"run/r{number}", 0, b"old"))
        watching = asyncio.create_task(reader.watch(lambda why: None))
        await until(lambda: reader.view().up)
        assert version_of(reader, "run/r4") == 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for version in range(1, 30):
            await writer.put(StoreWrite("run/r0", version, b"%d" % version))
        await writer.delete("run/r1", 1)
        await writer.delete("run/r2", 1)
        await writer.put(StoreWrite("run/r2", 0, b"anew"))
        await writer.put(StoreWrite("lease/r3", 0, b"b"))
        three.ctl("compact", str(writer._revisions["run/r2"]))
        async with following(reader):
            await until(lambda: body_of(reader, "run/r0") == b"29")
            await until(lambda: body_of(reader, "run/r2") == b"anew")
            assert reader.view().docs == writer.view().docs
            assert [one.holder for one in reader.view().leases] == ["b"]
            await writer.put(StoreWrite("run/r4", 1, b"and on"))
            await until(lambda: body_of(reader, "run/r4") == b"and on")
        await writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 180.0))


def test_without_a_majority_it_says_so_and_goes_on_when_it_is_back(tmp_path, three):
    async def scenario():
        store = opened(tmp_path, three)
        async with following(store):
            await store.put(StoreWrite("run/m", 0, b"kept"))
            await store.put(StoreWrite("lease/m", 0, b"a"))
            for member in three.members[:2]:
                member.kill()
            begun_s = time.monotonic()
            with pytest.raises((StoreError, TimeoutError)):
                await store.put(StoreWrite("run/m", 1, b"lost"))
            assert time.monotonic() - begun_s < LONGEST_CALL_S
            await until(lambda: not store.view().up)
            assert "no member of etcd answers" in store.view().problem
            assert all(one.address in store.view().problem for one in three.members[:2])
            assert body_of(store, "run/m") == b"kept"  # what was known is known still
            three.start(*three.members[:2])
            await until(lambda: store.view().up)
            assert body_of(store, "run/m") in (b"kept", b"lost")  # without an answer: not known
            version = version_of(store, "run/m")
            assert await store.put(StoreWrite("run/m", version, b"on")) == version + 1

    asyncio.run(asyncio.wait_for(scenario(), 180.0))


@pytest.mark.parametrize("members", [3, 1])
def test_an_etcd_that_is_slow_as_a_whole_is_used_and_loses_nothing(tmp_path, members):
    """Slow before it is asked first, and then for each call: a question, a lease, a document."""
    async def scenario(cluster):
        store = opened(tmp_path, cluster, lease_s=10.0)
        watching = asyncio.create_task(store.watch(lambda why: None))
        try:
            await until(lambda: store.view().up, 60.0)
            lease = StoreWrite("lease/m", 0, b"a")
            for _ in range(4):  # as the agent asks: a third of the lease is the limit of each try
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(store.put(lease), 10.0 / 3)
            assert [(one.run, one.holder) for one in store.view().leases] == [("m", "a")]
            took_s = []
            for version in range(2):
                begun_s = time.monotonic()
                write = StoreWrite("run/m", version, b"%d" % version, "m")
                assert await store.put(write) == version + 1
                took_s.append(time.monotonic() - begun_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(store.put(lease), 10.0 / 3)
            assert min(took_s) >= 1.8, took_s
            assert store.view().up and store.traffic.slowest_s() > 1.0
            assert body_of(store, "run/m") == b"1"
            cluster.by(0.0, 0.0)
            await store.put(lease)
            fast_s = []
            for version in range(2, 7):
                begun_s = time.monotonic()
                await store.put(StoreWrite("run/m", version, b"%d" % version, "m"))
                fast_s.append(time.monotonic() - begun_s)
            assert min(fast_s) < min(took_s) / 2, fast_s  # it waits for nothing any more
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()

    with etcd(tmp_path / "etcd", members) as cluster, slowed(cluster, tmp_path, 1.8, 2.0) as slow:
        asyncio.run(asyncio.wait_for(scenario(slow), 180.0))


def test_nodes_that_find_a_store_empty_at_once_all_join_the_cluster_that_one_made(tmp_path):
    async def scenario(cluster):
        stores = [opened(tmp_path, cluster, name) for name in "abc"]
        await asyncio.gather(*(store.refresh() for store in stores))  # each reads before one writes
        assert [store.view().problem for store in stores] == [""] * 3
        assert len({store.known.cluster_id for store in stores}) == 1
        for store in stores:
            await store.close()

    with etcd(tmp_path / "etcd", 1) as cluster, slowed(cluster, tmp_path, 0.3, 0.3) as slow:
        asyncio.run(asyncio.wait_for(scenario(slow), 180.0))


def test_an_etcd_that_came_back_empty_or_is_anothers_is_refused(tmp_path):
    async def scenario(cluster):
        known, new = opened(tmp_path, cluster, "known"), opened(tmp_path, cluster, "new")
        async with following(known):
            await known.put(StoreWrite("run/m", 0, b"kept"))
            (member,) = cluster.members
            member.kill()
            shutil.rmtree(cluster.directory / member.name)
            cluster.start()
            await until(lambda: "came back empty" in known.view().problem)
            assert "holdfast store seed" in known.view().problem and not known.view().up
            assert body_of(known, "run/m") == b"kept"
            with pytest.raises(StoreError, match="came back empty"):
                await known.put(StoreWrite("node/x", 0, b"never"))
            await new.refresh()  # of a node that never saw another: it makes a cluster of it
            assert new.view().up and len(new.view().docs) == 0
            await until(lambda: "is another than this node knows" in known.view().problem)
            with pytest.raises(StoreError, match="is another"):
                await known.put(StoreWrite("node/x", 0, b"never"))
            await new.refresh()
            assert len(new.view().docs) == 0
        await new.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_a_store_that_was_restored_to_an_older_state_is_believed(tmp_path):
    async def scenario(cluster):
        (member,) = cluster.members
        store, idle = opened(tmp_path, cluster), opened(tmp_path, cluster, "idle")
        async with following(store):
            await store.put(StoreWrite("run/m", 0, b"of the backup"))
            data = cluster.directory / member.name
            member.kill()
            shutil.copytree(data, tmp_path / "backup")
            cluster.start()
            await until(lambda: member.ask("/v3/maintenance/status").get("leader"))
            for version in range(1, 20):
                await until(lambda: store.view().up)
                await store.put(StoreWrite("run/m", version, b"lost later"))
            await store.put(StoreWrite("run/newer", 0, b"lost as well"))
            await idle.refresh()
            member.kill()
            shutil.rmtree(data)
            shutil.copytree(tmp_path / "backup", data)
            cluster.start()
            await until(lambda: body_of(store, "run/m") == b"of the backup")
            assert version_of(store, "run/newer") == 0 and store.view().up
            for version in range(40):  # past where it had been: only its keys are older
                await store.put(StoreWrite("run/other", version, b"more"))
            await idle.refresh()
            assert body_of(idle, "run/m") == b"of the backup" and version_of(idle, "run/newer") == 0
            assert await store.put(StoreWrite("run/m", 1, b"on from there")) == 2
            await idle.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_an_etcd_without_space_is_said_and_used_again_once_it_has_some(tmp_path):
    async def scenario(cluster):
        store = opened(tmp_path, cluster, lease_s=60.0)
        async with following(store):
            await store.put(StoreWrite("lease/m", 0, b"a"))
            version = 0
            with pytest.raises(StoreError, match="etcdctl compact and defrag"):
                while True:
                    await store.put(StoreWrite("lease/m", 0, b"a"))
                    version = await store.put(
                        StoreWrite("run/m", version, random.randbytes(500_000)))
            assert not store.view().up and "space exceeded" in store.view().problem
            await store.put(StoreWrite("lease/m", 0, b"a"))  # whoever leads, leads on
            cluster.ctl("compact", str(store._revisions["run/m"]))
            cluster.ctl("defrag")
            cluster.ctl("alarm", "disarm")
            await until(lambda: store.view().up)
            await store.refresh()
            # etcd may say that its space is exceeded of a write that it has made: the member that
            # applies it looks at the space again, behind the one that took it.
            kept = version_of(store, "run/m")
            assert kept in (version, version + 1)
            assert await store.put(StoreWrite("run/m", kept, b"small")) == kept + 1

    with etcd(tmp_path / "etcd", 1, ("--quota-backend-bytes", "8000000")) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_a_node_name_is_one_agents_alone(tmp_path):
    async def scenario(cluster):
        first, other = opened(tmp_path, cluster), opened(tmp_path / "elsewhere", cluster)
        async with following(first):
            await other.refresh()
            assert "another agent" in other.view().problem
            assert "'a': set agent.node" in other.view().problem
            with pytest.raises(StoreError, match="set agent.node"):
                await other.put(StoreWrite("node/a", 0, b"never"))
            assert first.view().leases == ()
        await other.refresh()  # the first has ended, and let go
        assert other.view().up
        await other.gateway.close()  # as kill -9 does it: the name stays its own
        again, first = opened(tmp_path / "elsewhere", cluster), opened(tmp_path, cluster)
        await again.refresh()
        await first.refresh()
        assert again.view().up and "another agent" in first.view().problem
        folder = tmp_path / "private"  # a private agent serves one run: a node may have several
        folder.mkdir()
        private = open_etcd(settings.Store(url=cluster.url), "a", folder, lambda: 2.0, run="m5")
        await private.refresh()
        assert private.view().up
        for one in (again, first, private):
            await one.close()

    (tmp_path / "elsewhere").mkdir()
    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_ended_runs_go_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(store_of_etcd, "PRUNED_AT_ONCE", 5)
    monkeypatch.setattr(store_of_etcd, "LOOK_S", 0.05)

    async def scenario(cluster):
        store = opened(tmp_path, cluster, lease_s=60.0)  # whose run is led is not over
        store.living = lambda: ("r0",)
        async with following(store):
            await store.put(StoreWrite("lease/r1", 0, b"a"))
            for number in range(30):
                await store.put(StoreWrite(f"run/r{number}", 0, b"x"))
            await store.put(StoreWrite("run/r2", 1, b"touched since"))
            monkeypatch.setattr(store_of_etcd, "RUNS_MAX", 10)
            await until(lambda: len(store.view().docs.of("run")) <= 15)
            kept = {name for name, _ in store.view().docs.of("run")}
            assert kept >= {"r0", "r1", "r2", "r29", "r28"} and not kept & {"r3", "r4", "r5"}
            reader = opened(tmp_path, cluster, "b")
            await reader.refresh()
            assert {name for name, _ in reader.view().docs.of("run")} <= kept
            await reader.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_a_store_that_changed_between_two_questions_takes_no_write(tmp_path):
    async def scenario(cluster):
        store = opened(tmp_path, cluster)
        await store.refresh()
        mark, id = "/holdfast/main/cluster", store.known.cluster_id
        assert store.view().cluster == id
        for text in ('{"id": "another"}', "no JSON"):
            cluster.ctl("put", mark, text)
            with pytest.raises(StoreError):
                await store.put(StoreWrite("node/x", 0, b"never"))
            assert not store.view().up and cluster.ctl("get", "/holdfast/main/node/x") == ""
            assert store.view().cluster == ""
            cluster.ctl("put", mark, json.dumps({"id": id}))  # as `holdfast store seed` writes it
            await store.refresh()
        cluster.ctl("put", mark, json.dumps({"id": id, "by": "another node"}))
        with pytest.raises(Conflict):
            await store.put(StoreWrite("node/x", 0, b"once more"))
        assert await store.put(StoreWrite("node/x", 0, b"taken")) == 1
        await store.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))


def test_a_watch_that_ends_with_its_member_goes_on_at_another_at_once(tmp_path, monkeypatch):
    """The plan that follows the member's death is told in that moment.  One that ends again waits.
    """

    class Waits(Exception):
        """Before the next try."""

    def waits(*_):
        raise Waits

    store, lasted_s = store_of_etcd.EtcdStore(
        store_of_etcd.Gateway(("http://127.0.0.1:1",)), "c", "a", tmp_path, lambda: 10.0), []

    async def follow(_):
        lasted_s.append(0.0 if lasted_s else 0.01)
        await asyncio.sleep(lasted_s[-1])
        raise StoreError("the member went")

    async def lost(*_):
        store._up = True

    store._up, store._revision = True, 7
    monkeypatch.setattr(store_of_etcd, "RETRY_MOST_S", 0.005)
    monkeypatch.setattr(store, "_follow_and_look", follow)
    monkeypatch.setattr(store, "_lost", lost)
    monkeypatch.setattr(store_of_etcd.random, "uniform", waits)
    with pytest.raises(Waits):
        asyncio.run(store.watch(lambda _: None))
    assert lasted_s == [0.01, 0.0]


def test_more_agents_than_a_member_answers_for_nothing_look_less_often_and_keep_their_names():
    look_s, lookers = store_of_etcd.look_s, store_of_etcd.LOOKERS
    assert look_s(1) == look_s(lookers) == store_of_etcd.LOOK_S
    assert 2 * lookers / look_s(2 * lookers) == lookers / store_of_etcd.LOOK_S
    assert look_s(10**6) == store_of_etcd.NAME_S / 3


def test_a_look_at_a_store_that_nobody_changes_reads_one_key_and_finds_what_a_watch_missed(
    tmp_path, monkeypatch
):
    """etcd reads all that a node could know to say that nothing of it is newer: of thousands of
    agents it would do nothing else."""
    monkeypatch.setattr(store_of_etcd, "LOOK_S", 0.05)

    async def scenario(cluster):
        store, other = opened(tmp_path, cluster), opened(tmp_path, cluster, "b")
        await other.refresh()
        asked = []
        ask = store.gateway.ask

        async def listening(path, body, limit_s):
            asked.append(body)
            return await ask(path, body, limit_s)

        monkeypatch.setattr(store.gateway, "ask", listening)

        async def rests() -> None:
            """Until five questions in a row were for one key."""
            before = len(asked)
            await until(lambda: len(asked) >= before + 5
                        and not any("range_end" in one for one in asked[-5:]))

        async with following(store):
            await other.put(StoreWrite("node/b", 0, b"1"))
            await until(lambda: store.view().docs.get("node/b").version == 1)
            await rests()
            monkeypatch.setattr(store, "_apply", lambda result: False)  # a watch that says nothing
            await other.put(StoreWrite("node/b", 1, b"2"))
            await until(lambda: store.view().docs.get("node/b").version == 2)
            await rests()
            before = len(asked)
            cluster.ctl("put", "/elsewhere", "of another cluster")
            await until(lambda: any("min_mod_revision" in one for one in asked[before:]))
            await rests()  # and that is known as well
        await other.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))
