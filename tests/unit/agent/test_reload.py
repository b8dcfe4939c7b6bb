"""SIGHUP while something is under way: the living core goes on, under the new settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from pathlib import Path

from fakes import FakeLauncher, rank_level, until

from holdfast.agent.config import child
from holdfast.agent.config.load import Loaded
from holdfast.agent.config.runbooks import InForce
from holdfast.agent.core.actions import PAUSE
from holdfast.agent.core.model import Request
from holdfast.agent.core.node import Node

START = "1/run/demo/start/1"


async def hang_up(daemon, file: Path) -> None:
    """New settings, SIGHUP, and the files read."""
    await until(lambda: daemon.state.steps > 0)  # by now the signal has its handler
    daemon.options = daemon.options._replace(config_file=file)
    file.write_text("[detect]\nstopped_s = 2.5\n")
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: daemon._reloading is not None)
    await daemon._reloading
    assert daemon.state.reload_ok and daemon.node.settings.stopped_s == 2.5


async def some_steps(daemon) -> None:
    for _ in range(5):
        before = daemon.state.steps
        daemon.wake("test")
        await until(lambda before=before: daemon.state.steps > before)


def waiting_orders(launcher: FakeLauncher) -> list[str]:
    """The ids of orders that came and were not looked at."""
    try:
        while data := launcher.sock.recv(1 << 17):
            launcher.mail.append(json.loads(data))
    except BlockingIOError:
        pass
    return [packet["id"] for packet in launcher.mail if packet["t"] == "do"]


def come(tmp_path: Path) -> FakeLauncher:
    """A launcher whose run is to be started."""
    launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
    launcher.hello()
    launcher.levels(generation=0, state="idle", ranks=[])
    return launcher


async def carry_out(daemon, launcher: FakeLauncher) -> None:
    """The start, answered as a launcher does that says it again when it connects."""
    pids = (os.getpid(), os.getppid())
    for rank, pid in enumerate(pids):
        launcher.page(rank, pid)
    launcher.levels(generation=1, state="running",
                    ranks=[rank_level(rank, pid) for rank, pid in enumerate(pids)])
    for _ in range(2):
        launcher.send(t="outcome", id=START, ok=True)
    await until(lambda: not daemon.node.kept.in_flight.pending and not daemon.performer.in_flight)


def journalled(tmp_path: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(tmp_path / "state" / "journal.db") as database:
        rows = database.execute("SELECT id, ok FROM intents WHERE id LIKE '%start%'").fetchall()
    database.close()
    return rows


def test_an_order_that_is_not_answered_yet_is_settled_once(agent, tmp_path):
    async def scenario():
        async with agent(node=Node) as (daemon, core):
            launcher = come(tmp_path)
            assert (await launcher.receive("do"))["id"] == START
            assert list(core.kept.in_flight.pending) == [START]
            daemon.operators.request(Request("q1", PAUSE, "run/demo", "look", by="eva", run="demo"))
            await hang_up(daemon, tmp_path / "agent.toml")
            await some_steps(daemon)
            assert list(daemon.node.kept.in_flight.pending) == [START]
            assert waiting_orders(launcher) == []
            await carry_out(daemon, launcher)
            await some_steps(daemon)
            assert waiting_orders(launcher) == []
            assert daemon.performer.counters["actions", ("start", "", "ok")] == 1.0
            assert daemon.operators.answer("q1")["state"] == "done"
            assert [plan.paused for plan in daemon.state.snapshot.decision.plans] == [True]
            launcher.close()
            # Windows, histories and what was learnt are in the core itself.
            assert daemon.node is core

    asyncio.run(scenario())
    assert journalled(tmp_path) == [(START, 1)]


def test_a_write_that_the_store_has_not_answered_yet_is_settled_once(agent, tmp_path, monkeypatch):
    async def read(prober, file, overrides):  # in here: a write has seconds, a child takes one
        await asyncio.sleep(0)
        found = child.answer(str(file), overrides)
        loaded = Loaded(found.config, found.origins, found.signatures)
        return loaded, InForce(found.runbooks, found.site_pages)

    monkeypatch.setattr(child, "read", read)

    async def scenario():
        async with agent(node=Node) as (daemon, core):
            put, writes, answer = daemon.store.put, [], asyncio.Event()

            async def slow(write):
                if write.key == "run/demo":
                    writes.append(write.key)
                    await answer.wait()
                return await put(write)

            daemon.store.put = slow
            launcher = come(tmp_path)
            await until(lambda: writes)
            await hang_up(daemon, tmp_path / "agent.toml")
            await some_steps(daemon)
            assert list(daemon.node.kept.in_flight.pending) == ["1/store/run/demo/put/1"]
            assert writes == ["run/demo"]
            answer.set()
            assert (await launcher.receive("do"))["id"] == START
            await carry_out(daemon, launcher)
            await some_steps(daemon)
            assert writes == ["run/demo"] and waiting_orders(launcher) == []
            assert daemon.node is core
            launcher.close()

    asyncio.run(scenario())
    assert journalled(tmp_path) == [(START, 1)]
