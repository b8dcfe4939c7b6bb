"""Rebooting one of many nodes: out of service first, by its own document, and without its runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.model import Doc, Effect, NodeOrder, Now, Request, Settings
from holdfast.agent.core.nodes import repair
from holdfast.agent.core.nodes.repair import DRAIN_S, RAN, SEEN_S, SETTLE_S, Reset
from holdfast.agent.core.run.members import NodeDoc, read_node

from .driver import Cluster, Lab
from .test_kernel import BOOKS

FAULT = "gpu_fell_off_bus"  # its runbook: its ranks begin anew, then it is rebooted
WAITS = "reboot_node: allowed, waits while r goes on: nothing but the runbook asks for it"


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
    assert orders(lab) == ["reboot"] and SETTLE_S <= took_s < SETTLE_S + SEEN_S + 10
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
    assert not orders(lab)
    assert said(lab) == WAITS


def of_another_gpu(names: str, wants: str, **settings: object) -> Cluster:
    """A run uses GPU 0 of each node alone, and GPU 1 of b fails."""
    cluster = fleet(names, alone=len(names) == 2, **settings)
    for lab in cluster.labs.values():
        lab.view = replace(lab.view, visible=(("nvidia", "0"),))
        lab.samples = tuple(
            ("accelerator_info", f"vendor=nvidia,device={n},pci=00000000:{n}E:00.0,uuid=GPU-{n}",
             1.0, 0.0) for n in range(2))
    cluster.part["b"], cluster.wants["b"] = "gpu/0000:1e:00", wants
    cluster.fatal["b"] = FAULT
    return cluster


@pytest.mark.parametrize("names", ["abc", "ab"])
def test_a_run_that_the_fault_does_not_touch_is_neither_moved_nor_ended_for_a_rung(
    names: str
) -> None:
    cluster = of_another_gpu(names, "")
    lab, before = cluster.labs["b"], cluster.plan()
    cluster.run(SETTLE_S + DRAIN_S + 30)
    assert said(lab) == WAITS
    assert "node/b" not in cluster.docs and cluster.plan() == before
    assert not any(one.finishes() for one in cluster.labs.values())
    for one in cluster.labs.values():
        one.view = replace(one.view, state="done", ranks=())
    del cluster.docs["run/r"]
    cluster.run(SETTLE_S)
    assert orders(lab) == ["reboot"], "once the run is over"


def test_on_the_drivers_instruction_such_a_run_goes_elsewhere() -> None:
    cluster = of_another_gpu("abc", "reboot_node")
    lab = cluster.labs["b"]
    for _ in range(60):
        leaves(cluster, "b")
        cluster.step()
    assert {node for _, node in cluster.plan().ranks} == {"a", "c"}
    assert orders(lab) == ["reboot"]


def test_a_drain_and_reset_waits_for_ranks_without_limit_on_a_node_that_is_out_already() -> None:
    """Somebody had excluded it, and its run has no other place to go."""
    cluster = of_another_gpu("ab", "reboot_node")
    lab = cluster.labs["b"]
    cluster.step()
    (item,) = lab.node.kernel.book.open.values()
    item.patient = True
    cluster.docs["node/b"] = Doc("node/b", 1, b'{"excluded":true}')
    lab._stop = lambda _: None  # type: ignore[method-assign]
    cluster.run(SETTLE_S + 3 * DRAIN_S)
    assert not orders(lab) and "elsewhere" in said(lab)


def test_a_reset_of_before_ends_no_run_for_what_the_runbook_alone_asks_for() -> None:
    """Nobody but the driver's instruction ends ranks that go on, whatever came before it."""
    cluster = of_another_gpu("ab", "")
    lab = cluster.labs["b"]
    cluster.step()
    (item,) = lab.node.kernel.book.open.values()
    lab.node.repairs.memory.resets[item.incident.subject] = Reset(lab.boot_id, 1e9)
    cluster.docs["node/b"] = Doc("node/b", 1, b'{"excluded":true}')
    lab._stop = lambda _: None  # type: ignore[method-assign]
    cluster.run(SETTLE_S + 3 * DRAIN_S)
    assert not orders(lab) and "until the ranks of r are elsewhere" in said(lab)


@pytest.mark.parametrize("action", ["drain_node", "reboot_node", "reset_gpu"])
def test_for_a_run_over_many_nodes_no_ladder_reaches_for_a_node(action: str) -> None:
    """Who leads may be another: the node itself orders it, for a fault of its own that it saw."""
    allow = ("drain_node", "reboot_node", "reset_gpu")
    for alone in (False, True):
        lab = Lab(settings=Settings(single_node=alone, allow=allow, alone=True))
        now = Now(100.0, 1e9, "b")
        ctx = lab.node._context(now, lab.observed(), lab.view, [], [], [], {})
        _, leave = lab.node.repairs.rung(ctx, Cause("rank_hung", 1, "x", rank=0), action)
        assert (leave.reason == f"{action}: for faults that the node itself sees") is not alone
        assert not leave.may or alone


@pytest.mark.parametrize(("age_s", "stands"), [(2.5, True), (3.0, True), (3.5, False)])
def test_an_exclusion_that_is_not_written_for_three_seconds_is_judged_anew(
    age_s: float, stands: bool
) -> None:
    lab = Lab(settings=Settings(single_node=False, allow=("reboot_node",), alone=True))
    ctx = lab.node._context(Now(100.0, 1e9, "b"), lab.observed(), lab.view, [], [], [], {})
    item = lab.node.kernel.of_cause(ctx, Cause(FAULT, 1, "x", node="a"))
    old = NodeDoc(excluded=True, fault=FAULT, by="a", since_wall_s=1e9 - age_s)
    wanted = {"a": old}
    said = lab.node.repairs._out_of_service(ctx, item, "reboot_node", wanted)
    assert said == "waits until this node is out of service"
    assert wanted["a"].excluded and (wanted["a"] is old) is stands


def test_a_rank_that_hangs_does_not_keep_the_reboot_behind_a_failed_reset_from_coming() -> None:
    """It had its time to go elsewhere before the reset, which failed because it is still there."""
    cluster = of_another_gpu("abc", "reset_gpu", allow=("reset_gpu", "reboot_node"))
    lab = cluster.labs["b"]
    performs = lab._perform

    def perform(effect: Effect) -> None:
        performs(effect)
        if effect.kind == "reset_gpu":
            lab.outcomes[-1] = replace(
                lab.outcomes[-1], ok=False, error=f"{RAN} nvidia-smi ended with 255: in use")

    lab._perform = perform  # type: ignore[method-assign]
    lab._stop = lambda _: None  # type: ignore[method-assign]
    cluster.run(SETTLE_S + SEEN_S + 10)
    assert not orders(lab) and "until the ranks of r are elsewhere" in said(lab)
    while not orders(lab):
        cluster.step()
        assert lab.boot_s < 1000.0
    assert orders(lab) == ["reset_gpu"]
    cluster.run(SEEN_S)
    assert orders(lab) == ["reset_gpu", "reboot"]


@pytest.mark.parametrize(("late", "look_s"), [("", 1.0), ("ef", 1.0), ("ef", 0.75)])
def test_nodes_that_exclude_themselves_in_one_moment_do_not_all_reboot(
    late: str, look_s: float
) -> None:
    """None of them sees the others' documents before it has decided on its own; `late`: whose is
    refused at first, and written again at the third look, within three seconds."""
    cluster = fleet("abcdefgh", exclude_window_s=120.0)
    sick = {name: cluster.labs[name] for name in "efgh"}
    for name, lab in sick.items():
        lab.view = replace(lab.view, state="done")
        cluster.fatal[name] = FAULT if name in "ef" else "host_kernel_crash"
        lab.refuse_puts = int(name in late)
    for _ in range(int((SETTLE_S + SEEN_S + 20) / look_s)):
        cluster.step(look_s)
    assert all(read_node(cluster.docs[f"node/{name}"]).excluded for name in sick)
    assert [name for name, lab in sick.items() if orders(lab)] == ["e", "f"]
    (last,) = sick["h"].decision.incidents
    assert last.would_have == (
        "reboot_node: allowed, held: 3 of 8 nodes were excluded for faults within 2 min, 2 may be: "
        "a person releases it")
    cluster.run(150)
    assert not orders(sick["g"]) and not orders(sick["h"]), "not all together later on"
    sick["g"].requests = (Request("q", "release_node", "node/g", "looked at"),)
    cluster.run(SEEN_S + 10)
    assert orders(sick["g"]) == ["reboot"] and not orders(sick["h"])


@pytest.mark.parametrize("puts", [4, 5, 12])
def test_an_exclusion_that_the_store_does_not_take_for_long_is_judged_anew(puts: int) -> None:
    """By then others are out of service, and have orders."""
    cluster = fleet("abcdefgh", exclude_window_s=120.0)
    sick = {name: cluster.labs[name] for name in "efgh"}
    for name, lab in sick.items():
        lab.view = replace(lab.view, state="done")
        cluster.fatal[name] = FAULT if name in "ef" else "host_kernel_crash"
        lab.refuse_puts = puts if name in "ef" else 0
    cluster.run(SETTLE_S + 40)
    assert [name for name, lab in sick.items() if orders(lab)] == ["g", "h"]
    assert not any(read_node(cluster.docs[f"node/{name}"]).excluded for name in "ef"
                   if f"node/{name}" in cluster.docs)


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


def test_what_is_remembered_of_orders_is_bounded_and_the_oldest_goes_first() -> None:
    for count, first in ((3, 0), (128, 0), (129, 1), (140, 12)):
        kept = {str(number): number for number in range(count)}
        repair._bound(kept)
        assert list(kept) == [str(number) for number in range(first, count)]
