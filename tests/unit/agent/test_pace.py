"""When collectors are read."""

from __future__ import annotations

import asyncio

import pytest
from waiting import until

from holdfast.agent.config import load
from holdfast.agent.runner import Runner
from holdfast.collectors.roots import Roots
from holdfast.collectors.sample import FAST, Metric, Pace, Sample


def test_each_collector_is_read_at_its_own_pace_and_what_it_said_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings: list[str] = []

    def paced(name: str, pace: Pace) -> type:
        def collect(self: object, roots: Roots, boot_s: float) -> list[Sample]:
            readings.append(name)
            return [Sample(name, "", 1.0, boot_s)]

        return type(name, (), {"name": name, "pace": pace, "collect": collect,
                               "metrics": (Metric(name, "gauge", name),)})  # fmt: skip

    monkeypatch.setattr("holdfast.agent.runner.ALL", (
        paced("each", FAST), paced("fifth", Pace(fast=True, every=5)),
        paced("once", Pace(fast=False, every=1000)),
    ))  # fmt: skip

    async def scenario() -> None:
        config = load(None, {"agent.tick_s": (0.05, "t"), "agent.fast_s": (0.2, "t"),
                             "agent.slow_s": (5.0, "t")}).config  # fmt: skip
        runner = Runner(config, lambda part, error: None)
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.samples().of("fifth"))
        first = runner.samples().of("fifth")
        await until(lambda: readings.count("each") > 3)
        assert runner.samples().of("fifth") is first, "not read again, so the very same"
        await until(lambda: readings.count("fifth") == 3)
        assert 9 <= readings.count("each") <= 12 and readings.count("once") == 1
        assert runner.samples().of("fifth") is not first and runner.samples().of("once")
        task.cancel()
        runner.close()

    asyncio.run(scenario())
