"""Slurm's side of a check, over a scontrol that keeps one node in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from holdfast.agent.actions.schedulers import slurm
from holdfast.agent.actions.schedulers.slurm import Slurm
from holdfast.agent.core.checks.verdict import CRITICAL, OK, WARNING, CheckVerdict
from holdfast.agent.core.model import Settings

PROGRAM = """#!{python} -S
import json, pathlib, sys
file = pathlib.Path({file!r})
node = json.loads(file.read_text())
node["calls"] += 1
if sys.argv[1] == "update":
    for word in sys.argv[3:]:
        name, _, value = word.partition("=")
        node[name] = value
    if node["state"] == "resume":
        node.update(state="idle", reason="")
else:
    print(f"NodeName=n0 State={{node['state'].upper()}} ThreadsPerCore=1 Partitions=all  "
          f"BootTime=None"
          + (f" Reason={{node['reason']}} [root@2026-11-22T21:42:08]" if node["reason"] else "")
          + (f" Comment={{node['comment']}}" if node["comment"] else ""))
    print(*node.get("others", ()), sep="\\n")
file.write_text(json.dumps(node))
"""
SICK = CheckVerdict("devices", CRITICAL, "7 nvidia devices, and p4d has 8", confirmed=True)
WELL = CheckVerdict("devices", OK, "8 devices")


class Node:
    """One node whose Slurm is a file."""

    def __init__(self, folder: Path, **changed: object) -> None:
        self._file = folder / "node.json"
        self._folder = folder
        self._file.write_text(json.dumps(
            {"state": "idle", "reason": "", "comment": "", "calls": 0, **changed}))
        program = folder / "scontrol"
        program.write_text(PROGRAM.format(python=sys.executable, file=str(self._file)))
        program.chmod(0o755)

    def now(self) -> dict[str, object]:
        return dict(json.loads(self._file.read_text()))

    def settle(self, verdict: CheckVerdict, wait_s: float = 0.0,
               prolog: bool = False) -> tuple[bool, str]:
        """A program of its own each time, as slurmd starts them."""
        environ = {"SLURMD_NODENAME": "n0", "PATH": f"{self._folder}:/usr/bin:/bin"}
        return Slurm(self._folder / "state", wait_s, 0.1, Settings(), environ).settle(
            [verdict], prolog)


def test_a_node_that_is_well_asks_slurm_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.settle(WELL) == (False, "")
    unsure = CheckVerdict("devices", CRITICAL, "7 of 8")  # once is no proof
    assert node.settle(unsure) == (False, "") and node.now()["calls"] == 0


def test_it_announces_drains_and_is_given_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.settle(SICK) == (False, "devices is critical")
    assert str(node.now()["comment"]).startswith("holdfast: devices critical @")
    refused, said = node.settle(SICK)
    assert refused and node.now()["state"] == "drain"
    assert said == node.now()["reason"] == (
        "holdfast: devices critical: 7 nvidia devices, and p4d has 8")
    for prolog in (False, True):  # a job that got the node before it was drained
        refused, said = node.settle(SICK, prolog=prolog)
        assert refused and "drained already" in said
    assert node.settle(CheckVerdict("clock", OK, "kept")) == (False, "")  # another check
    assert node.settle(WELL) == (False, "devices passes again: given back")
    assert node.now()["state"] == "idle" and not node.now()["comment"]
    calls = node.now()["calls"]
    assert node.settle(WELL) == (False, "") and node.now()["calls"] == calls


def test_a_warning_gives_back_and_a_node_that_comes_and_goes_stays(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(slurm.RETURNS_MAX):
        node.settle(SICK)
        assert node.settle(SICK)[0]
        said = node.settle(CheckVerdict("devices", WARNING, "late"))[1]
        assert said == "devices passes again: given back"
    node.settle(SICK)
    assert node.settle(SICK)[0]
    assert "3 times in a day: look at it" in node.settle(WELL)[1]
    assert node.now()["state"] == "drain"


@pytest.mark.parametrize("state", [{"comment": "rack 7, ask Ann"}, {"state": "drain",
                                                                   "reason": "disk swap"}])
def test_what_is_somebody_elses_stands(tmp_path: Path, state: dict[str, str]) -> None:
    node = Node(tmp_path, **state)
    for verdict in (SICK, SICK, WELL):
        refused, said = node.settle(verdict)
        assert refused == (verdict is SICK and "state" in state)
        assert verdict is WELL or next(reversed(state.values())) in said
    assert {name: node.now()[name] for name in state} == state


def test_a_prolog_waits_for_the_others_and_then_refuses(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.settle(SICK, prolog=True)[0]
    assert node.now()["state"] == "drain"


def test_a_prolog_refuses_beyond_the_share_that_may_be_drained(tmp_path: Path) -> None:
    """The job would begin on a sick node, and Slurm drains one whose Prolog fails anyway: with our
    reason it is given back."""
    node = Node(tmp_path, others=["NodeName=n1 State=IDLE+DRAIN Partitions=all "
                                  "Reason=holdfast: clock critical: late [root@2026-11-22T21:42]"])
    assert [node.settle(SICK)[0] for _ in range(2)] == [False, False]
    assert "checks.drain_share" in node.settle(SICK)[1] and node.now()["state"] == "idle"
    assert node.settle(SICK, prolog=True)[0]
    assert node.now()["state"] == "drain" and "devices critical" in str(node.now()["reason"])
    assert node.settle(WELL) == (False, "devices passes again: given back")


def test_a_slurm_that_does_not_answer_drains_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'slurmctld is not here' >&2\nexit 1\n")
    assert node.settle(SICK, prolog=True) == (
        False, "nothing is drained: Slurm does not answer: slurmctld is not here")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    slurm_call_s, slurm.CALL_S = slurm.CALL_S, 0.2
    try:
        assert "timed out" in node.settle(SICK)[1]
    finally:
        slurm.CALL_S = slurm_call_s
