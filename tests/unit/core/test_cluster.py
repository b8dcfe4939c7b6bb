"""Several nodes: leases, spares, unknown and lost members, exclusion and its breaker."""

from __future__ import annotations

import msgspec

from holdfast.agent.core.model import Request, Settings
from holdfast.agent.core.run.members import read_node

from .driver import Cluster


def started(names: str = "abc", nnodes: int = 2, grade: str = "trainer") -> Cluster:
    cluster = Cluster(names, nnodes, grade)
    cluster.run(6)
    return cluster


def test_one_leads_and_every_member_starts_its_own_ranks() -> None:
    cluster = started()
    plan = cluster.plan()
    assert plan.generation == 1 and plan.ranks == ((0, "a"), (1, "b"))
    assert plan.spares == ("c",)
    assert [r.rank for r in cluster.labs["b"].view.ranks] == [1]
    assert cluster.labs["c"].view.generation == 0
    writes = [n for n, lab in cluster.labs.items()
              if any(e.subject == "store/run/r" for e in lab.log)]
    assert writes == [cluster.leader()]


def test_it_waits_until_enough_nodes_are_there() -> None:
    cluster = Cluster("a", nnodes=2)
    cluster.run(20)
    assert "run/r" not in cluster.docs
    assert dict(cluster.labs["a"].decision.reasons)["r"].startswith("waiting for nodes: 1 of 2")


def test_a_lost_member_is_unknown_first_and_then_a_spare_takes_its_ranks() -> None:
    cluster = started()
    cluster.dead.add("b")
    cluster.run(9)
    leader = cluster.labs[cluster.leader()]
    assert cluster.plan().generation == 1
    assert ("host_unknown", "unknown") in {(v.fault, v.severity) for v in leader.decision.verdicts}
    cluster.run(10)
    assert cluster.plan().generation == 2 and cluster.plan().ranks == ((0, "a"), (1, "c"))
    assert cluster.labs["c"].view.ranks[0].rank == 1


def test_a_lost_leader_is_followed_by_another_who_inherits_the_budget() -> None:
    cluster = started()
    cluster.labs["b"].kill(1)
    cluster.labs["a"].park(0, 3)
    cluster.run(6)
    assert cluster.plan().generation == 2 and cluster.leader() == "a"
    cluster.dead.add("a")
    cluster.run(40)
    assert cluster.leader() in "bc"
    assert cluster.plan().generation == 3
    assert dict(cluster.plan().spent)["restarts"] == 2


def test_a_leader_known_to_be_lost_is_followed_before_his_lease_ends() -> None:
    cluster = started()
    first = cluster.leader()
    cluster.dead.add(first)
    cluster.lost.add(first)
    cluster.run(4)  # of a lease of 10 s, less than what his own clock gives him
    assert cluster.leader() not in (first, "")
    assert cluster.plan().generation == 2 and first not in dict(cluster.plan().ranks).values()


def test_a_script_of_a_lost_node_has_its_old_permits_time() -> None:
    cluster = started(grade="script")
    lost = next(node for _, node in cluster.plan().ranks if node != cluster.leader())
    cluster.dead.add(lost)
    cluster.lost.add(lost)
    cluster.run(12)
    assert cluster.plan().generation == 1
    cluster.run(10)
    assert cluster.plan().generation == 2


def test_a_lost_member_without_a_spare_only_waits() -> None:
    cluster = started("ab")
    cluster.dead.add("b")
    cluster.run(40)
    assert cluster.plan().generation == 1
    assert "no spare" in dict(cluster.labs["a"].decision.reasons)["r"]


def test_without_the_store_no_plan_is_made_and_nothing_is_stopped() -> None:
    cluster = started()
    for lab in cluster.labs.values():
        lab.store_up = False
    cluster.run(30)
    cluster.labs["b"].kill(1)
    cluster.run(10)
    assert cluster.plan().generation == 1
    assert not any(e.kind == "stop" for lab in cluster.labs.values() for e in lab.log)
    for lab in cluster.labs.values():
        lab.store_up = True
    cluster.run(40)
    assert cluster.plan().generation == 2


def test_a_node_with_a_fatal_fault_loses_its_ranks_and_is_excluded() -> None:
    cluster = started()
    cluster.fatal["b"] = "gpu_lost"
    cluster.run(8)
    assert cluster.plan().ranks == ((0, "a"), (1, "c"))
    assert read_node(cluster.docs["node/b"]).excluded
    stale = [r for r in cluster.labs["b"].view.ranks if r.state != "ended"]
    assert stale == []


def test_the_breaker_stops_excluding_and_tells_once() -> None:
    cluster = started("abcde", nnodes=2)
    for name in "cde":
        cluster.fatal[name] = "gpu_lost"
    cluster.run(10)
    assert not any(k.startswith("node/") for k in cluster.docs)
    leader = cluster.labs[cluster.leader()]
    assert [i.id for i in leader.decision.incidents] == [
        f"fleet-gpu_lost-breaker-{cluster.leader()}-1"]


def test_a_breaker_that_opens_again_on_one_node_is_another_incident() -> None:
    """Under one id the second overwrote what was known of the first."""
    cluster = started("abcde", nnodes=2)
    leader = cluster.labs[cluster.leader()]
    for _ in range(2):
        for name in "cde":
            cluster.fatal[name] = "gpu_lost"
        cluster.run(10)
        for name in "cde":  # each is booted anew, without the fault
            del cluster.fatal[name]
            cluster.labs[name].boot_id += "+"
        cluster.run(10)
    found = [one for one in leader.incidents.values() if one.subject == "fleet"]
    assert [one.id for one in found] == [f"fleet-gpu_lost-breaker-{leader.name}-{number}"
                                         for number in (1, 2)]
    assert [one.state for one in found] == ["closed", "closed"]
    assert found[0].opened_boot_s < found[1].opened_boot_s


def test_who_just_began_excludes_nobody_before_the_fleet_is_heard_of() -> None:
    cluster = started("abcde", nnodes=2)
    for name in "cde":
        cluster.fatal[name] = "gpu_lost"
    cluster.run(3)
    cluster.labs["a"].restart_agent()
    cluster.heard = {key: beat for key, beat in cluster.heard.items() if key[0] == "c"}
    cluster.run(10)
    assert cluster.leader() == "a" and not any(key.startswith("node/") for key in cluster.docs)


def test_ranks_never_move_to_a_node_with_a_fatal_fault_even_while_the_breaker_is_open() -> None:
    cluster = started("abcde", nnodes=2)
    for name in "cde":
        cluster.fatal[name] = "gpu_lost"
    cluster.dead.add("b")
    cluster.run(40)
    assert cluster.plan().generation == 1
    assert all(not cluster.labs[n].view.ranks for n in "cde")


def test_an_excluded_node_gets_no_rank_until_released() -> None:
    cluster = Cluster("abc")
    leader = cluster.labs["a"]
    leader.requests = (Request("q1", "exclude_node", "node/a", "noisy", by="ann"),)
    cluster.run(8)
    doc = read_node(cluster.docs["node/a"])
    assert (doc.excluded, doc.reason, doc.by, doc.fault) == (True, "noisy", "ann", "")
    assert cluster.plan().ranks == ((0, "b"), (1, "c"))
    leader.requests = (Request("q2", "release_node", "node/a", "fixed"),)
    cluster.run(3)
    assert not read_node(cluster.docs["node/a"]).excluded


def test_a_foreign_document_in_the_store_is_no_crash() -> None:
    cluster = started()
    for key in ("node/b", "node/x"):
        cluster.docs[key] = msgspec.structs.replace(cluster.docs["run/r"], key=key, body=b"{]")
    cluster.run(3)
    assert cluster.plan().generation == 1


def test_all_done_on_every_node_finishes_every_launcher() -> None:
    from holdfast.agent.core.model import Ended

    cluster = started()
    cluster.labs["a"].end(0, Ended(0, 0, "done"))
    cluster.labs["b"].end(1, Ended(0, 0, "done"))
    cluster.run(6)
    assert cluster.plan().finished == 0
    assert [lab.finishes() for lab in cluster.labs.values()] == [[0], [0], [0]]


def test_a_launcher_that_came_back_empty_is_noticed() -> None:
    cluster = started("ab")
    lab = cluster.labs["b"]
    lab.view = msgspec.structs.replace(
        lab.view, generation=0, state="idle", ranks=(), registered_boot_s=7.0
    )
    cluster.labs["a"].park(0, 0)
    cluster.run(25)
    assert cluster.plan().generation == 2
    assert [r.generation for r in lab.view.ranks] == [2]


def test_a_node_that_came_late_is_named_and_may_follow_a_lost_leader() -> None:
    cluster = Cluster("ab", nnodes=1)
    cluster.dead.add("b")
    cluster.run(5)
    assert cluster.plan().spares == ()
    cluster.dead.clear()
    cluster.run(3)
    assert (cluster.plan().generation, cluster.plan().spares) == (1, ("b",))
    cluster.dead.add("a")
    cluster.run(40)
    assert cluster.plan().ranks == ((0, "b"),)


def test_scripts_hold_a_permit_of_one_lease() -> None:
    cluster = started(grade="script")
    assert cluster.labs["a"].starts()[0].permit_s == Settings().lease_s


def test_a_device_of_a_node_is_not_the_nodes_name() -> None:
    cluster = Cluster("abc")
    leader = cluster.labs["a"]
    leader.requests = (Request("q1", "exclude_node", "node/b/gpu/0", "noisy", by="ann"),)
    cluster.run(8)
    assert [key for key in cluster.docs if key.startswith("node/")] == ["node/b"]


def test_a_lost_node_with_every_rank_keeps_the_runs_budgets() -> None:
    """The spare that follows sees no rank of it, and its own memory holds no step."""
    cluster = Cluster("ab", nnodes=1)
    cluster.run(4)
    cluster.labs["a"].kill(0)
    cluster.run(6)
    assert dict(cluster.plan().spent)["restarts"] == 1
    cluster.dead.add("a")
    cluster.run(40)
    assert cluster.plan().ranks == ((0, "b"),)
    assert dict(cluster.plan().spent)["restarts"] == 2


def test_a_request_to_who_does_not_lead_is_refused() -> None:
    cluster = started()
    other = next(name for name in "abc" if name != cluster.leader())
    lab = cluster.labs[other]
    lab.requests = (Request("q1", "restart_ranks", "run/r", "slow", run="r", by="ann"),)
    cluster.run(2)
    assert [answer.ok for answer in lab.decision.answers] == [False]
    assert cluster.plan().generation == 1
