"""The ledgers of two nodes: each sums to the test's clock while a rank and a link are lost."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import ledgers
import pytest

from .harness import Nodes
from .worlds import World

NODES = (0, 1)
SPAN_S = 20.0
AWAY_S = 8.0  # longer than its lease


def test_no_second_of_two_nodes_is_lost_or_there_twice() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(3, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        world.train(NODES, 2, 100_000)
        world.wait(lambda: min(map(world.step, NODES)) >= 3)
        asks = [partial(world.get, number, "/api/v1/ledger") for number in NODES]
        begin = [ledgers.read(ask, world.name) for ask in asks]

        (rank,) = world.all_ranks(1).values()
        os.kill(rank["pid"], signal.SIGKILL)
        world.wait(lambda: all(world.generation(number) >= 2 for number in NODES))
        step = world.step(0)
        world.wait(lambda: min(map(world.step, NODES)) > step + 2)

        # The network parts them: neither may train alone, and neither stops counting.
        away_s = time.monotonic()
        nodes.blackhole(1)
        world.wait(lambda: time.monotonic() - away_s > AWAY_S)
        nodes.heal()
        world.wait(lambda: world.generation(0) == world.generation(1) > 2)
        step = max(map(world.step, NODES))
        world.wait(lambda: min(map(world.step, NODES)) > step + 2)
        world.wait(lambda: time.monotonic() - begin[0].at_s > SPAN_S)
        end = [ledgers.read(ask, world.name) for ask in asks]

        spent = [ledgers.between(*pair) for pair in zip(begin, end, strict=True)]
        print(spent)
        for one in spent:
            assert one.node_s == pytest.approx(one.clock_s, rel=ledgers.SHARE), spent
            assert one.run_s == pytest.approx(one.clock_s, rel=ledgers.SHARE), spent
            assert one.node["training"] > 1.0, spent
            lost = sum(one.node[name] for name in ("detection", "recovery", "idle_no_spare"))
            assert lost > 1.0, spent
        # Of the fleet: node-seconds.
        assert sum(one.node_s for one in spent) == pytest.approx(
            sum(one.clock_s for one in spent), rel=ledgers.SHARE)
