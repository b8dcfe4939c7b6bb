"""When collectors are read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.core.detect.host import cores as host_cores
from holdfast.agent.telemetry import collectors
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors.contract import FAST, Metric, Pace, Roots, Sample
from holdfast.collectors.cpu import CpuCollector


def paced(name: str, pace: Pace, collect: Callable[[Roots, float], list[Sample]]) -> type:
    def method(self: object, roots: Roots, boot_s: float) -> list[Sample]:
        return collect(roots, boot_s)

    return type(name, (), {"name": name, "pace": pace, "collect": method,
                           "metrics": (Metric(name, "gauge", name),)})


def test_each_collector_is_read_at_its_own_pace_and_what_it_said_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings: list[str] = []

    def noted(name: str, pace: Pace) -> type:
        def collect(roots: Roots, boot_s: float) -> list[Sample]:
            readings.append(name)
            return [Sample(name, "", 1.0, boot_s)]

        return paced(name, pace, collect)

    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ALL", (
        noted("each", FAST), noted("fifth", Pace(fast=True, every=5)),
        noted("once", Pace(fast=False, every=1000)),
    ))

    clock_s, told = [0.0], list[tuple[Sample, ...]]()  # on a clock that only a sleep moves
    monkeypatch.setattr(collectors, "time", SimpleNamespace(
        monotonic=lambda: clock_s[0], clock_gettime=time.clock_gettime,
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME))

    async def scenario() -> None:
        over = asyncio.Event()

        async def sleep(seconds: float) -> None:
            told.append(runner.samples().of("fifth"))
            clock_s[0] += seconds
            if clock_s[0] > 2.1:
                over.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(collectors, "asyncio", SimpleNamespace(**{
            **vars(asyncio), "sleep": sleep}))
        config = load(None, {"agent.tick_s": (0.05, "t"), "agent.fast_s": (0.2, "t"),
                             "agent.slow_s": (60.0, "t"),
                             "collectors.deadline_s": (30.0, "t")}).config
        runner = Runner(config, lambda part, error: None)
        task = asyncio.create_task(runner.run())
        await until(over.is_set)
        assert Counter(readings) == {"each": 11, "fifth": 3, "once": 1}
        assert all(told) and runner.samples().of("once")
        first, last = told[0], told[5]
        assert [one is first for one in told] == [True] * 5 + [False] * 6, "the very same"
        assert [one is last for one in told[5:]] == [True] * 5 + [False]
        task.cancel()
        runner.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("fast_s", "interval_s"), [(None, 5.0), (1.0, 5.0), (10.0, 10.0)])
def test_cores_are_read_often_enough_to_be_judged_over_a_minute(
    fast_s: float | None, interval_s: float
) -> None:
    given = {} if fast_s is None else {"agent.fast_s": (fast_s, "t")}
    runner = Runner(load(None, given).config, lambda part, error: None)
    (cores,) = [one for one in runner._entries if isinstance(one.collector, CpuCollector)]
    assert runner._interval_s(cores) == interval_s > host_cores.GAP_S
    # Each reading is some milliseconds early or late.
    judge, found = host_cores.Cores(), []
    for number in range(200):
        boot_s = 100.0 + number * interval_s + (number * 37 % 50) / 1000.0
        judge.take((
            (host_cores.NAME, "cpu=0,mode=system", boot_s, boot_s),
            (host_cores.NAME, "cpu=0,mode=idle", 0.0, boot_s),
        ))
        found.append(len(judge.pinned(boot_s)))
    sure = int(host_cores.PINNED_S / interval_s) + 2
    assert set(found[sure:]) == {1}, "a core that is pinned all the time is said all the time"


def test_a_collector_without_a_thread_and_one_that_hangs_cost_no_other_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()

    class Threads(ThreadPoolExecutor):
        def submit(self, *given, **more):  # type: ignore[no-untyped-def]
            if self._thread_name_prefix == "collect-none":
                raise RuntimeError("can't start new thread")
            return super().submit(*given, **more)

    hung: list[float] = []

    def hang(roots: Roots, boot_s: float) -> list[Sample]:
        hung.append(boot_s)
        let_go.wait(30.0)
        return []

    def answer(roots: Roots, boot_s: float) -> list[Sample]:
        return [Sample("good", "", 1.0, boot_s)]

    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ThreadPoolExecutor", Threads)
    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ALL", (
        *(paced(f"hangs{number}", FAST, hang) for number in range(3)),
        paced("none", FAST, answer), paced("good", FAST, answer),
    ))

    async def scenario() -> None:
        config = load(None, {"agent.tick_s": (0.05, "t"), "agent.fast_s": (0.1, "t"),
                             "agent.slow_s": (1.0, "t"),
                             "collectors.deadline_s": (0.6, "t")}).config
        runner = Runner(config, lambda part, error: None)
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.samples().of("good"))
        first_s = runner.samples().of("good")[0].boot_s
        await until(lambda: runner.samples().of("good")[0].boot_s > first_s)
        first_s = runner.samples().of("good")[0].boot_s
        await until(lambda: runner.samples().of("good")[0].boot_s - first_s > 1.0)
        assert len(hung) == 3, "what hangs is waited for once"
        errors = {one.name: one.error for one in runner.health()}
        assert errors["good"] == "" and errors["none"] == "RuntimeError: can't start new thread"
        assert {errors[f"hangs{number}"] for number in range(3)} == {"still hanging"}
        assert not task.done()
        task.cancel()
        let_go.set()
        runner.close()

    asyncio.run(scenario())
