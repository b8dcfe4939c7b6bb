"""Ranks that share one copy of the state over nodes, and what becomes of it when a node goes."""

from __future__ import annotations

import re

import pytest

from .harness import Nodes
from .test_runs import digest_of
from .worlds import CLI, ROOT, SMALL, World, output

NODES, STEPS = 5, 60  # of one rank each; one of them is a spare
MICS = ("strategy=mics", "mics.group=2", "micro_batches=4", "checkpoint.every=0",
        "snapshot.enabled=false")


def test_a_lost_node_of_a_partition_group_leaves_no_trace() -> None:
    """Its shard comes from the copy in the other group: there is no snapshot and no checkpoint."""
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(NODES + 1, weight=16) as nodes:
        world = World(nodes)
        world.start_store()
        for number in range(NODES):
            world.launch(number, "train", "--nnodes", "4", "--standby", "0",
                         f"work_dir={world.shared}/work", f"steps={STEPS}", *SMALL, *MICS)
        world.wait(lambda: max(map(world.step, range(NODES))) >= 5)
        places = world.places(1)
        (spare,) = set(range(NODES)) - set(places.values())
        lost = places[3]
        assert world.ranks(lost)[3]["place"] == "shard 2 of 2, partition group 2"
        world.power_off(lost)
        world.wait(lambda: 3 in world.ranks(spare))
        living = [number for number in range(NODES) if number != lost]

        def redone() -> list[str]:
            ends = [one["timeline"][-1][1] for number in living for one in world.incidents(number)
                    if one.get("state") == "closed"]
            return re.findall(r"(\d+) steps? redone", " ".join(ends))

        assert world.wait(redone) == ["0"], world.said()
        assert [world.processes[number].wait(200) for number in living] == [0] * 4, world.said()
        told = "".join(output(world.nodes[number]) for number in living)
        assert "planned generation 2 from the survivors' memory" in told, world.said()
        # The launchers of a strategy's groups say by how many nodes they live and move.
        assert told.count("2 nodes live and move together: mics.group = 2, 1 rank(s) a node") == 4
        clean = world.nodes[spare].run(
            [*CLI, "train", "--run", "clean", "--nproc-per-node", "4", "--standby", "0",
             f"work_dir={world.shared}/work", f"steps={STEPS}", *SMALL, *MICS],
            {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=240.0)
        assert clean.returncode == 0, clean.stderr
        assert digest_of(told) == digest_of(clean.stdout + clean.stderr)
