"""A script's permit is renewed by the store's word or everybody's, and by nobody's otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Beat, Doc, Plan, Resume
from holdfast.agent.daemon.parts.permits import Permits
from holdfast.agent.store.base import StoreError

LEASE_S, SHORT_S = 10.0, 4.0


def plan(generation: int, **more: Any) -> Plan:
    return Plan("r", generation, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test",
                spares=("c",), **more)


class Store:
    """Holds one plan, or is away."""

    def __init__(self, kept: Plan | None) -> None:
        self.kept = kept

    async def read(self, key: str) -> Doc:
        assert key == "run/r"
        if self.kept is None:
            raise StoreError("away")
        return Doc(key, 1, msgspec.json.encode(self.kept))


def renewed(store: Plan | None, runs: int, answered: dict[str, float] | None = None,
            known: Plan | None = None, told: Sequence[Beat] = ()) -> tuple[int, float] | None:
    """(generation, seconds from now) of the permit that node a's launcher, which runs generation
    `runs`, is given; None where it is given none."""
    now_s, orders = 1000.0, []
    launchers = SimpleNamespace(order=lambda run, fields: orders.append(fields))
    ages = answered or {}
    peers = SimpleNamespace(answered_s=lambda node, run, generation: now_s - ages[node]
                            if node in ages else 0.0, heard=lambda: tuple(told))
    permits = Permits("a", lambda: LEASE_S, lambda: (known,) if known else (), Store(store),
                      launchers, peers, lambda: now_s)
    asyncio.run(permits.renew("r", runs, LEASE_S))
    if not orders:
        return None
    (order,) = orders
    assert order["t"] == "permit"
    return order["generation"], order["until_ns"] / 1e9 - now_s


def test_the_store_renews_the_generation_that_stands() -> None:
    generation, left_s = renewed(plan(3), 3) or (0, 0.0)
    assert generation == 3 and left_s == pytest.approx(LEASE_S, abs=1e-6)


def test_a_newer_plan_renews_its_own_ranks_and_no_older_ones() -> None:
    generation, _ = renewed(plan(4), 3) or (0, 0.0)
    assert generation == 4  # the launcher, which still runs 3, passes it by until it runs 4
    assert renewed(plan(2), 3) is None


def test_without_the_store_all_of_the_plan_must_have_answered() -> None:
    both = {"b": 1.0, "c": 2.5}
    generation, left_s = renewed(None, 3, both, plan(3)) or (0, 0.0)
    assert generation == 3 and left_s == pytest.approx(LEASE_S - 2.5, abs=1e-6)  # the oldest word
    for silent in both:
        some = {node: age for node, age in both.items() if node != silent}
        left_s = (renewed(None, 3, some, plan(3)) or (0, 0.0))[1]
        assert left_s <= 0.0
    assert renewed(None, 3, both) is None
    assert renewed(None, 3, both, plan(3, finished=0)) is None


def test_who_may_have_been_named_since_must_have_answered_as_well() -> None:
    """It told of a launcher of the run: the write that names it may have come to the store, and
    its answer not back."""
    both, beat = {"b": 1.0, "c": 2.5}, Beat("d", "r", 3, 990.0, uid=7)
    mine = plan(3, owner=7)
    assert (renewed(None, 3, both, mine, [beat]) or (0, 0.0))[1] <= 0.0
    for other in (replace(beat, run="q"), replace(beat, uid=8)):
        assert (renewed(None, 3, both, mine, [other]) or (0, 0.0))[1] > 0.0
    assert (renewed(None, 3, both | {"d": 3.0}, mine, [beat]) or (0, 0.0))[1] > 0.0


@pytest.mark.parametrize("kept", [2, 0])
def test_a_store_that_was_restored_to_before_the_generation_is_as_if_it_were_away(
    kept: int,
) -> None:
    """Whom the older plan names may lead by it, so he must have answered too."""
    both, older = {"b": 1.0, "c": 2.5}, replace(plan(kept), spares=("c", "d"))
    assert (renewed(older, 3, both, plan(3)) or (0, 0.0))[1] <= 0.0
    generation, left_s = renewed(older, 3, both | {"d": 4.0}, plan(3)) or (0, 0.0)
    assert generation == 3 and left_s == pytest.approx(LEASE_S - 4.0, abs=1e-6)
    assert renewed(older, 3, both | {"d": 4.0}, plan(2)) is None, "this node knows it no more"


def test_a_node_that_reads_that_it_is_missed_renews_nothing() -> None:
    """Whoever leads counts from there when its permits have run out."""
    both = {"b": 1.0, "c": 2.5}
    missed = plan(3, unheard=("a",))
    assert renewed(missed, 3) is None
    assert renewed(None, 3, both, missed) is None
    assert renewed(plan(3, unheard=("b",)), 3) is not None


def test_all_runs_are_renewed_at_once() -> None:
    """A store that is away takes seconds to say so: in a row the last permits would run out."""
    runs, orders = ("p", "q", "r"), []

    async def scenario() -> None:
        everybody, over = asyncio.Barrier(len(runs)), asyncio.Event()

        class Slow:
            async def read(self, key: str) -> Doc:
                await everybody.wait()  # nobody is answered before all have asked
                return Doc(key, 1, msgspec.json.encode(plan(3)))

        def order(run: str, fields: dict[str, Any]) -> None:
            orders.append(run)
            if len(orders) == len(runs):
                over.set()

        launchers = SimpleNamespace(order=order, scripts=lambda: [(run, 3) for run in runs])
        permits = Permits("a", lambda: LEASE_S, tuple, Slow(), launchers, SimpleNamespace())
        task = asyncio.create_task(permits.run())
        try:
            await asyncio.wait_for(over.wait(), 10.0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    assert sorted(orders) == list(runs)


class Slow:
    """A store that answers after so long; None: never."""

    def __init__(self, after_s: float | None) -> None:
        self.after_s, self.asked = after_s, 0

    async def read(self, key: str) -> Doc:
        self.asked += 1
        if self.after_s is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.after_s or 0.0)
        return Doc(key, 1, msgspec.json.encode(plan(3)))


@pytest.mark.parametrize(("store_leases", "word_leases", "left_leases"), [
    (None, 0.1, 0.9),  # the others say it, and the store nothing
    (0.2, 0.1, 0.9),  # as soon as the store says nothing
    (0.2, 0.7, 1.0),  # what they said is old: it is waited for
    (0.2, None, 1.0),  # one of them says nothing
    (None, 0.7, 0.3),
    (None, None, None)])
def test_a_store_that_is_slow_to_answer_holds_up_no_permit(
    store_leases: float | None, word_leases: float | None, left_leases: float | None
) -> None:
    """An election of etcd's, or packets lost on the way there, may take most of a short lease.
    However often: what it was asked before changes nothing."""
    orders: list[dict[str, Any]] = []
    launchers = SimpleNamespace(order=lambda run, fields: orders.append(fields))
    said_s = 0.0 if word_leases is None else 1000.0 - word_leases * SHORT_S
    peers = SimpleNamespace(answered_s=lambda node, run, generation: said_s, heard=tuple)
    store = Slow(None if store_leases is None else store_leases * SHORT_S)
    permits = Permits("a", lambda: SHORT_S, lambda: (plan(3),), store, launchers, peers,
                      lambda: 1000.0)

    async def body() -> None:
        for _ in range(2):
            await asyncio.wait_for(permits.renew("r", 3, SHORT_S), 30.0)

    asyncio.run(body())
    assert store.asked == 2
    left = [(one["generation"], round((one["until_ns"] / 1e9 - 1000.0) / SHORT_S, 3))
            for one in orders]
    assert left == ([] if left_leases is None else [(3, left_leases)] * 2)
