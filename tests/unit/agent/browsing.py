"""An agent with one run, as a browser over TCP and a command over its socket ask it."""

from __future__ import annotations

import asyncio
import os

import aiohttp
from fakes import FakeLauncher, rank_level, until

from holdfast.agent.core.model import Incident

INCIDENT = Incident(
    id="demo/1", fault="rank_killed", subject="run/demo/rank/0", severity="fatal", run="demo",
    generation=1, opened_wall_s=5.0, opened_boot_s=1.0, reason="killed", culprit="rank 0",
)


async def with_run(daemon, node, tmp_path):
    """A launcher with one rank, and the web server up."""
    await until(lambda: daemon.launchers.address)
    launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
    launcher.hello()
    launcher.page(0, os.getpid())
    launcher.levels(generation=1, state="running", ranks=[rank_level(0, os.getpid())],
                    commits=[{"generation": 1, "step": 20, "path": "/", "world": 2, "bad": "",
                              "verified": True}])
    await until(lambda: node.seen and node.seen[-1].runs)
    return launcher


def browse(scenario, agent, tmp_path, **settings):
    async def run():
        async with agent(**settings) as (daemon, node):
            launcher = await with_run(daemon, node, tmp_path)
            async with aiohttp.ClientSession(daemon.launchers.address) as tcp:
                connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
                async with aiohttp.ClientSession("http://agent", connector=connector) as unix:
                    await scenario(daemon, node, launcher, tcp, unix)
            launcher.close()

    asyncio.run(run())
