"""A pipeline over nodes that loses one for good: fewer stages, and all of them when one is back."""

from __future__ import annotations

import re

import pytest

from .harness import Nodes
from .test_strategies import MEMORY_ALONE, redone
from .worlds import SMALL, World, output

LOST = 3  # a node; the store is on the one behind it
# Nothing but the ranks' memory holds the state: two pipelines of two stages, each stage's copy on
# another node.  Three ranks are divided by no two stages.
WORDS = (*SMALL, *MEMORY_ALONE, "strategy=pipeline", "pipeline.stages=2", "pipeline.fewest=1")
STEPS = 4000  # more than the test takes
LIMIT_S = 60.0


def steps(world: World, generation: int, count: int, behind: int) -> bool:
    """Whether so many ranks are in this generation, and all beyond a step."""
    found = [rank for number in world.processes for rank in world.ranks(number).values()]
    return (len(found) == count and {rank["generation"] for rank in found} == {generation}
            and min(rank["step"] for rank in found) > behind)


def places(world: World) -> set[str]:
    return {rank["place"] for number in world.processes
            for rank in world.all_ranks(number).values()}


def test_a_pipeline_is_shorter_while_a_node_is_gone_and_no_step_is_done_twice() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(LOST + 2, weight=16) as nodes:
        world = World(nodes)
        world.start_store()

        def launch(number: int) -> None:
            world.launch(number, "train", "--nnodes", "3:4", "--standby", "0",
                         f"work_dir={world.shared}/work", f"steps={STEPS}", *WORDS)

        for number in range(LOST + 1):
            launch(number)
        world.wait(lambda: steps(world, 1, 4, 5))
        assert places(world) == {f"stage {stage} of 2, pipeline {one}"
                                 for stage in (1, 2) for one in (1, 2)}
        pids = {number: [rank["pid"] for rank in world.all_ranks(number).values()]
                for number in range(LOST)}

        world.power_off(LOST)
        del world.processes[LOST]
        shorter = world.step(0)
        world.wait(lambda: steps(world, 2, 3, shorter), LIMIT_S)
        assert places(world) == {""}  # a rank that is the whole pipeline
        assert world.wait(lambda: redone(world, list(range(LOST)))) == ["0"], world.said()

        nodes.blackhole(LOST, on=False)
        launch(LOST)
        longer = world.step(0)
        world.wait(lambda: steps(world, 3, 4, longer))
        assert places(world) == {f"stage {stage} of 2, pipeline {one}"
                                 for stage in (1, 2) for one in (1, 2)}
        # All of it from memory, by the processes that were there from the beginning.
        assert pids == {number: [rank["pid"] for rank in world.all_ranks(number).values()]
                        for number in range(LOST)}
        told = "".join(output(nodes[number]) for number in range(LOST + 1))
        for generation in (2, 3):
            assert f"planned generation {generation} from the survivors' memory" in told, told
        assert "pipeline.stages = 2 does not divide 3 ranks" in told
        assert set(re.findall(r"(\d+) steps? lost", told)) == {"0"}, told
