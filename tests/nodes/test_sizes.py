"""A run of 3 to 4 nodes: it shrinks, grows, is drained, and outlives a leader with its etcd."""

from __future__ import annotations

import re
import signal
import time

import pytest

from holdfast.trainer.checkpoint import format as files

from .harness import Nodes
from .worlds import ANSWER_S, World, output

STEPS = 100_000  # more than the story takes: nobody waits for its end


def pids(world: World) -> dict[int, int]:
    """Node -> pid of its rank."""
    return {number: rank["pid"] for number in world.processes
            for rank in world.ranks(number).values()}


def moves(world: World, nodes: int, generation: int, behind: int = 0) -> bool:
    """Whether ranks of so many nodes are in this generation, and all beyond a step."""
    for process in world.processes.values():
        assert process.poll() is None, world.said()
    ranks = [rank for number in world.processes for rank in world.ranks(number).values()]
    return (len(ranks) == nodes and {rank["generation"] for rank in ranks} == {generation}
            and min(rank["step"] for rank in ranks) > behind)


def test_a_run_shrinks_grows_is_drained_and_loses_leader_and_etcd_at_once() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4) as nodes:
        world = World(nodes, members=(0, 1, 2))
        world.start_store()
        story(world)


def story(world: World) -> None:
    sizes = ("3:4", STEPS, "micro_batches=12", "batch=1")
    world.train(range(4), *sizes)
    world.wait(lambda: moves(world, 4, 1))
    first = {number: pid for number in range(4) for pid in [
        rank["pid"] for rank in world.all_ranks(number).values()]}

    # One goes: the other three go on without it, in their processes and from their memory.
    world.power_off(3)
    del world.processes[3]
    world.wait(lambda: moves(world, 3, 2))
    # An agent may be too busy for one question.
    world.wait(lambda: pids(world) == {number: first[number] for number in (0, 1, 2)}, ANSWER_S)

    # It is back: behind a step of all, the world is whole again, and nobody's process was ended.
    world.nodes.blackhole(3, on=False)
    world.train([3], *sizes)
    world.wait(lambda: moves(world, 4, 3))
    world.wait(lambda: {n: pid for n, pid in pids(world).items() if n < 3} == {
        n: first[n] for n in (0, 1, 2)}, ANSWER_S)

    # A drain: a proven checkpoint of the step behind which they part, and nothing is left there.
    drained = world.ask(0, "drain", "n2", "--reason", "its fan")
    assert drained.returncode == 0, drained.stdout + drained.stderr + world.said()
    assert not world.ranks(2)
    world.wait(lambda: moves(world, 3, 4))
    world.wait(lambda: {n: pid for n, pid in pids(world).items() if n < 2}
               == {n: first[n] for n in (0, 1)}, ANSWER_S)
    planned = re.search(r"generation 4 from the survivors' memory at step (\d+)", everything(world))
    assert planned, world.said()
    kept = world.shared / "job" / files.directory_name(int(planned[1]), 3)
    assert (kept / files.COMMIT).exists() and files.verify(kept) == [], world.said()
    said = world.ask(1, "release", "n2", "--reason", "mended")
    assert said.returncode == 0, said.stdout + said.stderr
    world.wait(lambda: moves(world, 4, 5))

    # Whoever leads loses power, and a member of the store with it.
    leader = world.led_by()
    assert leader in world.members
    begun_s = time.monotonic()
    world.power_off(leader)
    del world.processes[leader]
    world.wait(lambda: moves(world, 3, 6))
    print(f"three went on {time.monotonic() - begun_s:.2f} s after the leader and its etcd went")

    # The launcher of whoever leads is asked to end, as when its pod is evicted: the others go on.
    world.nodes.blackhole(leader, on=False)
    world.start_member(leader)
    world.train([leader], *sizes)
    world.wait(lambda: moves(world, 4, 7))
    evicted = world.processes.pop(world.led_by())
    evicted.send_signal(signal.SIGTERM)
    assert evicted.wait(ANSWER_S) == 75, world.said()
    world.wait(lambda: moves(world, 3, 8))
    assert set(re.findall(r"(\d+) steps? lost", everything(world))) == {"0"}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_schedulers_signal_to_all_nodes_leaves_one_whole_checkpoint(at_once: bool) -> None:
    """As a scheduler does: each launcher hears it by itself, and not in the same moment."""
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4) as nodes:
        world = World(nodes)
        world.start_store()
        world.train(range(3), 3, 100_000, "checkpoint.every=90000")
        world.wait(lambda: moves(world, 3, 1, behind=20))
        for launcher in world.processes.values():
            launcher.send_signal(signal.SIGTERM)
            if not at_once:
                world.wait(lambda: world.processes[0].poll() is not None)
        assert [one.wait(60) for one in world.processes.values()] == [75, 75, 75], world.said()
        (kept,) = (world.shared / "job").glob("step-*")
        assert (kept / files.COMMIT).exists() and files.verify(kept) == [], world.said()
        step = int(re.findall(r"step-0*(\d+)", kept.name)[0])
        for node in list(nodes)[:3 if at_once else 1]:
            assert f"at step {step}; the same command goes on from " in output(node), world.said()


def everything(world: World) -> str:
    return "".join(output(node) for node in world.nodes if (node.home / "job.out").exists())
