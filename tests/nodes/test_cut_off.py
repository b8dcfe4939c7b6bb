"""Four nodes whose peers are cut 2|2 while a store beside them is in everybody's reach."""

from __future__ import annotations

import itertools
import time

import pytest

from .harness import Nodes
from .worlds import ANSWER_S, World

STORE = 4  # the node that carries the store, and no rank
GOES_ON_S = 60.0  # on two processors that a dozen processes share; alone it takes about two
BACK_S = 120.0
QUIET_S = 15.0  # five leases: nobody takes the run meanwhile


def moves(world: World, numbers: set[int], generation: int, behind: int = 0, most: int = 0) -> bool:
    """Whether ranks on these nodes alone are in this generation, or in a later one up to `most`,
    and all beyond a step."""
    for process in world.processes.values():
        assert process.poll() is None, world.said()
    ranks = {number: tuple(world.ranks(number).values()) for number in world.processes}
    mine = [rank for number in numbers for rank in ranks[number]]
    shown = {rank["generation"] for rank in mine}
    return (len(mine) == len(numbers) and len(shown) == 1
            and generation <= shown.pop() <= max(generation, most)
            and min(rank["step"] for rank in mine) > behind
            and not any(ranks[number] for number in set(ranks) - numbers))


def test_one_half_trains_on_the_other_waits_and_comes_back() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(5) as nodes:
        world = World(nodes, members=(STORE,))
        world.start_store()
        world.train(range(4), "2:4", 4000, "micro_batches=12", "batch=1")
        world.wait(lambda: moves(world, {0, 1, 2, 3}, 1, 5))
        leader = world.led_by()
        mine = {leader, (leader + 1) % 4}
        theirs = {0, 1, 2, 3} - mine

        for a, b in itertools.product(mine, theirs):
            nodes.partition(a, b)
        begun_s = time.monotonic()
        # The two may be known to be lost one after the other: then the run shrinks twice.
        world.wait(lambda: moves(world, mine, 2, most=3), GOES_ON_S)
        print(f"half of the nodes trained {time.monotonic() - begun_s:.2f} s after the cut")
        step = world.step(leader)
        quiet_s = time.monotonic() + QUIET_S
        while time.monotonic() < quiet_s:
            # A renewal may be late on a busy machine: then it is nobody's for a moment.
            assert world.leader() in (leader, -1), world.said()
            time.sleep(0.2)
        world.wait(lambda: moves(world, mine, 2, step, most=3))
        generation = world.generation(leader)
        for number in theirs:
            world.wait(lambda number=number: str(world.status(number).get("reason")).startswith(
                f"n{leader} leads the run, as the store shows"), ANSWER_S)

        for a, b in itertools.product(mine, theirs):
            nodes.partition(a, b, on=False)
        # The two may be heard again one after the other: then the run grows twice.
        world.wait(lambda: moves(
            world, {0, 1, 2, 3}, generation + 1, step, most=generation + 2), BACK_S)
        assert world.led_by() == leader
        for one in world.own_incidents(leader):
            if one["fault"] == "collectives_slow":
                continue  # a ticket: these ranks share two processors with whatever else runs
            assert one["fault"] in ("node_lost", "world_grows") and not one["lost_steps"], one
        assert all(process.poll() is None for process in world.processes.values())
