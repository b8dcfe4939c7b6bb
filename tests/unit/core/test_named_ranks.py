"""A rank that the kernel's lines name is looked at, and the answer joins the line's incident."""

from __future__ import annotations

import pytest

from holdfast.agent.catalog import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.actions import PAUSE, TAKE_EVIDENCE
from holdfast.agent.core.model import EffectOutcome, Incident, Request, TakeEvidence
from holdfast.agent.core.node import NOBODY_NAMED, Node
from holdfast.agent.core.parse.kernel_line import parse

from .driver import Lab

CATALOGUE = load.load(load.tables())
HUNG = "INFO: task python3:%d blocked for more than 120 seconds."
XID = "NVRM: Xid (PCI:0000:05:00): 13, pid=%d, name=python3, Graphics SM Warp Exception"
OOM = "Out of memory: Killed process %d (python3) total-vm:1kB, anon-rss:1kB"


def lab() -> Lab:
    made = Lab(nproc=8)
    made.runbooks = load_runbooks()
    made.node = Node("a", made.settings, made.runbooks)
    made.begin()
    made.train(5)
    return made


def say(made: Lab, *lines: str) -> list[TakeEvidence]:
    """Whom these lines have looked at; the answers are in with the next step."""
    for text in lines:
        cursor = len(made.events) + 1
        made.events = (*made.events, parse(CATALOGUE, text, cursor, made.boot_s))
    asked = [one for _ in range(3) for one in made.step(0.1)]
    return [one.body for one in asked if isinstance(one.body, TakeEvidence) and one.body.pid]


def only(made: Lab) -> Incident:
    (incident,) = [one for one in made.decision.incidents if not one.run]
    return incident


@pytest.mark.parametrize("line", [HUNG, XID, OOM])
def test_what_is_seen_of_a_named_rank_is_in_the_kernels_incident(line: str) -> None:
    made = lab()
    named = made.rank(1)
    (asked,) = say(made, line % named.pid)
    assert (asked.run, asked.rank, asked.pid) == ("r", 1, named.pid)
    incident = only(made)
    assert ("rank 1 where", "train.py:12 in step") in incident.evidence
    assert ("rank 1 kernel state", "S") in incident.evidence
    lines = [text for _, text in incident.timeline]
    assert f"{TAKE_EVIDENCE}: rank 1 of run r is looked at: the kernel names its process" in lines
    assert lines[-1] == "rank 1 of run r was looked at" and len(incident.actions) == 1
    # It moves: where a look found it says nothing of where a later suspicion would.
    assert not made.node.kept.runs["r"].suspects.where
    assert say(made, line % named.pid) == []  # once a process


def test_where_no_living_rank_of_ours_is_named_nobody_is_looked_at() -> None:
    made = lab()
    assert say(made, HUNG % 77777, "nfs: server filer not responding, still trying") == []
    assert not any(one.actions for one in made.decision.incidents)
    assert all(TAKE_EVIDENCE not in text for one in made.decision.incidents
               for _, text in one.timeline)


def test_no_more_ranks_of_one_incident_than_its_budget() -> None:
    made = lab()
    budget = made.runbooks["host_hung_task"].budget_count
    asked = say(made, *(HUNG % made.rank(number).pid for number in range(8)))
    assert [one.rank for one in asked] == list(range(budget)) and budget < 8


def test_a_look_that_fails_is_a_line() -> None:
    made = lab()
    made.hold = {"evidence"}
    made.events = (parse(CATALOGUE, HUNG % made.rank(0).pid, 1, made.boot_s),)
    (effect,) = [one for one in made.step(0.1) if one.kind == "evidence"]
    made.outcomes.append(EffectOutcome(effect.id, False, "no py-spy", ""))
    made.step(0.1)
    assert only(made).timeline[-1][1] == f"{TAKE_EVIDENCE} of rank 0 failed: no py-spy"


def test_explain_says_who_would_be_looked_at_and_no_end_that_never_comes() -> None:
    made = lab()
    said = {one.subject: one for one in made.node.outlook("host_hung_task")}
    assert {one.action for subject, one in said.items() if "rank" in subject} == {TAKE_EVIDENCE}
    assert said["node/a"].reason == NOBODY_NAMED and len(said) == 9
    assert all(one.code < 0 for one in said.values())
    # A condition of the node that no ladder answers ends no run either.
    assert [(one.subject, one.code) for one in made.node.outlook("host_memory_low")] == [
        ("node/a", -1)]


def test_a_paused_node_looks_at_nobody_and_explain_says_so() -> None:
    made = lab()
    made.requests = (Request("q1", PAUSE, "node/a", "looking", by="eva"),)
    made.step(0.1)
    assert say(made, HUNG % made.rank(0).pid) == []
    assert [one.action for one in made.node.outlook("host_hung_task")] == [""]
