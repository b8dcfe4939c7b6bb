"""Fixtures of the agent shell's tests."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fakes import FakeNode

from holdfast.agent.actions import root_helper
from holdfast.agent.config.load import load
from holdfast.agent.daemon.daemon import Daemon, Options


@pytest.fixture(autouse=True)
def no_reboot(monkeypatch):
    """Tests run as root too: whatever is wrong, none of them reaches the machine's own reboot."""
    monkeypatch.setattr(root_helper, "REBOOT", ("/bin/false",))
    monkeypatch.setattr(root_helper, "RESET", ("/bin/false",))


@pytest.fixture
def agent(tmp_path):
    """`async with agent() as (daemon, node):` a whole daemon with a fake core; `node`: another
    core, or what makes one, like the class of the real one."""

    @contextlib.asynccontextmanager
    async def start(private=False, run="", node=None, wait=True, **settings):
        overrides = {
            "agent.state_dir": (str(tmp_path / "state"), "test"),
            "agent.runtime_dir": (str(tmp_path / "run"), "test"),
            "agent.listen": ("127.0.0.1:0", "test"),
            "agent.node": ("node-a", "test"),
        }
        for key, value in settings.items():
            overrides[key.replace("__", ".")] = (value, "test")
        made = []

        def make(*arguments):
            maker = FakeNode if node is None else node
            made.append(maker(*arguments) if callable(maker) else maker)
            return made[-1]

        options = Options(private, run, None, overrides)
        daemon = Daemon(load(None, overrides), options, make)
        task = asyncio.create_task(daemon.run())
        try:
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + 30.0
            while not (tmp_path / "run" / "agent.sock").exists() and not task.done():
                assert loop.time() < deadline_s
                await asyncio.sleep(0.005)
            if task.done():
                task.result()
            yield daemon, made[-1]
        finally:
            if not task.done():
                daemon.stop.set()
            await asyncio.wait_for(task, 60.0)

    return start
