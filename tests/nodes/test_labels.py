"""Labels of nodes, over real ones: ranks lie beside their neighbours, and models are not mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Nodes
from .worlds import World

LOOPING = str(Path(__file__).with_name("looping.py"))
STORE = 4


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(STORE + 1, weight=16) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def launch(world: World, name: str, numbers: range, *words: str) -> Path:
    """The same script on each of the nodes; where its ranks say what they are."""
    world.name = name
    folder = world.shared / name
    folder.mkdir()
    world.processes = {}
    for number in numbers:
        world.launch(number, "run", *words, "--preload", "none", LOOPING, str(folder))
    return folder


def slots(world: World, generation: int) -> list[int]:
    """The nodes of a generation in the order of their ranks."""
    return [number for _, number in sorted(world.places(generation).items())]


def end(world: World, folder: Path) -> None:
    (folder / "end").touch()
    for process in world.processes.values():
        assert process.wait(60) == 0, world.said()


def test_ranks_lie_beside_their_neighbours_and_a_unit_stays_in_its_rack(world: World) -> None:
    """Of four nodes the first and the third share a rack.  One of them is lost: its neighbour is
    of no use without it, and the other rack goes on."""
    world.labels = {number: {"rack": f"r{number % 2}"} for number in range(4)}
    folder = launch(world, "beside", range(4), "--nnodes", "2:4", "--unit", "2")
    world.wait(lambda: slots(world, 1) == [0, 2, 1, 3])
    world.wait(lambda: len(list(folder.glob("*.json"))) == 4)
    said = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert [said[rank]["GROUP_RANK"] for rank in sorted(said)] == ["0", "1", "2", "3"]
    assert said[0]["MASTER_ADDR"] == world.nodes[0].address

    world.power_off(2)
    del world.processes[2]
    world.wait(lambda: slots(world, 2) == [1, 3])
    assert not world.ranks(0)
    end(world, folder)


def test_a_world_of_two_models_is_refused_by_name_and_made_where_it_is_allowed(
    world: World
) -> None:
    world.labels = {0: {"model": "H100"}, 1: {"model": "H100"}, 2: {"model": "A100"}}
    folder = launch(world, "same", range(3), "--nnodes", "3", "--gang-limit", "15")
    wanted = ("waiting for nodes: 2 of 3 can take ranks; n2 has A100 where the others have H100, "
              "and a mixed world is not allowed (--allow-mixed)")
    world.wait(lambda: any(world.status(number).get("reason") == wanted for number in range(3)))
    assert {process.wait(60) for process in world.processes.values()} == {75}, world.said()
    assert not list(folder.iterdir())
    assert "n2 has A100 where the others have H100" in world.said()

    folder = launch(world, "mixed", range(3), "--nnodes", "3", "--allow-mixed")
    world.wait(lambda: slots(world, 1) == [0, 1, 2])
    end(world, folder)
