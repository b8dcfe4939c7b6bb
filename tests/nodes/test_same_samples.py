"""A world of 4 nodes becomes 3 and 4 again: it trains as one that never changed, to a tolerance."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.agent.cli import main

from .harness import Nodes
from .worlds import ROOT, World

STEPS, BATCH, MICRO_BATCHES = 60, 2, 10  # in unlike parts: 3, 3, 2 and 2, or 4, 3 and 3
# A tenth of what docs/train.md promises of the mean loss of any step and of any weight, since this
# model is small and its steps are few.
LOSS_RELATIVE, WEIGHT_ABSOLUTE = 1e-5, 1e-4
SAMPLES = STEPS * BATCH * MICRO_BATCHES  # one epoch
WORDS = (f"steps={STEPS}", f"batch={BATCH}", f"micro_batches={MICRO_BATCHES}",
         "model=recording:Model", "data=recording:Data", f"data_options.samples={SAMPLES}")
MODULES = (ROOT / ".types", ROOT / "tests/unit/trainer", Path(__file__).parent)


class Step(NamedTuple):
    """One that counts: of the newest generation that has finished it."""

    generation: int
    ranks: int
    samples: list[list[int]]  # of each micro-batch, in their order
    losses: list[float]


def steps_of(folder: Path) -> list[Step]:
    """What the ranks have written down, in the order of the steps."""
    finished: dict[int, int] = {}
    parts: dict[tuple[int, int], dict[int, tuple[int, list[int], float]]] = defaultdict(dict)
    for file in folder.glob("*.steps"):
        for line in file.read_text().splitlines():
            generation, rank, step, *micro_batch = json.loads(line)
            if micro_batch:
                number, samples, loss = micro_batch
                assert number not in parts[step, generation], f"step {step}: {number} twice"
                parts[step, generation][number] = rank, samples, loss
            else:
                finished[step] = max(generation, finished.get(step, 0))
    found = []
    for step, generation in sorted(finished.items()):
        of = [part for _, part in sorted(parts[step, generation].items())]
        found.append(Step(generation, len({rank for rank, *_ in of}),
                          [samples for _, samples, _ in of], [loss for *_, loss in of]))
    return found


def begin(world: World, *numbers: int) -> Path:
    """The run on these nodes; where its ranks write down what they compute."""
    folder = world.shared / f"{world.name}-steps"
    folder.mkdir(exist_ok=True)
    world.environment |= {"RECORDED": str(folder), "PYTHONPATH": ":".join(map(str, MODULES))}
    for number in numbers:
        world.launch(number, "train", "--nnodes", "3:4", "--standby", "0",
                     f"work_dir={world.shared}/work", f"checkpoint.dir={world.shared}/{world.name}",
                     *WORDS)
    return folder


def steps_by(folder: Path, ranks: int) -> int:
    """How many steps so many ranks have finished together, in the newest generation."""
    found = steps_of(folder)
    return sum(one.generation == found[-1].generation and one.ranks == ranks for one in found)


def weights(world: World):  # type: ignore[no-untyped-def]
    import torch
    newest, file = max((world.shared / world.name).glob("step-*")), world.shared / "weights.pt"
    assert main(["checkpoint", "export", str(newest), str(file)]) == 0
    return torch.load(file)


def test_a_world_that_shrinks_and_grows_trains_on_the_same_samples_to_the_same_weights() -> None:
    torch = pytest.importorskip("torch", reason="the trainer's extra is not installed")
    with Nodes(4, weight=16) as nodes:
        world, clean = World(nodes, members=(0, 1, 2)), World(nodes, "clean", members=(0, 1, 2))
        world.start_store()
        clean.etcd = world.etcd
        world.environment = {"PACED": ""}
        folder = begin(world, 0, 1, 2, 3)
        world.wait(lambda: steps_by(folder, 4) >= 5)
        world.power_off(3)
        world.wait(lambda: steps_by(folder, 3) >= 1)
        nodes.blackhole(3, on=False)
        begin(world, 3)
        assert [world.processes[number].wait(200) for number in range(4)] == [0] * 4, world.said()

        never = begin(clean, 0, 1, 2, 3)
        assert [clean.processes[number].wait(200) for number in range(4)] == [0] * 4, clean.said()
        compare(torch, steps_of(folder), steps_of(never), weights(world), weights(clean))


def compare(torch, hurt, never, weights, clean):  # type: ignore[no-untyped-def]
    worlds = {one.generation: one.ranks for one in hurt}
    assert worlds == {1: 4, 2: 3, 3: 4} and {one.ranks for one in never} == {4}
    assert len(hurt) == len(never) == STEPS
    for step, (one, other) in enumerate(zip(hurt, never)):
        assert len(one.samples) == MICRO_BATCHES, f"step {step} lacks some"
        assert one.samples == other.samples, f"step {step}"
    seen = [sample for one in hurt for part in one.samples for sample in part]
    assert sorted(seen) == list(range(SAMPLES))

    # To the last bit until the world is another one.
    for one, other in zip(hurt, never):
        if one.generation == 1:
            assert one.losses == other.losses
    means = [(sum(one.losses) / MICRO_BATCHES, sum(other.losses) / MICRO_BATCHES)
             for one, other in zip(hurt, never)]
    apart = max(abs(a - b) / abs(b) for a, b in means)
    furthest = max(float((weights[name] - clean[name]).abs().max()) for name in clean)
    print(f"losses at most {apart:.1e} of a step's apart, weights {furthest:.1e}")
    assert apart < LOSS_RELATIVE and furthest < WEIGHT_ABSOLUTE
