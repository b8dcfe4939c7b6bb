"""What reaches across nodes for a person: a suspect elsewhere, and what all nodes say from one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli.client import Agent

from .harness import Nodes
from .worlds import World, output

LOOPING = str(Path(__file__).with_name("looping.py"))


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(4) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def ask(world: World, number: int, route: str) -> Any:
    return Agent(world.nodes[number].home / "run" / world.name / "api.sock").get(route)


def word(world: World, number: int, what: str, of: int) -> dict[str, Any]:
    rows = ask(world, number, f"/api/v1/fleet/{what}")["nodes"]
    return dict(next(row for row in rows if row["node"] == world.nodes[of].name))


def test_a_suspect_elsewhere_is_looked_at_and_every_agent_tells_of_it(world: World) -> None:
    for number in range(3):
        world.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(world.shared))
    world.wait(lambda: len(list(world.shared.glob("*.json"))) == 2)
    places = world.all_places(1, 2)
    (spare,) = {0, 1, 2} - set(places.values())
    leader = world.led_by()
    rank, there = next((r, n) for r, n in sorted(places.items()) if n != leader)
    os.kill(world.ranks(there)[rank]["pid"], signal.SIGSTOP)

    # The leader sees it in beats, has that node's agent look at the rank, and tells of both.  Where
    # the rank was suspected before it was stopped, it stands where it was seen then.
    looked = ("kernel state", "where")

    def seen() -> dict[str, Any] | None:
        found = ask(world, leader, "/api/v1/incidents")
        return next((one for one in found if one["fault"] == "rank_stopped"
                     and any(what in looked for what, _ in one["evidence"])), None)

    incident = world.wait(seen, 60.0)
    assert world.nodes[there].name in incident["culprit"]
    world.wait(lambda: world.generation(there) == 2 or world.generation(spare) == 2)

    # A spare's agent gives the same incident, and every node's ledger.
    assert word(world, spare, "incidents", leader)["age_s"] == 0.0
    told = ask(world, spare, f"/api/v1/incidents/{incident['id']}")
    assert told["node"] == world.nodes[leader].name and told["id"] == incident["id"]
    assert set(word(world, spare, "ledger", there)["answer"]["categories"])
    said = world.nodes[spare].run(
        [sys.executable, "-P", "-m", "holdfast.agent.cli", "incidents"],
        {"HOLDFAST_RUNTIME_DIR": str(world.nodes[spare].home / "run"),
         "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert incident["id"] in said.stdout, said.stdout + said.stderr

    # An agent that is gone has its last word, and that is said to be old.
    world.power_off(leader)
    world.wait(lambda: word(world, spare, "incidents", leader)["problem"], 30.0)
    row = word(world, spare, "incidents", leader)
    assert row["age_s"] > 0.0 and incident["id"] in [one["id"] for one in row["answer"]]
    assert "lost" in row["problem"] or "answer" in row["problem"], row
    (world.shared / "end").write_text("")
    living = [number for number in range(3) if number != leader]
    assert [world.processes[number].wait(120) for number in living] == [0, 0], world.said()
    assert "Traceback" not in "".join(output(world.nodes[number]) for number in living)
