"""A link that becomes slow while a run trains over it, as the ranks' own collectives show it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .harness import Nodes
from .worlds import World

STEPS = 10_000  # more than the hurts take
SLOW_MBIT = {"ddp": 100.0, "fsdp": 300.0}  # of the first it moves three times as much
FAULT = "collectives_slow"


def tickets(world: World) -> list[dict[str, Any]]:
    """Those of who leads: the others say nothing."""
    return [one for number in world.processes for one in world.incidents(number)
            if one["fault"] == FAULT]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])  # as DDP times it, and as the tap does
def test_a_link_that_becomes_slow_is_a_ticket_until_it_is_mended(strategy: str) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(3, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        world.train(range(2), 2, STEPS, "checkpoint.every=100000", "snapshot.enabled=false",
                    f"strategy={strategy}")
        world.wait(lambda: all("first_wait_s" in world.status(number).get("collectives", ())
                               for number in range(2)))
        assert not tickets(world)
        nodes.link_rate(0, 1, SLOW_MBIT[strategy])
        (ticket,) = world.wait(lambda: tickets(world), 180.0)
        found = re.search(r"take ([0-9.]+) times as long as in its first \d+ steps since \d\d:\d\d",
                          ticket["reason"])
        assert found and float(found[1]) > 1.5, ticket
        assert world.wait(lambda: world.generation(0)) == 1  # and nothing is done about it
        nodes.heal()
        world.wait(lambda: {one["state"] for one in tickets(world)} == {"closed"}, 60.0)
