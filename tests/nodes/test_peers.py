"""`holdfast check --peers` over real links: what is hurt is named, and nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import wait_for

from .harness import Nodes

TOKEN = {"HOLDFAST_CHECK_TOKEN": "a token of these tests"}
COMMAND = [sys.executable, "-P", "-m", "holdfast.agent.cli", "check", "--python", sys.executable]
CABLE_MBIT = 400  # so that the cables decide over rates, not the processors that nodes share
LIMIT_S = 120.0
Started = list["subprocess.Popen[bytes]"]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(4, cable_mbit=CABLE_MBIT, weight=8) as made:
        yield made


def started(nodes: Nodes, *more: str, tokens: dict[int, str] | None = None) -> Started:
    words = [*COMMAND, "--peers", nodes.peers, "--deadline", "4", *more]
    return [node.start(words, {**TOKEN, **({"HOLDFAST_CHECK_TOKEN": tokens[node.number]}
                                           if tokens and node.number in tokens else {})},
                       output="check.out") for node in nodes]


def ended(nodes: Nodes, processes: Started) -> list[int]:
    try:
        return [process.wait(LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(node.said("check.out") for node in nodes)) from None


def report(nodes: Nodes, node: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(nodes[node].said("check.out"))
    return found


def states(found: dict[str, Any]) -> dict[str, str]:
    return {row["node"]: row["state"] for row in found["rows"]}


def test_nodes_that_are_well_pass_by_themselves_in_groups_and_together(nodes: Nodes) -> None:
    codes = ended(nodes, started(nodes, "--group-size", "2", "--ranks", "2", "--rail"))
    text = nodes[0].said("check.out")
    assert codes == [0, 0, 0, 0], text
    for label in ("group 0: 2 nodes", "across 1: 2 nodes", "whole: 4 nodes",
                  "rail 1: 4 nodes"):
        assert label in text
    assert "4 good; " in text and max(map(len, text.splitlines())) <= 80
    assert nodes[2].said("check.out").startswith("ok       n2: passed with 3 of 3 nodes")
    assert all(not node.pids() for node in nodes)
    kept = json.loads((nodes[2].home / "state/checks/results.json").read_text())
    scopes = {one["subject"].partition(", ")[2] for one in kept["verdicts"]["peers"]["measures"]}
    assert scopes == {"pair", "group 1", "across 0", "whole", "rail 0", "rail 1"}
    assert kept["baseline"]


def test_a_link_30_percent_slower_and_half_a_processor_are_told_as_slow(nodes: Nodes) -> None:
    nodes.link_rate(0, 1, 0.7 * CABLE_MBIT)
    nodes.cpu(3, 0.5)
    codes = ended(nodes, started(nodes, "--json"))
    found = report(nodes)
    assert states(found) == {"n0": "good", "n1": "good", "n2": "good", "n3": "slow"}, found
    assert [(link["nodes"], link["state"]) for link in found["links"]] == [(["n0", "n1"], "slow")]
    assert "at the same moment" in found["rows"][3]["reason"] and found["rounds"] == 2
    assert codes == [1, 1, 0, 1] and "gemm" in found["rows"][3]["todo"]


def test_a_dark_node_is_broken_and_one_with_another_token_is_named(nodes: Nodes) -> None:
    nodes.blackhole(2)
    codes = ended(nodes, started(nodes, "--json", "--join-wait", "4",
                                 tokens={3: "another token than theirs"}))
    found = report(nodes)
    assert states(found) == {"n0": "good", "n1": "good", "n2": "broken", "n3": "unknown"}
    rows = {row["node"]: row for row in found["rows"]}
    assert "nothing answers n0 or n1" in rows["n2"]["reason"]
    assert "another token" in rows["n3"]["reason"] and "machine answers" in rows["n3"]["reason"]
    assert codes == [0, 0, 3, 3]
    assert "n0 refuses this node: it holds another token" in nodes[3].said("check.out")
    assert "was not reached within 4 s" in nodes[2].said("check.out")


def test_a_way_that_is_cut_in_one_direction_and_a_peer_that_dies_are_named(nodes: Nodes) -> None:
    nodes.partition(1, 2, one_way=True)
    processes = started(nodes, "--json")
    # The command, what stands beside torch, and a test's child.
    wait_for(lambda: len(nodes[3].pids()) > 2 or processes[3].poll() is not None)
    nodes[3].kill()
    nodes.blackhole(3)
    codes = ended(nodes, processes)
    found = report(nodes)
    assert states(found)["n3"] == "broken" and codes[:3] == [0, 1, 1], found
    assert [(link["nodes"], link["state"]) for link in found["links"]] == [(["n1", "n2"], "broken")]
    assert {states(found)[one] for one in ("n0", "n1", "n2")} == {"good"}


def test_a_node_that_stands_still_in_the_middle_is_named_within_seconds(nodes: Nodes) -> None:
    processes = started(nodes, "--json")
    wait_for(lambda: len(nodes[3].pids()) > 2 or processes[3].poll() is not None)
    nodes.freeze(3)
    codes = [process.wait(LIMIT_S) for process in processes[:3]]
    found = report(nodes)
    assert states(found) == {"n0": "good", "n1": "good", "n2": "good", "n3": "broken"}, found
    assert "stands still" in found["rows"][3]["reason"] and not found["links"]
    assert codes == [0, 0, 0] and found["took_s"] < 70.0  # which a single wait for it would last
    nodes.freeze(3, False)
    assert processes[3].wait(LIMIT_S) == 3


def test_when_the_first_node_is_dark_the_second_coordinates(nodes: Nodes) -> None:
    nodes.blackhole(0)
    codes = ended(nodes, started(nodes, "--json", "--join-wait", "3"))
    found = report(nodes, 1)
    assert states(found) == {"n0": "broken", "n1": "good", "n2": "good", "n3": "good"}, found
    assert codes == [3, 0, 0, 0] and found["coordinator"] == "n1"
