"""What /metrics has of the collectives in training: of the rank that waited least, and no more."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fakes import FakeLauncher, rank_level, until

from holdfast.agent.metrics.collective_rates import FACTORS, SURE_BYTES, Rate, rates
from holdfast.agent.metrics.families import _Page
from holdfast.worker import page as pages
from holdfast.worker.page import Collective


def page(*found: Collective) -> pages.PageView:
    fields = memoryview(bytearray(pages.SIZE)).cast("Q")
    fields[pages.F_MAGIC], fields[pages.F_VERSION] = pages.MAGIC, pages.VERSION
    write(fields, found)
    return pages.read_page(fields.cast("B"))


def write(fields: memoryview, found: tuple[Collective, ...]) -> None:
    at = pages.F_COLLECTIVES + 1
    for one in found:
        key = pages.collective_key(one.kind, one.ranks, one.on_device)
        for number, value in enumerate((key, one.calls, one.size_bytes, one.ns)):
            fields[at + number] = value
        at += pages.KIND_FIELDS
    fields[pages.F_COLLECTIVES] = 20


def test_the_rank_that_waited_least_is_believed_and_its_bandwidth_is_nccl_tests() -> None:
    late = page(Collective("all_reduce", 4, False, 10, 40_000, 2_000_000))
    early = page(Collective("all_reduce", 4, False, 10, 40_000, 90_000_000))
    assert rates([early, late]) == rates([late, early]) == [
        Rate("all_reduce", 4, "cpu", 4000.0, 0.0002, 2 * 3 / 4 * 40_000 / 0.002)]
    assert rates([page()]) == rates([]) == []


@pytest.mark.parametrize("kind", pages.COLLECTIVES)
def test_what_may_lie_in_a_sockets_buffer_shows_no_bandwidth(kind: str) -> None:
    (small,) = rates([page(Collective(kind, 2, False, 2, 2 * SURE_BYTES - 2, 1000))])
    (large,) = rates([page(Collective(kind, 2, False, 2, 2 * SURE_BYTES, 1000))])
    assert (small.bandwidth is not None) == (kind == "all_reduce")
    assert (large.bandwidth is not None) == (kind != "barrier")
    assert small.call_s == large.call_s == 5e-7


def test_groups_of_other_sizes_and_devices_are_kept_apart_and_a_device_shows_no_time() -> None:
    found = rates([page(
        Collective("all_gather", 2, False, 1, 1 << 30, 10**9),
        Collective("all_gather", 8, False, 1, 1 << 30, 10**9),
        Collective("all_gather", 8, True, 4, 400, 0))])
    assert found == [
        Rate("all_gather", 2, "cpu", 1 << 30, 1.0, (1 << 30) / 2),
        Rate("all_gather", 8, "cpu", 1 << 30, 1.0, (1 << 30) * 7 / 8),
        Rate("all_gather", 8, "device", 100.0, None, None)]


def test_the_factors_are_those_of_the_check() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    from holdfast.agent.checks import collectives

    theirs = {one.name: one.factor for one in collectives.OPERATIONS}
    theirs["send"] = theirs["recv"] = theirs.pop("sendrecv")
    for n in (2, 3, 8):
        assert {name: FACTORS[name](n) for name in theirs} == pytest.approx(
            {name: factor(n) for name, factor in theirs.items()})


def test_the_page_of_metrics_has_them_of_this_generation_alone(agent, tmp_path: Path) -> None:
    async def scenario():
        async with agent() as (daemon, core):
            await until(lambda: daemon.launchers.address)
            launcher = FakeLauncher(tmp_path / "run/agent.sock", nproc=2)
            launcher.hello()
            for rank in range(2):
                launcher.page(rank, os.getpid())
                write(launcher.pages[rank], (
                    Collective("all_reduce", 2, False, 10, 40_000, (1 + rank) * 1_000_000),
                    Collective("send", 2, True, 10, 100, 0)))
            launcher.levels(generation=1, state="running", ranks=[
                rank_level(rank, os.getpid()) for rank in range(2)])
            await until(lambda: core.seen and core.seen[-1].runs
                        and len(core.seen[-1].runs[0].ranks) == 2
                        and all(rank.page for rank in core.seen[-1].runs[0].ranks))
            daemon.wake("test")
            steps = daemon.state.steps
            await until(lambda: daemon.state.steps > steps + 1)
            now = samples(daemon)
            for rank in range(2):
                launcher.pages[rank][pages.F_GENERATION] = 7
            steps = daemon.state.steps
            daemon.wake("test")
            await until(lambda: daemon.state.steps > steps + 2)
            later = samples(daemon)
            launcher.close()
            return now, later

    def samples(daemon):
        return {(one.name.removeprefix("holdfast_train_collective_"), *one.labels.values()):
                one.value for family in _Page(daemon.state, lambda: 0.0)._collectives()
                for one in family.samples}

    now, later = asyncio.run(scenario())
    assert now == {
        ("seconds", "demo", "all_reduce", "2", "cpu"): 0.0001,
        ("bytes", "demo", "all_reduce", "2", "cpu"): 4000.0,
        ("bus_bandwidth_bytes_per_second", "demo", "all_reduce", "2", "cpu"): 4e7,
        ("bytes", "demo", "send", "2", "device"): 10.0}
    assert later == {}
