"""Network cards through the runner: in the agent's thread and in a child, which may hang."""

from __future__ import annotations

import asyncio
import os
import signal

from detectors import judged
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.core.detect.network.network import NetworkMemory, Networks
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors import ALL

from .tree import ib_node, plain_node

OTHERS = tuple(one.name for one in ALL if one.name not in ("network", "rdma"))


def start(tree, troubles):
    config = load(None, {
        "collectors.sys": (str(tree.sys), "t"), "collectors.proc": (str(tree.proc), "t"),
        "collectors.disable": (OTHERS, "t"), "collectors.deadline_s": (3.0, "t"),
        "agent.slow_s": (3.0, "t"), "agent.tick_s": (0.05, "t"), "agent.fast_s": (0.1, "t"),
    }).config
    runner = Runner(config, lambda part, error: troubles.append(part))
    return runner, asyncio.create_task(runner.run())


async def stop(runner, task) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=30.0)
    runner.close()


def test_a_child_that_hangs_costs_the_ports_alone_and_what_was_known_stays(tmp_path):
    tree, troubles = ib_node(tmp_path, ports=2), []

    async def scenario():
        runner, task = start(tree, troubles)
        networks, memory = Networks("n"), NetworkMemory()

        def health(name):
            return next(one for one in runner.health() if one.name == name)

        def subjects():
            return [one.subject for one in judged(networks, runner.samples(), memory)]

        await until(lambda: health("rdma").up and health("network").up)
        assert subjects() == []
        tree.put("class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
        await until(lambda: subjects() == ["node/n/nic/mlx5_1"])
        pid = runner.children()["rdma"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: "no answer" in health("rdma").error)
        names = {one.name for one in runner.samples()}
        assert "network_info" in names and "network_port_state" not in names
        assert health("network").up and subjects() == ["node/n/nic/mlx5_1"]
        tree.put("class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE")
        await until(lambda: subjects() == [])
        assert runner.children()["rdma"] != pid
        await stop(runner, task)

    asyncio.run(scenario())
    assert set(troubles) == {"collector rdma"}


def test_a_node_without_such_cards_starts_no_child(tmp_path):
    async def scenario():
        runner, task = start(plain_node(tmp_path), [])
        await until(lambda: all(one.read_s for one in runner.health()))
        network, rdma = runner.health()
        assert network.up and rdma.absent and not runner.children()
        await stop(runner, task)

    asyncio.run(scenario())
