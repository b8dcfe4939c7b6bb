"""Ranks that share one copy of the state over nodes, and what becomes of it when a node goes."""

from __future__ import annotations

import os
import re
import signal
from typing import NamedTuple

import pytest

from .harness import Nodes
from .test_runs import digest_of
from .worlds import CLI, ROOT, SMALL, World, output

NODES = 5  # of one rank each; one of them is a spare
STEPS = 150  # three times what the hurts take: an agent tells nothing once its run is over
MEMORY_ALONE = ("micro_batches=4", "checkpoint.every=0", "snapshot.enabled=false")


class Case(NamedTuple):
    """A strategy in which two nodes hold one copy of the state, and four hold two."""

    words: tuple[str, ...]
    steps: int
    places: tuple[str, str]  # of ranks 1 and 3
    together: str  # why two nodes live and move together
    alike: tuple[str, ...] = ()  # settings for the same groups where no agent tells labels


# The agents' labels put ranks 0 and 2 into one rack, 1 and 3 into the other.
CASES = {
    "mics": Case(("strategy=mics", "mics.group=2"), STEPS,
                 ("shard 1 of 2, partition group 2", "shard 2 of 2, partition group 2"),
                 "mics.group = 2", tuple(f"topology.{rank}=r{rank % 2}" for rank in range(4))),
    "pipeline": Case(("strategy=pipeline", "pipeline.stages=2"), STEPS,
                     ("stage 2 of 2, pipeline 1", "stage 2 of 2, pipeline 2"),
                     "pipeline.stages = 2"),
}


def redone(world: World, living: list[int]) -> list[str]:
    """Steps done twice, by incident that is over."""
    ends = [one["timeline"][-1][1] for number in living for one in world.incidents(number)
            if one.get("state") == "closed"]
    return re.findall(r"(\d+) steps? redone", " ".join(ends))


@pytest.mark.parametrize("strategy", CASES)
def test_a_lost_rank_and_a_lost_node_leave_no_trace(strategy: str) -> None:
    """What they held comes from its copy on another node: there is no snapshot and no checkpoint.

    First a rank is killed, then a node loses power and the spare, which has no labels, takes its
    place."""
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    case = CASES[strategy]
    words = (f"steps={case.steps}", *SMALL, *MEMORY_ALONE, *case.words)
    with Nodes(NODES + 1, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        world.labels = {number: {"rack": f"r{number % 2}"} for number in range(4)}
        flags = ("train", "--nnodes", "4", "--standby", "0")
        words = (f"work_dir={world.shared}/work", *words)
        for number in range(4):
            world.launch(number, *flags, "--node-rank", str(number), *words)
            if not number:  # and leads: the incidents are the leader's; other tests lose it
                assert world.led_by() == 0
        spare = 4
        world.wait(lambda: all(map(world.status, range(4))))  # these are there first
        world.launch(spare, *flags, *words)
        world.wait(lambda: max(map(world.step, range(4))) >= 5)
        places = world.all_places(1, 4)
        assert places == {rank: rank for rank in range(4)}
        assert (world.all_ranks(1)[1]["place"], world.all_ranks(3)[3]["place"]) == case.places
        living = [number for number in range(NODES) if number != places[3]]
        os.kill(world.all_ranks(places[0])[0]["pid"], signal.SIGKILL)
        assert world.wait(lambda: redone(world, living)) == ["0"], world.said()
        assert world.all_ranks(places[3])[3]["place"] == case.places[1]
        world.power_off(places[3])
        world.wait(lambda: 3 in world.ranks(spare))
        assert world.wait(lambda: len(found := redone(world, living)) > 1 and found) == ["0", "0"]
        assert [world.processes[number].wait(200) for number in living] == [0] * 4, world.said()
        told = "".join(output(world.nodes[number]) for number in living)
        for generation in (2, 3):
            assert f"planned generation {generation} from the survivors' memory" in told, told
        assert "a step; labels of the nodes' agents (rack)" in told
        assert f"(rack), none for node {world.nodes[spare].name} (rank 3): near no other" in told
        # The launchers of a strategy's groups say by how many nodes they live and move.
        assert told.count(f"2 nodes live and move together: {case.together}, 1 rank(s) a node") == 4
        clean = world.nodes[spare].run(
            [*CLI, "train", "--run", "clean", "--nproc-per-node", "4", "--standby", "0",
             *words, *case.alike],
            {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=240.0)
        assert clean.returncode == 0, clean.stderr
        assert digest_of(told) == digest_of(clean.stdout + clean.stderr)
