"""The gate and the baseline of a fleet, over real nodes: what the others have and measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli.client import Agent

from .harness import Nodes
from .worlds import World, output

LOOPING = str(Path(__file__).with_name("looping.py"))
LIBRARIES = "usr/lib/x86_64-linux-gnu"
USUAL, OTHER = "2.27.5", "2.21.1"
MEASURE = "memory_bandwidth"
PASSES = 5  # what a node tells others begins there
STORE = 4
GATHER_S = 20.0  # all three are there by then, and two begin without the third


class Fleet(World):
    """Each of four nodes has an agent of its own, and libraries of its own."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes, lease_s=10.0)
        self.gate = '["drift"]'
        self.settings = f'gather_s = {GATHER_S}\n[collectors]\nroot = "{{home}}/root"\n'

    def furnish(self, number: int, nccl: str) -> None:
        folder = self.nodes[number].home / "root" / LIBRARIES
        folder.mkdir(parents=True)
        (folder / f"libnccl.so.{nccl}").touch()

    def begin(self, number: int) -> None:
        node = self.nodes[number]
        self.environ(number)
        node.agent("--config", str(node.home / "agent.toml"))

    def api(self, number: int, route: str) -> Any:
        return Agent(self.nodes[number].home / "run/api.sock").get(route)

    def measured(self, number: int) -> dict[str, Any]:
        """What the check finds there."""
        said = self.ask(number, "check", MEASURE, "--json").stdout
        (found,) = [one for one in json.loads(said)["checks"] if one["check"] == MEASURE]
        return dict(found)


@pytest.fixture()
def fleet() -> Iterator[Fleet]:
    with Nodes(STORE + 1, weight=16) as nodes:
        made = Fleet(nodes)
        made.start_store()
        yield made


def test_a_node_with_another_version_is_named_by_the_others_and_gets_no_ranks(
    fleet: Fleet,
) -> None:
    def launch(number: int) -> None:
        fleet.launch(number, "run", "--nnodes", "2:3", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(fleet.shared))

    for number, version in enumerate((USUAL, USUAL, OTHER)):
        fleet.furnish(number, version)
        launch(number)  # whoever of them leads first
    assert fleet.processes[2].wait(60) == 75, fleet.said()
    why = f"check drift: nccl is {OTHER}, and 2 of 3 nodes have {USUAL}"
    assert f"n2 starts no run: {why}" in output(fleet.nodes[2])
    fleet.wait(lambda: len(list(fleet.shared.glob("*.json"))) == 2)
    named = fleet.wait(lambda: [
        one["reason"] for number in range(2) for one in fleet.incidents(number)
        if one["fault"] == "check_failed"], 30.0)
    assert named == [f"n2 takes no ranks of it: {why}"]
    launch(2)  # unmended, to a run that goes on
    assert fleet.processes[2].wait(60) == 75, fleet.said()
    assert f"n2 starts no run: {why}" in output(fleet.nodes[2])
    (fleet.shared / "end").write_text("")
    assert [fleet.processes[number].wait(60) for number in range(2)] == [0, 0], fleet.said()


def test_a_check_that_fails_on_every_node_refuses_none_and_one_message_says_so(
    fleet: Fleet,
) -> None:
    """As after a profile with a mistake was rolled out."""
    # Who knows of its own failure first waits for what the others say.
    fleet.gate = '["devices"]\nprofile = "hgx-h100"\nwait_s = 120'
    for number in range(3):
        fleet.launch(number, "run", "--nnodes", "3", "--nproc-per-node", "1", "--preload", "none",
                     LOOPING, str(fleet.shared))
    fleet.wait(lambda: len(list(fleet.shared.glob("*.json"))) == 3)
    said = fleet.wait(lambda: [
        one for number in range(3) for one in fleet.incidents(number)
        if "the breaker is open" in one["reason"]], 30.0)
    (told,) = said
    assert told["fault"] == "check_failed" and told["run"] == "job", told
    assert "no node is refused: devices on 3 of 3 nodes (n0, n1, n2)" in told["reason"]
    for number in range(3):  # each of them did fail
        failed = {one["check"]: one for one in fleet.answer(number, "/api/v1/checks")["checks"]}
        assert failed["devices"]["status"] == "critical" and failed["devices"]["confirmed"]
    (fleet.shared / "end").write_text("")
    assert [fleet.processes[number].wait(60) for number in range(3)] == [0, 0, 0], fleet.said()


def test_a_node_that_never_measured_anything_is_held_against_what_others_told_the_store(
    fleet: Fleet,
) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    alone = fleet.measured(0)
    assert alone["limit_from"] != "fleet", alone
    for _ in range(PASSES - 1):
        fleet.measured(0)
    kept = fleet.nodes[0].home / "state/checks"
    for number in (1, 2):  # of the same machine: their own measurements would be no others
        shutil.copytree(kept, fleet.nodes[number].home / "state/checks")
    for number in range(4):
        fleet.begin(number)
    known = fleet.nodes[3].home / "state/checks/fleet.json"
    fleet.wait(lambda: known.exists() and all(
        len(rows) == 3 for rows in json.loads(known.read_text()).values()), 60.0)
    found = fleet.measured(3)
    assert found["limit_from"] == "fleet" and "of 3 other nodes" in found["limit_source"], found
