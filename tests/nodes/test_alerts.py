"""Alerts over nodes: whoever receives one, what it asks for is done once, by whom it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli.client import Agent
from holdfast.agent.cli.text import Failure

from .harness import Nodes
from .worlds import ANSWER_S, World

LOOPING = str(Path(__file__).with_name("looping.py"))
ACTING = '''act = ["ended", "hang", "kernel", "alerts"]
[runbooks]
directory = "{home}/books"
'''
BOOK = '''+++
severity = "degraded"
scope = "%s"
ladder = [%s]
budget = { count = 2, window_h = 24 }
clears = "operator"
+++
## Meaning
A rule over several nodes says so.
'''


class Alerted(World):
    """Its agents act on alerts, by three runbooks of an operator's."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes)
        self.settings = ACTING
        for node in nodes:
            books = node.home / "books"
            books.mkdir()
            for name, scope, rung in (("fabric_storm", "run", "restart_ranks"),
                                      ("hot_rack", "node", "exclude_node"),
                                      ("old_firmware", "node", "drain_node")):
                (books / f"{name}.md").write_text(BOOK % (scope, f'"{rung}"'))

    def send(self, number: int, *fingerprints: str, status: str = "firing",
             **labels: str) -> dict[str, int]:
        """To one node's agent, as Alertmanager does."""
        alerts = [{"status": status, "labels": {"alertname": "Rule", **labels},
                   "annotations": {"summary": "seen by no node"}, "fingerprint": one,
                   "startsAt": "2026-11-22T10:00:00Z"} for one in fingerprints]
        socket = self.nodes[number].home / "run" / self.name / "api.sock"

        def sent() -> Any:
            try:
                return Agent(socket).post("/api/v1/alerts", {"alerts": alerts})
            except (OSError, Failure):
                return None  # Alertmanager tries again as well

        answer: dict[str, int] = self.wait(sent, ANSWER_S)
        return answer

    def outcomes(self, number: int) -> dict[str, str]:
        """Fingerprint -> what became of the alert, as one node's agent shows it."""
        return {one["id"].partition("/")[0]: one["outcome"]
                for one in self.get(number, "/api/v1/alerts") or ()}

    def outcome(self, number: int, fingerprint: str) -> str:
        """The same of one alert, once it is told there."""
        return str(self.wait(lambda: self.outcomes(number).get(fingerprint), ANSWER_S))

    def asked(self, number: int) -> list[tuple[str, str, str]]:
        return [(one["action"], one["subject"], one["state"])
                for one in self.get(number, "/api/v1/requests") or ()]


@pytest.fixture()
def world(request: pytest.FixtureRequest) -> Iterator[Alerted]:
    """So many nodes as the test asks for, and one for the store."""
    with Nodes(request.param + 1, weight=16) as nodes:
        made = Alerted(nodes)
        made.start_store()
        yield made


def run(world: Alerted, count: int, nnodes: str) -> None:
    for number in range(count):
        world.launch(number, "run", "--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts",
                     "5", "--preload", "none", LOOPING, str(world.shared))


@pytest.mark.parametrize("world", [2], indirect=True)
def test_an_alert_is_one_restart_whoever_of_two_nodes_receives_it(world: Alerted) -> None:
    run(world, 2, "2")
    world.all_places(1, 2)
    leader = world.led_by()
    other = 1 - leader
    labels = {"run": world.name, "holdfast_runbook": "fabric_storm"}

    assert world.send(other, "f1", **labels)["new"] == 1
    world.wait(lambda: len(world.places(2)) == 2)
    for number in (other, leader):
        assert world.outcome(number, "f1") == "generation 2 was started for it", world.said()

    # The same one from a second Alertmanager, to both, and another of the same storm.
    for number in (leader, other):
        assert world.send(number, "f1", **labels)["new"] == 0
    counts = [world.send(number, "f2", **labels)["new"] for number in (leader, other)]
    assert sum(counts) >= 1  # the later may have seen the earlier one's, or not yet
    assert world.outcome(leader, "f2"), world.said()
    assert "one restart answers a storm" in world.outcome(other, "f2"), world.said()
    opened = [one for number in (0, 1) for one in world.answer(number, "/api/v1/incidents")
              if one["fault"] == "fabric_storm"]
    assert len(opened) == 1, opened
    world.wait(lambda: [world.generation(number) for number in (0, 1)] == [2, 2], ANSWER_S)
    (world.shared / "end").write_text("")
    assert [world.processes[number].wait(60) for number in (0, 1)] == [0, 0], world.said()


@pytest.mark.parametrize("world", [3], indirect=True)
def test_an_alert_about_a_node_is_acted_on_once_by_that_node(world: Alerted) -> None:
    """A storm of it, to two other nodes at once; then a drain without leave."""
    run(world, 3, "2")
    there = set(world.all_places(1, 2).values())
    sick = min(there - {world.led_by()})
    others = [number for number in range(3) if number != sick]
    name = world.nodes[sick].name
    labels = {"node": name, "instance": f"{world.nodes[others[0]].name}:9855",
              "holdfast_runbook": "hot_rack"}
    storm = [f"f{number}" for number in range(50)]
    for number in others:
        world.send(number, *storm, **labels)

    world.wait(lambda: all(set(world.outcomes(number)) == set(storm)
                           and all(world.outcomes(number).values()) for number in range(3)), 60.0)
    said = [world.outcome(others[0], one) for one in storm]
    assert said.count(f"{name} is excluded from runs") == 1, said
    assert sum("one action answers a storm" in one for one in said) == 49, said
    world.wait(lambda: set(world.places(2).values()) == set(others))
    world.wait(lambda: world.asked(sick) == [("exclude_node", f"node/{name}", "done")], ANSWER_S)
    assert [world.asked(number) for number in others] == [[], []]
    assert '"fault":"hot_rack"' in world.documents()[f"/holdfast/main/node/{name}"]

    # Its end undoes nothing, and a drain needs leave.
    world.send(others[1], *storm, status="resolved", **labels)
    world.send(others[0], "g1", **(labels | {"holdfast_runbook": "old_firmware"}))
    assert world.outcome(others[1], "g1") == (
        "nothing is done: drain_node: not done, because actions.allow does not name it")
    world.wait(lambda: any("resolved; it is open until" in one["would_have"]
                           for one in world.incidents(sick)), 60.0)
    assert '"excluded":true' in world.documents()[f"/holdfast/main/node/{name}"]
    (world.shared / "end").write_text("")
    assert [world.processes[number].wait(60) for number in others] == [0, 0], world.said()
