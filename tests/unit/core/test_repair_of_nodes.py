"""Rebooting one of many nodes: out of service first, by its own document, and without its runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Doc, NodeOrder, Request, Settings
from holdfast.agent.core.nodes.repair import DRAIN_S, SETTLE_S
from holdfast.agent.core.run.members import read_node

from .driver import Cluster, Lab
from .test_kernel import BOOKS

FAULT = "gpu_fell_off_bus"  # its runbook: excluded, then rebooted


def fleet(names: str = "abcd", nnodes: int = 2, grade: str = "trainer", **settings: object
          ) -> Cluster:
    given = {"allow": ("reboot_node",), "gather_s": 2.0, **settings}
    cluster = Cluster(names, nnodes, grade, settings=Settings(
        single_node=False, **given))  # type: ignore[arg-type]
    for lab in cluster.labs.values():
        lab.runbooks = BOOKS
        lab.restart_agent()
    cluster.run(8)
    return cluster


def orders(lab: Lab) -> list[str]:
    return [effect.body.verb for effect in lab.log if isinstance(effect.body, NodeOrder)]


def said(lab: Lab) -> str:
    (incident,) = [one for one in lab.decision.incidents
                   if one.fault == FAULT and one.subject.startswith("node/")]
    return incident.would_have


def leaves(cluster: Cluster, node: str) -> None:
    """Its launcher does what it was told."""
    lab = cluster.labs[node]
    if lab.finishes():
        lab.view = replace(lab.view, state="done")


def test_it_is_excluded_its_run_goes_on_elsewhere_its_launcher_leaves_and_then_it_reboots() -> None:
    cluster = fleet()
    lab = cluster.labs["b"]
    cluster.fatal["b"] = FAULT
    took_s = 0
    while not orders(lab) and took_s < 60:
        leaves(cluster, "b")
        cluster.step()
        took_s += 1
    assert orders(lab) == ["reboot"] and SETTLE_S <= took_s < SETTLE_S + 10
    doc = read_node(cluster.docs["node/b"])
    assert doc.excluded and doc.fault == FAULT and len(doc.strikes) == 1
    assert {node for _, node in cluster.plan().ranks} == {"a", "c"}
    assert lab.finishes() == [75] and cluster.plan().finished == -1
    cluster.run(200)
    assert orders(lab) == ["reboot"], "once"
    assert not any(orders(other) for name, other in cluster.labs.items() if name != "b")


def test_a_node_that_carries_no_run_takes_itself_out_of_service_first() -> None:
    """Nobody leads a run on it who would."""
    cluster = fleet()
    lab = cluster.labs["d"]
    lab.view = replace(lab.view, state="done")
    cluster.fatal["d"] = FAULT
    docs = []
    for _ in range(40):
        cluster.step()
        docs.append("node/d" in cluster.docs and read_node(cluster.docs["node/d"]).excluded)
        assert docs[-1] or not orders(lab)
    assert orders(lab) == ["reboot"]


def test_ranks_that_stay_are_waited_for() -> None:
    """Too few nodes are left: the run has no place to go, and it is not ended for a rung."""
    cluster = fleet("abc", 3, "script")
    lab = cluster.labs["b"]
    cluster.fatal["b"] = FAULT
    cluster.run(SETTLE_S + DRAIN_S + 60)
    assert read_node(cluster.docs["node/b"]).excluded
    assert not orders(lab)
    assert said(lab) == "reboot_node: allowed, waits until the ranks of r are elsewhere"


@pytest.mark.parametrize("held", ["breaker", "too many", "store", "paused", "few"])
def test_what_holds_it_back(held: str) -> None:
    cluster = fleet("abcdefgh" if held != "few" else "ab", 1 if held == "few" else 2,
                    exclude_fraction=0.0)
    lab = cluster.labs["b" if held == "few" else "h"]
    lab.view = replace(lab.view, state="done")
    others = "efg" if held == "breaker" else ""
    cluster.fatal |= dict.fromkeys((*others, lab.name), FAULT)
    if held == "too many":
        for name in "ef":
            cluster.docs[f"node/{name}"] = Doc(
                f"node/{name}", 1, b'{"excluded":true,"fault":"x","strikes":[%d]}' % 1e9)
    if held == "paused":
        lab.requests = (Request("q", "pause", "node/h", "being looked at"),)
    lab.store_up = held != "store"
    cluster.run(SETTLE_S + 25)
    assert not orders(lab)
    words = {"breaker": "breaker is open", "too many": "excluded for faults within",
             "store": "waits for the store",
             "paused": "being looked at", "few": "actions.alone"}[held]
    assert words in said(lab), said(lab)


def test_one_that_is_not_allowed_excludes_nobody() -> None:
    cluster = fleet(allow=())
    lab = cluster.labs["d"]
    lab.view = replace(lab.view, state="done")
    cluster.fatal["d"] = FAULT
    cluster.run(60)
    assert not orders(lab) and said(lab).startswith("reboot_node: not done, because actions.allow")
    assert "node/d" not in cluster.docs


def test_a_launcher_that_hangs_is_not_waited_for_without_end() -> None:
    cluster = fleet()
    lab = cluster.labs["d"]
    cluster.fatal["d"] = FAULT
    cluster.run(SETTLE_S + 30)
    assert not orders(lab) and "the launcher of r has left" in said(lab)
    cluster.run(DRAIN_S)
    assert orders(lab) == ["reboot"]


def test_a_run_of_another_agent_is_not_ended_for_it() -> None:
    cluster = fleet()
    lab = cluster.labs["d"]
    lab.view = replace(lab.view, state="done")
    real = lab.observed

    def observed():  # type: ignore[no-untyped-def]
        seen = real()
        return replace(seen, gate=replace(seen.gate, others=("/run/user/1/holdfast/agent.sock",)))

    lab.observed = observed  # type: ignore[method-assign]
    cluster.fatal["d"] = FAULT
    cluster.run(60)
    assert not orders(lab) and "this agent may not end it" in said(lab)
    assert "node/d" not in cluster.docs, "it is not taken out of service for that"
