"""How many series /metrics has on a node of 8 GPUs, 8 InfiniBand ports and 192 cores with a rank a
GPU, and on the same node with a GPU fewer: at most as many as docs/metrics.md states."""

from __future__ import annotations

import asyncio
import os

import aiohttp
import pytest
from fakes import FakeLauncher, rank_level, until

from bench import telemetry_node
from bench.common import Failed
from holdfast.agent.metrics.names import (
    SERIES_OF_CORE,
    SERIES_OF_GPU,
    SERIES_OF_NODE,
    SERIES_OF_RANK,
)

RANKS = 8
READ = {"nvidia", "network", "rdma", "host"}  # what has most of the series


def series(agent, folder, gpus, monkeypatch):
    """The page's series, as lines, once each collector was read."""
    try:
        node = telemetry_node.build(folder / f"{gpus}-gpus")
    except Failed as error:
        pytest.skip(str(error))
    node.state.write_text(node.state.read_text().replace("gpus 8", f"gpus {gpus}"))
    for name, value in node.environ().items():
        monkeypatch.setenv(name, value)
    settings = {key.replace(".", "__"): value for key, value in node.settings().items()}

    async def scenario():
        async with agent(agent__state_dir=str(node.home / "state"), **settings) as (daemon, core):
            await until(lambda: daemon.launchers.address)
            launcher = FakeLauncher(folder / "run/agent.sock", nproc=RANKS)
            launcher.hello()
            for rank in range(RANKS):
                launcher.page(rank, os.getpid())
            launcher.levels(generation=1, state="running", ranks=[
                rank_level(rank, os.getpid()) for rank in range(RANKS)])

            def complete():
                found = {one.name: one for one in daemon.state.runner.health()}
                runs = core.seen[-1].runs if core.seen else ()
                return (all(one.read_s for one in found.values()) and runs
                        and len(runs[0].ranks) == RANKS
                        and all(found[name].up for name in READ))

            await until(complete, 120)
            steps = daemon.state.steps
            daemon.wake("test")
            await until(lambda: daemon.state.steps > steps + 1)
            async with aiohttp.ClientSession(daemon.launchers.address) as client:
                async with client.get("/metrics") as answer:
                    text = await answer.text()
            launcher.close()
            return text

    return [line for line in asyncio.run(scenario()).splitlines() if not line.startswith("#")]


def test_a_node_of_eight_gpus_has_no_more_series_than_are_stated(agent, tmp_path, monkeypatch):
    eight, seven = (series(agent, tmp_path, gpus, monkeypatch) for gpus in (8, 7))
    of_gpus = [sum("holdfast_accelerator_" in line for line in lines) for lines in (eight, seven)]
    of_one = of_gpus[0] - of_gpus[1]
    assert 0 <= of_gpus[0] - 8 * of_one < 8, "a series of a GPU is one of each GPU"
    of_cores = sum("holdfast_host_cpu_seconds_total{" in line for line in eight)
    of_ranks = sum('rank="' in line for line in eight)
    of_node = len(eight) - 8 * of_one - of_cores - of_ranks
    print(f"{len(eight)} series: {of_one} a GPU, {of_cores} of cores, {of_ranks} of ranks, "
          f"{of_node} of the node")
    # All that there should be is there, or little would prove nothing.
    assert of_one > 100 and of_cores >= 192 and of_ranks >= RANKS and of_node > 500
    assert of_one <= SERIES_OF_GPU
    assert of_cores <= 192 * SERIES_OF_CORE
    assert of_ranks <= RANKS * SERIES_OF_RANK
    assert of_node <= SERIES_OF_NODE
