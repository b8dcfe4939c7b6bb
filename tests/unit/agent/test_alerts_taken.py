"""Alerts into the store: many at once share a write, and each sender learns what became of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.agent.core.model import Alert, Doc, StoreView, StoreWrite
from holdfast.agent.daemon.alerts import KEPT_MAX, KEY, Alerts, Full
from holdfast.agent.store.base import Conflict, StoreError


class SlowStore:
    """A document that is written when the test says so, after as many conflicts or failures."""

    def __init__(self) -> None:
        self.doc = Doc(KEY, 0)
        self.puts = 0
        self.errors: list[Exception] = []
        self.goes_on = asyncio.Event()

    def view(self) -> StoreView:
        return StoreView(True, (self.doc,) if self.doc.version else ())

    async def put(self, write: StoreWrite) -> int:
        self.puts += 1
        await self.goes_on.wait()
        if self.errors:
            raise self.errors.pop(0)
        if write.expect_version != self.doc.version:
            raise Conflict("another version")
        self.doc = Doc(KEY, self.doc.version + 1, write.body)
        return self.doc.version

    async def refresh(self) -> None:
        """Another agent wrote meanwhile."""
        kept = msgspec.json.decode(self.doc.body) if self.doc.body else []
        body = msgspec.json.encode([*kept, alert(f"others-{len(kept)}")])
        self.doc = Doc(KEY, self.doc.version + 1, body)

    def ids(self) -> set[str]:
        return {one["id"] for one in msgspec.json.decode(self.doc.body)}


def alert(id: str, firing: bool = True) -> Alert:
    return Alert(id, "A", "", "", "", 1e9, firing=firing)


def taken(store: SlowStore, *deliveries: list[Alert]) -> list[Any]:
    async def scenario() -> list[Any]:
        store.goes_on = asyncio.Event()
        alerts = Alerts(store, tuple, lambda why: None, lambda what, error: None)  # type: ignore
        takes = [asyncio.ensure_future(alerts.take(one)) for one in deliveries]
        while not store.puts:
            await asyncio.sleep(0)
        store.goes_on.set()
        return await asyncio.gather(*takes, return_exceptions=True)

    return asyncio.run(scenario())


def test_what_comes_while_one_is_written_shares_the_next_write() -> None:
    store = SlowStore()
    said = taken(store, *([alert(f"a{number}")] for number in range(100)))
    assert said == [1] * 100 and store.puts <= 2
    assert store.ids() == {f"a{number}" for number in range(100)}
    assert taken(store, [alert("a1")], [alert("a1", firing=False)]) == [0, 0]


def test_a_conflict_loses_none_of_a_batch_and_counts_none_twice() -> None:
    store = SlowStore()
    store.errors = [Conflict("x"), Conflict("x")]
    assert taken(store, [alert("a")], [alert("b")], [alert("a")]) == [1, 1, 0]
    assert store.ids() >= {"a", "b", "others-0"}


@pytest.mark.parametrize("error", [StoreError("disk"), TimeoutError("late"), RuntimeError("bug")])
def test_every_sender_of_a_batch_that_was_not_written_is_told_so(error: Exception) -> None:
    store = SlowStore()
    store.errors = [error]
    first, *rest = taken(store, [alert("a")], [alert("b")], [alert("c")])
    assert [first, *rest][:1] == [error] and store.puts <= 2
    assert all(one in (1, error) for one in rest)
    assert store.ids() if any(one == 1 for one in rest) else not store.doc.version


def test_one_for_which_there_is_no_room_leaves_the_others_alone() -> None:
    store = SlowStore()
    many = [alert(f"m{number}") for number in range(KEPT_MAX - 1)]
    assert taken(store, many) == [KEPT_MAX - 1]
    store.puts = 0
    said = taken(store, [alert("x"), alert("y")], [alert("z")])
    assert isinstance(said[0], Full) and said[1] == 1
    assert "z" in store.ids() and not {"x", "y"} & store.ids()


def test_a_sender_that_hangs_up_stops_nobody() -> None:
    async def scenario() -> None:
        store = SlowStore()
        alerts = Alerts(store, tuple, lambda why: None, lambda what, error: None)  # type: ignore
        first = asyncio.ensure_future(alerts.take([alert("a")]))
        second = asyncio.ensure_future(alerts.take([alert("b")]))
        while not store.puts:
            await asyncio.sleep(0)
        first.cancel()
        store.goes_on.set()
        assert await second == 1 and store.ids() == {"a", "b"}
        assert await alerts.take([alert("c")]) == 1

    asyncio.run(scenario())
