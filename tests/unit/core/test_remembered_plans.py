"""A plan that an agent remembers, and a store that may be another's, or not there yet."""

from __future__ import annotations

import msgspec
import pytest

from .driver import Cluster
from .test_many_nodes import anew, started

replace = msgspec.structs.replace


def test_who_is_moved_to_another_cluster_starts_nothing_of_the_plan_that_he_remembers() -> None:
    """There is a run of that name there as well, with a document of the same version."""
    left, joined = Cluster("c", 1, grade="script"), started(names="ab", grade="script")
    lab = left.labs["c"]
    lab.cluster = "first"
    lab.hold.add("start")  # its plan is made, and no launcher has shown that generation yet
    left.run(6)
    assert left.docs["run/r"].version == joined.docs["run/r"].version
    lab.docs, lab.leases, lab.cluster = joined.docs, joined.leases, "second"
    anew(left)
    before = len(lab.starts())
    for _ in range(10):
        lab.step(0.2)
    assert len(lab.starts()) == before == 1 and joined.plan().members == ("a", "b")


def test_an_agent_that_begins_anew_starts_nothing_of_a_plan_before_the_store_has_answered() -> None:
    cluster = Cluster("ab")
    for lab in cluster.labs.values():
        lab.hold.add("start")  # planned, and no launcher was told yet
    cluster.run(6)
    assert cluster.plan().generation == 1
    lab = cluster.labs["a"]
    lab.restart_agent()
    before = len(lab.starts())
    lab.docs, lab.store_up = {}, False
    for _ in range(5):
        lab.step(0.2)
    assert lab.node.cases["r"].state.document.plan is not None and len(lab.starts()) == before
    lab.docs, lab.store_up = cluster.docs, True
    lab.step(0.2)
    assert len(lab.starts()) == before + 1


@pytest.mark.parametrize("kept", ["nothing", "older", "older, with as many writes"])
def test_a_store_that_lost_the_plan_in_force_is_given_it_again(kept: str) -> None:
    """Restored from a backup, or seeded: no permit of a script is renewed until it is there."""
    cluster = started(names="ab", grade="script")
    old = cluster.docs["run/r"]
    cluster.labs["a"].kill(0)
    cluster.run(30)
    plan, version = cluster.plan(), cluster.docs["run/r"].version
    assert plan.generation == 2 and version > old.version
    starts = [len(lab.starts()) for lab in cluster.labs.values()]
    if kept == "nothing":
        del cluster.docs["run/r"]
    else:
        same = version if "as many" in kept else old.version
        cluster.docs["run/r"] = replace(old, version=same)
    cluster.run(4)
    assert cluster.plan().generation == 2, "it is there in a few seconds"
    cluster.run(30)
    assert cluster.plan().generation == 2
    assert [len(lab.starts()) for lab in cluster.labs.values()] == starts, "nobody was disturbed"
    cluster.labs["a"].kill(0)
    cluster.run(30)
    assert cluster.plan().generation == 3 and all(
        lab.view.generation == 3 for lab in cluster.labs.values()), "and all go on from it"


def test_a_plan_at_a_version_that_the_lost_history_had_is_taken() -> None:
    """The store counted from its backup on, and came to the same number with another plan."""
    cluster = started(names="ab", grade="script")
    lab, doc = cluster.labs["b"], cluster.docs["run/r"]
    newer = replace(cluster.plan(), generation=7)
    lab.docs = dict(cluster.docs) | {"run/r": replace(doc, body=msgspec.json.encode(newer))}
    lab.step(0.2)
    known = lab.node.cases["r"].state.document
    assert known.plan is not None and (known.plan.generation, known.version) == (7, doc.version)


def test_who_remembers_higher_generations_of_a_name_says_so_to_who_leads_it() -> None:
    """Its document is gone, and the leader knew nothing of it: no launcher takes a lower one."""
    cluster = Cluster("ab")
    state = cluster.labs["b"].node._case("r").state
    state.launcher = replace(state.launcher, top=50)
    cluster.run(12)
    assert cluster.plan().generation == 51 and {
        lab.view.generation for lab in cluster.labs.values()} == {51}


@pytest.mark.parametrize("away", [False, True])
def test_who_leads_and_missed_a_plan_that_the_store_lost_lets_one_lead_who_has_it(
    away: bool,
) -> None:
    """Else no plan would ever be written: it knows none that is above what the others run.  Nobody
    can lead while the store is away, and that time says nothing against who has the plan."""
    cluster = started(names="ab", grade="script")
    missed = cluster.labs["a"].node.cases["r"].state.document
    cluster.labs["a"].kill(0)
    cluster.run(30)
    assert cluster.plan().generation == 2 and cluster.leader() == "a"
    del cluster.docs["run/r"]
    state = cluster.labs["a"].node.cases["r"].state
    state.document = replace(missed, version=0)
    if away:
        cluster.leases.clear()
        for lab in cluster.labs.values():
            lab.store_up = False
        cluster.run(60)
        for lab in cluster.labs.values():
            lab.store_up = True
    for _ in range(40):
        cluster.run(1)
        assert "run/r" not in cluster.docs or cluster.plan().generation == 2
    assert cluster.plan().generation == 2 and cluster.leader() == "b"
    cluster.labs["b"].kill(1)
    cluster.run(30)
    assert {lab.view.generation for lab in cluster.labs.values()} == {3}
