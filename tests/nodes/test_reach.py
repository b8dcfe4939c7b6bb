"""What reaches across nodes for a person: a suspect elsewhere, and what all nodes say from one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Nodes
from .worlds import ANSWER_S, World, output

LOOPING = str(Path(__file__).with_name("looping.py"))


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(4) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def word(world: World, number: int, what: str, of: int) -> dict[str, Any]:
    """What one node's agent has of another's; {} where it has nothing, or does not answer."""
    rows = (world.get(number, f"/api/v1/fleet/{what}") or {}).get("nodes", ())
    return next((dict(row) for row in rows if row["node"] == world.nodes[of].name), {})


def test_a_suspect_elsewhere_is_looked_at_and_every_agent_tells_of_it(world: World) -> None:
    for number in range(3):
        world.launch(number, "run", "--nnodes", "2", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(world.shared))
    world.wait(lambda: len(list(world.shared.glob("*.json"))) == 2)
    places = world.all_places(1, 2)
    leader = world.led_by()  # one of the two or the spare, as it came
    rank, there = next((r, n) for r, n in sorted(places.items()) if n != leader)
    (third,) = {0, 1, 2} - {leader, there}
    os.kill(world.all_ranks(there)[rank]["pid"], signal.SIGSTOP)

    # The leader sees it in beats, has that node's agent look at the rank, and tells of both.  Where
    # the rank was suspected before it was stopped, it stands where it was seen then.
    looked = ("kernel state", "where")

    def seen() -> dict[str, Any] | None:
        return next((one for one in world.incidents(leader) if one["fault"] == "rank_stopped"
                     and any(what in looked for what, _ in one["evidence"])), None)

    incident = world.wait(seen, 60.0)
    assert world.nodes[there].name in incident["culprit"]
    world.wait(lambda: any(world.generation(number) == 2 for number in range(3)))

    # A third node's agent gives the same incident, and every node's ledger.
    world.wait(lambda: word(world, third, "incidents", leader).get("age_s") == 0.0, ANSWER_S)
    told = world.wait(lambda: world.get(third, f"/api/v1/incidents/{incident['id']}"), ANSWER_S)
    assert told["node"] == world.nodes[leader].name and told["id"] == incident["id"]
    ledger = world.wait(lambda: word(world, third, "ledger", there).get("answer"), ANSWER_S)
    assert set(ledger["categories"])
    world.wait(lambda: incident["id"] in world.nodes[third].run(
        [sys.executable, "-P", "-m", "holdfast.agent.cli", "incidents"],
        {"HOLDFAST_RUNTIME_DIR": str(world.nodes[third].home / "run"),
         "PYTHONPATH": os.environ.get("PYTHONPATH", "")}).stdout, ANSWER_S)

    # An agent that is gone has its last word, and that is said to be old.
    world.power_off(leader)
    row = world.wait(lambda: (one := word(world, third, "incidents", leader))
                     and one["problem"] and one, 60.0)
    assert row["age_s"] > 0.0 and incident["id"] in [one["id"] for one in row["answer"]]
    assert "lost" in row["problem"] or "answer" in row["problem"], row
    (world.shared / "end").write_text("")
    living = [number for number in range(3) if number != leader]
    assert [world.processes[number].wait(120) for number in living] == [0, 0], world.said()
    assert "Traceback" not in "".join(output(world.nodes[number]) for number in living)
