"""What every store must do, each test on every store: SQLite, memory, and a real etcd of three
members."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from etcd_servers import etcd
from waiting import until

from holdfast.agent.config import settings
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store.base import Conflict, Store
from holdfast.agent.store.etcd import open_etcd
from holdfast.agent.store.memory import MemoryServer, MemoryStore
from holdfast.agent.store.sqlite import SqliteStore

LEASE_S = 5.0  # longer than what is done within one takes on a busy machine


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Stores:
    """One store as several nodes see it; SQLite has one node alone."""

    def __init__(self, kind: str, directory: Path, url: str) -> None:
        self.kind, self.directory, self.url = kind, directory, url
        self.opened: list[Store] = []
        self.server = MemoryServer(boot_s, LEASE_S)

    def open(self, node: str) -> Store:
        folder = self.directory / node
        folder.mkdir(exist_ok=True)
        store: Store
        if self.kind == "sqlite":
            store = SqliteStore(folder)
        elif self.kind == "memory":
            store = MemoryStore(self.server, node, boot_s)
        else:
            cluster = settings.Store(url=self.url, cluster=self.directory.name[-60:])
            store = open_etcd(cluster, node, folder, lambda: LEASE_S)
        self.opened.append(store)
        return store

    def nodes(self, *names: str) -> list[Store]:
        return [self.open(name) for name in names]


@pytest.fixture(scope="module")
def real_etcd(tmp_path_factory):
    with etcd(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def stores(request, tmp_path):
    """`stores(scenario)` runs it in a loop of its own and closes every store."""
    return runner(request, tmp_path)


@pytest.fixture(params=["memory", "etcd"])
def shared_stores(request, tmp_path):
    """The same, of stores that several nodes share."""
    return runner(request, tmp_path)


async def put_for_sure(store: Store, write: StoreWrite) -> None:
    """Writes until it is known to stand there: a starved etcd answers too late, and a write that
    was sent twice is then a TimeoutError, whichever of the two came true."""
    for _ in range(5):
        try:
            await store.put(write)
            return
        except TimeoutError:
            await store.refresh()
            if bodies(store).get(write.key) == (write.expect_version + 1, write.body):
                return
    raise AssertionError(f"{write.key} was not written")


def runner(request, directory: Path):
    url = request.getfixturevalue("real_etcd").url if request.param == "etcd" else ""
    found = Stores(request.param, directory, url)

    def run(scenario) -> None:
        async def whole() -> None:
            try:
                await asyncio.wait_for(scenario(found), 120.0)
            finally:
                for store in found.opened:
                    closing = store.close()
                    if closing is not None:
                        await closing

        asyncio.run(whole())

    return run


@contextlib.asynccontextmanager
async def followed(*stores: Store):
    """While each is watched; yields what was said of changes."""
    said: list[str] = []
    tasks = [asyncio.create_task(one.watch(said.append)) for one in stores]
    try:
        yield said
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def bodies(store: Store) -> dict[str, tuple[int, bytes]]:
    return {doc.key: (doc.version, doc.body) for doc in store.view().docs
            if doc.key != "cluster"}


def test_versions_count_from_one_and_only_the_expected_one_is_replaced(stores):
    async def scenario(all_of_them):
        store = all_of_them.open("a")
        await store.refresh()
        assert store.view().up and bodies(store) == {}
        assert await store.put(StoreWrite("run/m", 0, b"one")) == 1
        assert await store.put(StoreWrite("run/m", 1, b"two")) == 2
        for stale in (0, 1, 3):
            with pytest.raises(Conflict):
                await store.put(StoreWrite("run/m", stale, b"never"))
        assert bodies(store) == {"run/m": (2, b"two")}
        await store.refresh()
        assert bodies(store) == {"run/m": (2, b"two")}

    stores(scenario)


def test_what_was_deleted_is_absent_and_may_be_written_anew(stores):
    async def scenario(all_of_them):
        store = all_of_them.open("a")
        await store.refresh()
        await store.put(StoreWrite("run/m", 0, b"one"))
        with pytest.raises(Conflict):
            await store.delete("run/m", 7)
        await store.delete("run/m", 1)
        assert bodies(store) == {}
        with pytest.raises(Conflict):
            await store.delete("run/m", 1)
        assert await store.put(StoreWrite("run/m", 0, b"new")) == 1
        await store.refresh()
        assert bodies(store) == {"run/m": (1, b"new")}

    stores(scenario)


def test_of_many_at_once_one_wins(stores):
    async def scenario(all_of_them):
        store = all_of_them.open("a")
        await store.refresh()

        async def create(number):
            try:
                return await store.put(StoreWrite("run/m", 0, b"%d" % number))
            except Conflict:
                return 0

        results = await asyncio.gather(*(create(number) for number in range(20)))
        assert sorted(results) == [0] * 19 + [1]
        assert bodies(store)["run/m"] == (1, b"%d" % results.index(1))

    stores(scenario)


def test_any_bytes_come_back_as_they_were(stores):
    body = bytes(range(256)) * 400

    async def scenario(all_of_them):
        store = all_of_them.open("a")
        await store.refresh()
        for number in range(150):  # more than one page
            await put_for_sure(store, StoreWrite(f"node/n-{number}.\u00fc", 0, body[:number]))
        await put_for_sure(store, StoreWrite("run/m", 0, body))
        before = store.view()
        await store.refresh()
        assert store.view().docs == before.docs and bodies(store)["run/m"] == (1, body)

    stores(scenario)


def test_a_lease_is_one_nodes_and_guards_what_is_written_below_it(stores):
    async def scenario(all_of_them):
        store = all_of_them.open("a")
        await store.refresh()
        with pytest.raises(Conflict):
            await store.put(StoreWrite("run/m", 0, b"no lease", lease="m"))
        begun_s = boot_s()
        await store.put(StoreWrite("lease/m", 0, b"a"))
        (lease,) = store.view().leases
        assert (lease.run, lease.holder) == ("m", "a")
        assert lease.until_boot_s >= begun_s + LEASE_S
        assert await store.put(StoreWrite("run/m", 0, b"mine", lease="m")) == 1
        with pytest.raises(Conflict):
            await store.put(StoreWrite("run/other", 0, b"not mine", lease="other"))
        await store.put(StoreWrite("lease/m", 0, b"a"))
        assert store.view().leases[0].until_boot_s >= lease.until_boot_s
        assert [doc.key for doc in store.view().docs if doc.key.startswith("lease")] == []

    stores(scenario)


def test_a_second_node_sees_what_the_first_writes_and_cannot_overtake_it(shared_stores):
    async def scenario(all_of_them):
        first, second = all_of_them.nodes("a", "b")
        await first.refresh()
        async with followed(first, second) as said:
            await until(lambda: second.view().up)
            await first.put(StoreWrite("run/m", 0, b"one"))
            await until(lambda: bodies(second) == {"run/m": (1, b"one")})
            assert "the store changed" in said
            await second.put(StoreWrite("run/m", 1, b"two"))
            with pytest.raises(Conflict):
                await first.put(StoreWrite("run/m", 1, b"stale"))
            assert bodies(first) == {"run/m": (2, b"two")}  # a conflict reads it anew
            await first.delete("run/m", 2)
            await until(lambda: bodies(second) == {})

    shared_stores(scenario)


def test_a_lease_that_is_not_renewed_goes_to_the_next_and_no_sooner(shared_stores):
    async def scenario(all_of_them):
        first, second = all_of_them.nodes("a", "b")
        await first.refresh()
        async with followed(first, second):
            await until(lambda: second.view().up)
            await first.put(StoreWrite("lease/m", 0, b"a"))
            await until(lambda: second.view().leases)
            assert second.view().leases[0].until_boot_s == 0.0  # another's clock says nothing
            await first.put(StoreWrite("lease/m", 0, b"a"))  # renewed once, and then no more
            until_boot_s = first.view().leases[0].until_boot_s
            assert until_boot_s <= boot_s() + LEASE_S

            async def taken() -> bool:
                try:
                    await second.put(StoreWrite("lease/m", 0, b"b"))
                except Conflict:
                    return False
                return True

            while not await taken():
                await asyncio.sleep(0.05)
            assert boot_s() > until_boot_s
            with pytest.raises(Conflict):
                await first.put(StoreWrite("run/m", 0, b"late", lease="m"))
            assert await second.put(StoreWrite("run/m", 0, b"b's", lease="m")) == 1
            await until(lambda: [one.holder for one in first.view().leases] == ["b"])

    shared_stores(scenario)


def test_one_document_is_read_as_the_store_has_it_now(shared_stores):
    async def scenario(all_of_them):
        first, second = all_of_them.nodes("a", "b")
        await first.refresh()
        await second.refresh()
        assert (await second.read("run/m")).version == 0
        await first.put(StoreWrite("run/m", 0, b"one"))
        found = await second.read("run/m")  # nobody has told it to look
        assert (found.version, found.body) == (1, b"one")

    shared_stores(scenario)


def test_a_lease_is_taken_from_a_lost_holder_and_from_no_other(shared_stores):
    async def scenario(all_of_them):
        first, second = all_of_them.nodes("a", "b")
        await first.refresh()
        async with followed(first, second):
            await until(lambda: second.view().up)
            await first.put(StoreWrite("lease/m", 0, b"a"))
            await until(lambda: second.view().leases)
            with pytest.raises(Conflict):
                await second.put(StoreWrite("lease/m", 0, b"b", over="c"))
            await second.put(StoreWrite("lease/m", 0, b"b", over="a"))
            assert await second.put(StoreWrite("run/m", 0, b"b's", lease="m")) == 1
            with pytest.raises(Conflict):
                await first.put(StoreWrite("run/m", 1, b"late", lease="m"))
            await until(lambda: [one.holder for one in first.view().leases] == ["b"])
            with pytest.raises(Conflict):
                await first.put(StoreWrite("lease/m", 0, b"a", over="c"))

    shared_stores(scenario)


def test_a_holder_who_has_not_heard_of_his_successor_writes_nothing_below_his_lease(shared_stores):
    """He follows nothing, as one whose network is cut: the store itself must compare."""
    async def scenario(all_of_them):
        first, second = all_of_them.nodes("a", "b")
        await first.refresh()
        await first.put(StoreWrite("lease/m", 0, b"a"))
        await second.refresh()
        await second.put(StoreWrite("lease/m", 0, b"b", over="a"))
        assert [one.holder for one in first.view().leases] == ["a"]  # as far as he knows
        with pytest.raises(Conflict):
            await first.put(StoreWrite("run/m", 0, b"late", lease="m"))
        assert (await second.read("run/m")).version == 0

    shared_stores(scenario)


def test_an_agent_that_starts_anew_takes_its_own_lease_over(shared_stores):
    async def scenario(all_of_them):
        (store,) = all_of_them.nodes("a")
        await store.refresh()
        await store.put(StoreWrite("lease/m", 0, b"a"))
        again = all_of_them.open("a")
        await again.refresh()
        assert again.view().leases[0].until_boot_s == 0.0  # it asked for nothing yet
        await again.put(StoreWrite("lease/m", 0, b"a"))
        assert await again.put(StoreWrite("run/m", 0, b"new life", lease="m")) == 1
        if all_of_them.kind == "etcd":  # memory's server knows a node by its name alone
            with pytest.raises(Conflict):
                await store.put(StoreWrite("run/m", 1, b"old life", lease="m"))

    shared_stores(scenario)
