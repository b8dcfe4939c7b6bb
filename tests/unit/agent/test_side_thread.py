"""Work that hangs is alone with that: nothing waits for it, and it is bounded."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
from fakes import Hung, until
from msgspec.structs import replace
from root_unit import INCIDENT, REBOOT, options
from waiting import LIMIT_S, wait_for

from holdfast.agent.actions import evidence_store
from holdfast.agent.system.side_thread import WAITING_MAX, SideThread


def test_a_store_that_hangs_holds_up_nothing_else_not_even_the_end(agent, tmp_path, monkeypatch):
    hung, real = Hung(tmp_path / "hung"), evidence_store.write_incident

    def through_it(folder, incident, parts=None):
        if incident.id == "i1" and hung.path.exists():
            hung.path.write_bytes(b"x")
        real(folder, incident, parts)

    monkeypatch.setattr(evidence_store, "write_incident", through_it)

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, node):
            for number in range(1, 3 * WAITING_MAX):
                about = replace(INCIDENT, id=f"i{number % 100}", reason=f"number {number}")
                daemon.evidence.keep(about)
            await until(lambda: daemon.evidence.side_thread.busy_s)
            await asyncio.wait_for(asyncio.to_thread(time.monotonic), LIMIT_S)
            names = [thread.name for thread in threading.enumerate()]
            assert names.count(daemon.evidence.side_thread.name) == 1
            config = daemon.state.config
            daemon.state.loaded = daemon.state.loaded._replace(config=replace(
                config, evidence=replace(config.evidence, store=str(tmp_path / "k"))
            ))
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].error.startswith("refused: evidence.store:")

    asyncio.run(scenario())  # `agent` waits for its end for so long and no longer
    assert not (tmp_path / "kept/i2.json").exists()
    hung.answer()
    wait_for((tmp_path / "kept/i99.json").exists)
    # Of each incident the newest alone, in the order of their ids: nothing was written twice.
    assert b'"reason":"number 702"' in (tmp_path / "kept/i2.json").read_bytes()


def test_what_waits_is_bounded_and_a_crash_ends_one_job_alone():
    async def scenario():
        aside, go, done = SideThread("test"), threading.Event(), []
        first = aside.do("first", go.wait)
        await until(lambda: aside.busy_s)
        waiting = [aside.do(str(n), lambda n=n: done.append(n)) for n in range(WAITING_MAX + 9)]
        assert aside.do(str(WAITING_MAX), lambda: done.append(-1)) is waiting[WAITING_MAX]
        assert aside.dropped == 9 and all(one.cancelled() for one in waiting[:9])
        go.set()
        await asyncio.wait_for(first, LIMIT_S)
        await asyncio.wait_for(waiting[-1], LIMIT_S)
        assert done == [*range(9, WAITING_MAX), -1, *range(WAITING_MAX + 1, WAITING_MAX + 9)]
        with pytest.raises(OSError, match="no"):
            await aside.do("x", lambda: os.stat("/proc/no/such"))
        await aside.do("y", lambda: None)
        await aside.close(5.0)
        assert not aside._thread.is_alive()

    asyncio.run(scenario())
