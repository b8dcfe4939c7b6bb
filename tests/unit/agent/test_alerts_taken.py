"""Alerts into the store: many at once share a write, and each sender learns what became of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Alert, Doc, StoreView, StoreWrite
from holdfast.agent.daemon.alerts import ALL_MAX, KEPT_MAX, KEY, Alerts, Full
from holdfast.agent.store.base import Conflict, StoreError

from ..core.test_alerts import alert as core_alert
from ..core.test_alerts import trained


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
    many = [alert(f"m{number}") for number in range(ALL_MAX - 1)]
    assert taken(store, many) == [ALL_MAX - 1]
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


def test_an_old_alert_loses_its_words_and_is_still_known() -> None:
    store = SlowStore()
    settled = [replace(alert(f"s{number}"), outcome="done") for number in range(KEPT_MAX)]
    waiting = [replace(alert(f"w{number}"), run="r", runbook="b") for number in range(KEPT_MAX)]
    taken(store, settled)
    taken(store, waiting)
    kept = {one["id"]: one for one in msgspec.json.decode(store.doc.body)}
    assert len(kept) == 2 * KEPT_MAX and all(kept[one.id]["name"] for one in waiting)
    assert not any(kept[one.id]["name"] for one in settled)
    assert all(kept[one.id]["outcome"] for one in settled)
    assert taken(store, settled) == [0], "none is taken for a new one"
    taken(store, [replace(alert("w-last"), run="r", runbook="b")])
    last = msgspec.json.decode(store.doc.body, type=list[Alert])[-1]
    assert (last.id, last.name, last.run, last.runbook) == ("w-last", "", "r", "b")


def test_the_oldest_go_first_and_those_that_wait_never() -> None:
    store = SlowStore()
    ended = [alert(f"e{number}", firing=False) for number in range(ALL_MAX // 2)]
    settled = [replace(alert(f"s{number}"), outcome="done") for number in range(ALL_MAX // 2)]
    waiting = [alert("first")]
    taken(store, waiting, settled[1:], ended)
    taken(store, [alert(f"w{number}") for number in range(ALL_MAX // 2 + 1)])
    assert len(store.ids()) == ALL_MAX
    assert store.ids() & {one.id for one in waiting + settled + ended} == {
        one.id for one in waiting + ended[2:]}


@pytest.mark.parametrize("size", [250, 1000])
def test_a_storm_is_one_restart_however_it_is_cut_and_however_often_it_comes(size: int) -> None:
    """Through the store and the core: what the one forgets the other would act on again."""
    storm = [core_alert(number, generation=0) for number in range(1000)]
    lab = trained(max_restarts=9)

    async def scenario() -> None:
        store = SlowStore()
        store.goes_on.set()
        alerts = Alerts(store, lambda: lab.decision.plans, lambda why: None,
                        lambda what, error: None)
        for turn in range(3):
            for begin in range(0, len(storm), size):
                await alerts.take(storm[begin : begin + size])
                for _ in range(200):
                    lab.alerts = alerts.pending(lab.decision.answers)
                    lab.step(0.1)
                    await asyncio.sleep(0)
                    if not alerts.pending(()):
                        break
                assert not alerts.pending(()), "each is answered"
                lab.train(to=20 * (turn + 2))

    asyncio.run(scenario())
    assert lab.view.generation == 2
