"""A node is drained for a spare: a proven checkpoint, the spare in its place, bounded and told."""

from __future__ import annotations

import re
import time

import pytest

from holdfast.trainer.checkpoint import format as files

from .harness import Nodes
from .worlds import World, output

DRAIN_S = 30.0  # a checkpoint of a small model, a spare that is warm; two processors carry it all


def moves(world: World, numbers: set[int], generation: int, behind: int = 0) -> bool:
    """Whether this generation's ranks are on these nodes alone, and all beyond a step."""
    for process in world.processes.values():
        assert process.poll() is None, world.said()
    ranks = {number: list(world.ranks(number).values()) for number in world.processes}
    mine = [rank for number in numbers for rank in ranks[number]]
    return (len(mine) == len(numbers) == sum(map(len, ranks.values()))
            and all(rank["generation"] == generation and rank["step"] > behind for rank in mine))


def test_a_drained_nodes_ranks_go_to_the_spare_behind_a_proven_checkpoint() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4) as nodes:
        world = World(nodes)
        world.start_store()
        world.train(range(3), 2, 100_000, "checkpoint.every=90000")
        places = world.all_places(1, 2)
        world.wait(lambda: moves(world, set(places.values()), 1, 3))
        (spare,) = {0, 1, 2} - set(places.values())
        leader = world.led_by()
        gone = leader if leader in places.values() else places[1]
        (stays,) = set(places.values()) - {gone}
        (pid,) = (rank["pid"] for rank in world.all_ranks(stays).values())

        # Whoever leads is drained as well as any other; the spare's agent is asked.
        begun_s = time.monotonic()
        done = world.ask(spare, "drain", f"n{gone}", "--reason", "its fan")
        took_s = time.monotonic() - begun_s
        assert done.returncode == 0, done.stdout + done.stderr + world.said()
        assert took_s < DRAIN_S and not world.ranks(gone)
        world.wait(lambda: moves(world, {stays, spare}, 2))
        assert [rank["pid"] for rank in world.all_ranks(stays).values()] == [pid]

        # They parted behind one step: nothing is lost, and a whole checkpoint of it is there.
        text = "".join(output(nodes[number]) for number in range(3))
        planned = re.search(r"generation 2 from the survivors' memory at step (\d+)", text)
        assert planned and set(re.findall(r"(\d+) steps? lost", text)) <= {"0"}, world.said()
        step = int(planned[1])
        kept = world.shared / "job" / files.directory_name(step, 1)
        assert (kept / files.COMMIT).exists() and files.verify(kept) == [], world.said()

        # It is told on any node, holds while it lasts, and ends with the release.
        why = world.ask(stays, "why", f"n{gone}")
        assert "its fan" in why.stdout, why.stdout + why.stderr
        world.wait(lambda: moves(world, {stays, spare}, 2, step + 5))
        assert gone not in world.spares(stays)
        said = world.ask(spare, "release", f"n{gone}", "--reason", "mended")
        assert said.returncode == 0, said.stdout + said.stderr
        world.wait(lambda: gone in world.spares(stays))
        print(f"drained after {took_s:.2f} s")
