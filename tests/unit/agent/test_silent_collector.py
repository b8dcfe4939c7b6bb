"""What a collector said before it fell silent: for whoever concludes, and not for the page."""

from __future__ import annotations

import asyncio

from fakes import until

from holdfast.agent.config.load import load
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors.contract import FAST, Metric, NoData, Sample


def test_what_a_silent_collector_said_stands_for_who_concludes_and_not_on_the_page(monkeypatch):
    class Moody:
        name, pace, metrics = "moody", FAST, (Metric("x", "gauge", "x"),)
        failure: Exception | None = OSError("hangs")

        def collect(self, roots, boot_s):
            if self.failure is not None:
                raise self.failure
            return [Sample("x", "", 1.0, boot_s)]

    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ALL", (Moody,))

    async def scenario():
        config = load(None, {"agent.tick_s": (0.05, "t"), "agent.fast_s": (0.1, "t")}).config
        runner = Runner(config, lambda part, error: None)
        assert runner.known().silent == {"x"}
        task = asyncio.create_task(runner.run())
        await until(lambda: "hangs" in runner.health()[0].error)
        assert runner.known().silent == {"x"} and not runner.known()
        Moody.failure = None
        await until(lambda: runner.samples())
        assert runner.known() is runner.samples() and not runner.known().silent
        Moody.failure = OSError("hangs")
        await until(lambda: not runner.samples())
        assert len(runner.known().of("x")) == 1 and runner.known().silent == {"x"}
        Moody.failure = NoData("not here any more")
        await until(lambda: not runner.known())
        assert not runner.known().silent
        task.cancel()
        runner.close()

    asyncio.run(scenario())
