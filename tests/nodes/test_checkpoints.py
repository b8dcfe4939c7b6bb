"""Checkpoints of a run over nodes: those beyond keep-N go, whoever leads, and the newest is found
again when the node of rank 0 is gone, whose launcher alone heard of it."""

from __future__ import annotations

import re

import pytest

from .harness import Nodes
from .worlds import World, output

KEEP, EVERY, STEPS = 2, 5, 400
# Both nodes hold one copy of the state together, and nothing in memory outlives either.
WORDS = ("strategy=mics", "mics.group=2", "snapshot.enabled=false", "micro_batches=4",
         f"checkpoint.every={EVERY}", f"checkpoint.keep={KEEP}")


def test_the_folder_is_tidied_and_outlives_the_node_of_rank_0() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        folder = world.shared / world.name

        def committed() -> list[int]:
            return sorted(int(one.parent.name[5:14]) for one in folder.glob("step-*/COMMIT"))

        flags = ("train", "--nnodes", "2", "--standby", "0")
        words = (f"work_dir={world.shared}/work", f"checkpoint.dir={folder}", f"steps={STEPS}",
                 "batch=2", "model_options.width=32", "model_options.layers=1",
                 "model_options.heads=2", "data_options.vocabulary=512", *WORDS)
        world.launch(1, *flags, "--node-rank", "1", *words)
        assert world.led_by() == 1  # which hears of no commit but by rank 0's node
        world.launch(0, *flags, "--node-rank", "0", *words)
        world.wait(lambda: all(map(world.status, (0, 1))))
        world.wait(lambda: (world.status(1)["checkpoint"] or {}).get("step", 0) >= 7 * EVERY)
        world.launch(2, *flags, *words)
        world.wait(lambda: world.step(1) >= 8 * EVERY)
        assert world.all_places(1, 2) == {0: 0, 1: 1}
        world.wait(lambda: len(committed()) <= KEEP + 1)
        assert committed()[-1] >= 7 * EVERY
        world.wait(lambda: world.status(2))  # the spare is there
        newest = committed()[-1]
        world.power_off(0)  # perhaps before it was told of that one, and of no older one
        assert [world.processes[number].wait(200) for number in (1, 2)] == [0, 0], world.said()
        told = "".join(output(world.nodes[number]) for number in (1, 2))
        found = re.search(r"planned generation 2 from the checkpoint of step (\d+)", told)
        assert found and int(found[1]) >= newest - 2 * EVERY > 0, told
        left = committed()
        # The run may be over before who leads has heard that its last ones were read back: how many
        # those are is a matter of the machine's speed.  Of the first generation's nothing is left.
        assert left[-1] == STEPS and left[0] > newest, (newest, left)
