"""A trainer on two of three nodes, hurt in four ways one after the other: no step is done twice."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from .harness import Nodes
from .test_drain import moves
from .test_runs import alive, stand_for
from .worlds import ANSWER_S, LEASE_S, World

OFF_S = 3600.0
SIZES = (2, 100_000, "checkpoint.every=90000")
FATAL = "3,9,1,-;pcieport 0000:03:04.0: AER: device recovery failed\n"


def goes_on(world: World, members: set[int], generation: int) -> None:
    """Some steps more, in this generation and on these nodes."""
    world.wait(lambda: moves(world, members, generation))
    step = min(map(world.step, members))
    world.wait(lambda: moves(world, members, generation, step + 2))
    said = world.said()
    assert " is lost" not in said and set(re.findall(r"(\d+) steps? lost", said)) <= {"0"}, said


def pid_on(world: World, number: int) -> int:
    (rank,) = world.all_ranks(number).values()
    return int(rank["pid"])


def test_a_clock_a_link_one_way_a_launcher_and_a_node_with_a_fault() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4, weight=16) as nodes:
        world = World(nodes)
        world.ahead_s = {1: OFF_S}
        world.settings = '[collectors]\nkmsg = "{home}/kmsg"\n'  # a file is read once
        for node in nodes:
            (node.home / "kmsg").touch()
        world.start_store()
        world.train((0, 1), *SIZES)
        world.wait(lambda: moves(world, {0, 1}, 1))
        world.train((2,), *SIZES)
        world.wait(lambda: 2 in world.spares(0))
        clock = world.answer(1, "/api/v1/status")["now_wall_s"]
        assert clock - time.time() > OFF_S / 2, "its clock is not off"
        story(world)
        for number in world.processes:  # nobody shows a time that is an hour long
            for one in world.own_incidents(number):
                assert one["closed_wall_s"] - one["opened_wall_s"] < OFF_S / 2, one
                assert one["lost_s"] < OFF_S / 2, one


def story(world: World) -> None:
    nodes, leader = world.nodes, world.led_by()
    other = 1 - leader

    # Between a spare and a rank's node packets arrive one way only: nothing changes.
    nodes.partition(2, leader, one_way=True)
    goes_on(world, {0, 1}, 1)
    stand_for(world, LEASE_S + 2.0, lambda: " is lost" not in world.said())
    goes_on(world, {0, 1}, 1)
    nodes.heal()

    # Between two ranks: as others hear both, neither is lost, and whoever leads takes the spare.
    pid = pid_on(world, leader)
    nodes.partition(other, leader, one_way=True)
    goes_on(world, {leader, 2}, 2)
    assert pid_on(world, leader) == pid
    nodes.heal()
    world.wait(lambda: world.spares(leader) == {other} and not world.ranks(other))

    # The leader's launcher is killed: its ranks end with it, and soon its agent.
    stays = pid_on(world, 2)
    launcher = world.processes.pop(leader)
    launcher.kill()
    launcher.wait()
    world.wait(lambda: not alive(pid), ANSWER_S)
    goes_on(world, {other, 2}, 3)
    assert pid_on(world, 2) == stays
    world.wait(lambda: not nodes[leader].pids(), ANSWER_S)
    world.train((leader,), *SIZES)
    world.wait(lambda: leader in world.spares(2))

    # A node's kernel says what is fatal: it is excluded, and stays so when it is started again.
    leads = world.led_by()
    sick = next(number for number in (other, 2) if number != leads)
    well = {other, 2, leader} - {sick}
    (nodes[sick].home / "kmsg").write_text(FATAL)
    os.kill(world.agent_pid(sick), signal.SIGKILL)  # the next one reads the line
    goes_on(world, well, 4)
    document = json.loads(world.documents()[f"/holdfast/main/node/n{sick}"])
    assert document["excluded"] and document["fault"] == "pcie_error", document
    (nodes[sick].home / "kmsg").write_text("")
    nodes[sick].kill()  # it starts anew, and its kernel has nothing to say
    world.train((sick,), *SIZES)
    world.wait(lambda: world.status(sick).get("state") == "idle")
    stand_for(world, LEASE_S, lambda: sick not in world.spares(leads) and not world.ranks(sick))
    goes_on(world, well, 4)
    why = world.ask(leads, "why", f"n{sick}").stdout
    assert "excluded for pcie_error, gets no ranks" in why, why
