"""Nodes that are kept out of runs: who may, for how long, what a drain waits for, who lets go."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import (
    FATAL,
    WARN,
    CheckVerdict,
    Doc,
    Incident,
    Request,
    Runbook,
    Settings,
    node_subject,
)
from holdfast.agent.core.nodes.exclusions import AGAIN, is_open_still
from holdfast.agent.core.run.members import NodeDoc, read_node

from .driver import Cluster, Lab

replace = msgspec.structs.replace
MANY = Settings(single_node=False)


def started(names: str = "abc", nnodes: int = 2, settings: Settings = MANY, **view: object,
            ) -> Cluster:
    cluster = Cluster(names, nnodes, settings=settings, **view)  # type: ignore[arg-type]
    cluster.run(6)
    for lab in cluster.labs.values():
        if lab.view.ranks:
            lab.all(step=5, phase="forward_backward", step_time_s=0.5)
    cluster.run(1)
    return cluster


def ask(cluster: Cluster, by: str, action: str, node: str, id: str = "q1") -> None:
    cluster.labs[by].requests = (Request(id, action, node_subject(node), "noisy fan", by="ann"),)


def doc(cluster: Cluster, node: str) -> NodeDoc:
    return read_node(cluster.docs[f"node/{node}"])


def answers(cluster: Cluster, node: str) -> list[tuple[bool, str]]:
    return [(one.ok, one.text) for one in cluster.labs[node].decision.answers]


# ---------------------------------------------------------------- drain


def test_a_drain_saves_moves_the_ranks_and_is_answered_when_nothing_is_left() -> None:
    cluster = started()
    ask(cluster, "c", "drain", "b")
    said: list[tuple[bool, str]] = []
    for _ in range(12):
        cluster.run(1)
        said += answers(cluster, "c")
        if said:
            break
    assert said == [(True, "b is drained: nothing of any run is left there")]
    plan = cluster.plan()
    assert plan.members == ("a", "c") and plan.spent == ()
    assert (plan.resume.kind, plan.resume.step, plan.keep) == ("survivor", 5, (0,))
    stops = [e.body for e in cluster.labs["b"].log if e.kind == "stop"]
    assert stops[0].park and stops[0].save  # type: ignore[union-attr]
    assert doc(cluster, "b").excluded and not doc(cluster, "b").draining
    (incident,) = cluster.labs["a"].incidents.values()
    assert (incident.culprit, incident.reason) == ("b", "b: drained")


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_a_rank_of_who_leads_that_does_not_leave_by_itself_is_stopped(grade: str) -> None:
    """The order to leave at the end of a step was repeated, and stood in the way of the other."""
    cluster = Cluster("abc", 2, grade)
    cluster.run(8)
    lab = cluster.labs["a"]
    carry_out = lab._stop
    lab._stop = lambda body: None if body.park else carry_out(body)  # type: ignore[method-assign]
    ask(cluster, "a", "exclude_node", "a")
    cluster.run(30)
    assert cluster.plan().generation == 2
    assert {node for _, node in cluster.plan().ranks} == {"b", "c"}


def test_a_drain_that_nobody_can_follow_disturbs_nothing_and_is_given_up() -> None:
    cluster = started("ab", settings=replace(MANY, drain_limit_s=30.0))
    ask(cluster, "a", "drain", "b")
    cluster.run(20)
    assert cluster.plan().generation == 1 and answers(cluster, "a") == []
    leader = cluster.labs[cluster.leader()]
    assert dict(leader.decision.reasons)["r"] == (
        "b is to be drained, and no node can take its ranks")
    cluster.run(14)
    assert cluster.plan().generation == 1 and not doc(cluster, "b").excluded
    assert answers(cluster, "a") == [
        (False, "the drain was given up after 30 s: nobody took the ranks of r")]


def test_a_drain_in_a_store_that_was_made_anew_has_its_whole_time() -> None:
    """The document's versions begin anew with it: an older one says nothing of this drain."""
    cluster = started("ab", settings=replace(MANY, drain_limit_s=30.0))
    cluster.docs["node/b"] = Doc("node/b", 7, msgspec.json.encode(NodeDoc()))
    cluster.run(60)
    cluster.docs["node/b"] = Doc("node/b", 2, msgspec.json.encode(
        NodeDoc(excluded=True, draining=True, reason="noisy fan", by="ann")))
    cluster.run(20)
    assert doc(cluster, "b").draining
    cluster.run(14)
    assert doc(cluster, "b").reason.startswith("the drain was given up after 30 s")


def test_a_fault_meanwhile_goes_on_with_the_node_that_nobody_can_follow() -> None:
    cluster = started("ab")
    ask(cluster, "a", "drain", "b")
    cluster.run(3)
    cluster.labs["b"].kill(1)
    cluster.labs["a"].park(0, 5)
    cluster.run(6)
    assert (cluster.plan().generation, cluster.plan().members) == (2, ("a", "b"))


SPOT = ("ec2_spot_action_timestamp_seconds", "action=terminate", 1e9 + 600.0, 0.0)


def test_a_node_whose_end_is_announced_drains_itself_and_the_run_saves_and_moves() -> None:
    cluster = started(settings=replace(MANY, allow=("drain_node",)))
    cluster.labs["b"].samples = (SPOT,)
    cluster.run(3)
    assert doc(cluster, "b").fault == "ec2_spot_interruption"
    cluster.run(9)
    left = doc(cluster, "b")
    assert (left.excluded, left.draining, left.by) == (True, False, "b")
    assert left.reason.startswith("EC2 takes this spot instance back (terminate) at 2001-09-09")
    plan = cluster.plan()
    assert (plan.generation, plan.members, plan.spent) == (2, ("a", "c"), ())
    assert (plan.resume.kind, plan.resume.step) == ("survivor", 5)
    stops = [e.body for e in cluster.labs["b"].log if e.kind == "stop"]
    assert stops[0].park and stops[0].save  # type: ignore[union-attr]
    assert not cluster.labs["b"].finishes()

    # A person's word stands against the same announcement, and no check takes the drain back.
    ask(cluster, "a", "release_node", "b")
    cluster.run(20)
    assert not doc(cluster, "b").excluded
    cluster.labs["b"].samples = (replace_time(SPOT, 1e9 + 900.0),)  # and not against another
    cluster.run(20)
    assert doc(cluster, "b").excluded

    # It was stopped, and is started again under its name.
    lab = cluster.labs["b"]
    lab.samples, lab.boot_id = (), "another"
    lab.wall_ahead_s += 7200.0
    cluster.run(3)
    assert not doc(cluster, "b").excluded
    assert doc(cluster, "b").reason == "its end was announced, and it is back"


def replace_time(row: tuple[str, str, float, float], unix_s: float
                 ) -> tuple[str, str, float, float]:
    return (*row[:2], unix_s, row[3])


@pytest.mark.parametrize("how", ["not allowed", "not understood", "paused", "withdrawn"])
def test_what_keeps_an_announced_node_in_the_run(how: str) -> None:
    allow = () if how == "not allowed" else ("drain_node",)
    cluster = started(settings=replace(MANY, allow=allow))
    row = (SPOT[0], "action=unknown", *SPOT[2:]) if how == "not understood" else SPOT
    if how == "paused":
        cluster.labs["b"].requests = (Request("q1", "pause", node_subject("b"), "mine", by="ann"),)
        cluster.run(1)
    cluster.labs["b"].samples = () if how == "withdrawn" else (row,)
    cluster.run(12)
    assert "node/b" not in cluster.docs and cluster.plan().generation == 1


def test_a_single_nodes_drain_ends_its_runs_and_refuses_the_next_until_release() -> None:
    lab = Lab()
    lab.begin()
    lab.requests = (Request("q1", "drain", "node/a", "noisy fan", by="ann"),)
    lab.step()
    stop = next(e.body for e in lab.log if e.kind == "stop")
    assert stop.leave  # type: ignore[union-attr]
    for _ in range(4):
        lab.step(1)
    assert lab.finishes() == [75]
    assert [(one.ok, one.text) for one in lab.decision.answers] == [
        (True, "a is drained: nothing of any run is left there")]
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=lab.boot_s)
    lab.requests = ()
    lab.step(1)
    lab.settle()
    assert lab.finishes() == [75, 75] and len(lab.starts()) == 1
    said = [e.reason for e in lab.log if e.kind == "finish"][-1]
    assert said.startswith("a starts no run: the node was excluded from runs by ann: noisy fan")
    lab.requests = (Request("q2", "release_node", "node/a", "quiet now", by="ann"),)
    lab.step(1)
    lab.step(1)
    lab.view = replace(lab.view, registered_boot_s=lab.boot_s + 1)
    for _ in range(3):
        lab.step(1)
    assert len(lab.starts()) == 2


# ---------------------------------------------------------------- release


FAULTY = {"host_disk_error": Runbook("host_disk_error", "fatal", "node", ("exclude_node",),
                                     clears="check")}


def broken(cluster: Cluster, node: str = "b") -> None:
    """The node has a fatal fault, is excluded for it, and is rebooted without it."""
    for lab in cluster.labs.values():
        lab.runbooks |= FAULTY
    cluster.fatal[node] = "host_disk_error"
    cluster.run(8)
    assert doc(cluster, node).excluded and doc(cluster, node).fault == "host_disk_error"
    del cluster.fatal[node]
    cluster.labs[node].boot_id += "+"


def test_a_node_that_comes_back_is_checked_before_it_carries_ranks_again() -> None:
    cluster = started()
    cluster.labs["b"].hold.add("run_check")
    broken(cluster)
    cluster.run(20)
    assert doc(cluster, "b").excluded  # it runs again, and nobody knows more than that
    asked = [e for e in cluster.labs["b"].log if e.kind == "run_check"]
    assert len(asked) == 1
    cluster.labs["b"].checks["disk"] = CheckVerdict(
        "disk", "ok", "well", wall_s=1e9 + cluster.labs["b"].boot_s)
    cluster.run(3)
    assert not doc(cluster, "b").excluded
    assert doc(cluster, "b").reason == "checks passed after the exclusion: disk"
    assert len(doc(cluster, "b").strikes) == 1


def test_a_check_that_fails_keeps_it_out() -> None:
    cluster = started()
    cluster.labs["b"].health["disk"] = CheckVerdict("disk", "critical", "dying", confirmed=True)
    broken(cluster)
    cluster.run(30)
    assert doc(cluster, "b").excluded


def test_no_check_takes_back_what_is_still_open_on_the_node() -> None:
    """Such as a card's error of the kernel's log: the card's link may be up all the same."""
    cluster = started()
    for lab in cluster.labs.values():
        lab.runbooks |= {"card_error": Runbook("card_error", "fatal", "nic", ("exclude_node",),
                                               clears="quiet_10m")}
    cluster.fatal["b"] = "card_error"
    cluster.docs["node/b"] = Doc("node/b", 1, msgspec.json.encode(NodeDoc(
        excluded=True, fault="card_error", by="a", strikes=(1e9,))))
    cluster.run(650)  # it is asked for again after ten minutes
    assert doc(cluster, "b").excluded
    del cluster.fatal["b"]
    cluster.labs["b"].boot_id += "+"
    cluster.run(20)
    assert not doc(cluster, "b").excluded
    assert doc(cluster, "b").reason == "checks passed after the exclusion: network"


def test_a_milder_word_of_the_same_fault_holds_nobody_out() -> None:
    incident = Incident("i", "pcie_error", "node/b", WARN, "", 0, 1.0, 1.0, "corrected errors", "b")
    cluster = started()
    cluster.docs["node/b"] = Doc("node/b", 1, msgspec.json.encode(NodeDoc(
        excluded=True, fault="pcie_error", by="a", strikes=(1e9,))))
    cluster.step()
    lab = cluster.labs["b"]
    now, observed = lab.node._seen  # type: ignore[misc]
    ctx = lab.node._context(now, observed, lab.view, [], [], [], {})
    assert not is_open_still("b", ctx, [incident])
    assert is_open_still("b", ctx, [replace(incident, severity=FATAL)])
    assert not is_open_still("b", ctx, [replace(incident, fault="other", severity=FATAL)])


def test_a_check_that_failed_is_made_again_and_counts_when_it_passes() -> None:
    cluster = started()
    lab = cluster.labs["b"]
    lab.health["disk"] = CheckVerdict("disk", "critical", "dying", confirmed=True)
    broken(cluster)
    cluster.run(30)
    del lab.health["disk"]
    cluster.run(540)
    assert doc(cluster, "b").excluded and len([e for e in lab.log if e.kind == "run_check"]) == 1
    cluster.run(60)
    assert not doc(cluster, "b").excluded


def test_checks_are_made_as_soon_as_a_fault_that_came_again_is_over() -> None:
    cluster = started()
    lab = cluster.labs["b"]
    lab.health["disk"] = CheckVerdict("disk", "critical", "dying", confirmed=True)
    broken(cluster)
    cluster.run(10)
    cluster.fatal["b"] = "host_disk_error"
    cluster.run(5)
    del lab.health["disk"], cluster.fatal["b"]
    lab.boot_id += "+"
    cluster.run(5)
    assert not doc(cluster, "b").excluded


def test_nobodys_clock_decides_how_old_a_check_or_a_drain_is_on_another_node() -> None:
    cluster = started(settings=replace(MANY, drain_limit_s=60.0))
    cluster.apart(a=1 / 24, c=1 / 24)  # b's clock is an hour behind
    cluster.run(3)
    broken(cluster)
    cluster.run(5)
    assert not doc(cluster, "b").excluded
    other = started("ab", settings=replace(MANY, drain_limit_s=60.0))
    other.apart(b=1 / 24)
    other.run(3)
    ask(other, "a", "drain", "b")
    other.run(20)
    assert doc(other, "b").draining
    other.labs["b"].wall_ahead_s += 7200.0  # its own clock is set while the drain goes on
    other.run(20)
    assert doc(other, "b").draining
    other.run(24)
    assert not doc(other, "b").excluded


def test_after_three_strikes_only_a_person_releases() -> None:
    cluster = started()
    for strike in range(3):
        broken(cluster)
        assert len(doc(cluster, "b").strikes) == strike + 1
        cluster.run(30)
    assert doc(cluster, "b").excluded
    assert doc(cluster, "b").reason.endswith(
        "excluded 3 times within 30 days: a person releases it")
    ask(cluster, "a", "release_node", "b", "q9")
    cluster.run(3)
    assert not doc(cluster, "b").excluded


def test_a_persons_exclusion_outlasts_checks_and_reboots() -> None:
    cluster = started()
    ask(cluster, "a", "exclude_node", "b")
    cluster.run(3)
    assert answers(cluster, "a") == [(True, "b is excluded from runs")]
    cluster.labs["b"].boot_id += "+"
    cluster.labs["b"].checks["disk"] = CheckVerdict(
        "disk", "ok", "well", wall_s=2e9)
    cluster.run(30)
    assert doc(cluster, "b").excluded and "b" not in cluster.plan().members


# ---------------------------------------------------------------- a store that lost its documents


def excluded(action: str = "exclude_node") -> Cluster:
    cluster = started()
    ask(cluster, "a", action, "b")
    cluster.run(3)
    for lab in cluster.labs.values():
        lab.requests = ()
    return cluster


def written(cluster: Cluster, by: str) -> list[NodeDoc]:
    """What this node wrote of itself."""
    return [msgspec.json.decode(e.body.body, type=NodeDoc)  # type: ignore[union-attr]
            for e in cluster.labs[by].log
            if getattr(e.body, "key", "") == f"node/{by}"]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_exclusion_that_a_seeded_store_has_lost_is_written_again_by_its_node(
    restarted: bool
) -> None:
    cluster = excluded()
    before = doc(cluster, "b")
    if restarted:
        cluster.labs["b"].restart_agent()
    for _ in range(2):  # nor does a second time add to its words
        cluster.docs.clear()
        cluster.run(10)
        assert doc(cluster, "b") == replace(before, reason=f"noisy fan ({AGAIN})")
    assert [len(written(cluster, name)) for name in "abc"] == [0, 2, 0]
    assert sorted(key for key in cluster.docs if key.startswith("node/")) == ["node/b"]


def test_a_drain_that_the_store_has_lost_goes_on() -> None:
    cluster = started("ab", settings=replace(MANY, drain_limit_s=30.0))
    ask(cluster, "a", "drain", "b")
    cluster.run(3)
    cluster.docs.clear()
    cluster.run(3)
    assert doc(cluster, "b").draining and AGAIN in doc(cluster, "b").reason
    cluster.run(40)
    assert not doc(cluster, "b").excluded
    assert answers(cluster, "a") == [
        (False, "the drain was given up after 30 s: nobody took the ranks of r")]


def test_a_restart_of_the_agent_does_not_begin_the_limit_of_its_drain_anew() -> None:
    cluster = started("ab", settings=replace(MANY, drain_limit_s=30.0))
    ask(cluster, "a", "drain", "b")
    cluster.run(3)
    for _ in range(3):
        cluster.run(8)
        assert doc(cluster, "b").draining
        cluster.labs["b"].restart_agent()
    cluster.run(8)
    assert not doc(cluster, "b").excluded and "given up after 30 s" in doc(cluster, "b").reason


def test_what_was_released_before_the_store_lost_it_or_while_it_was_away_stays_so() -> None:
    cluster = excluded()
    ask(cluster, "a", "release_node", "b", "q2")
    cluster.run(3)
    cluster.docs.clear()
    cluster.run(10)
    assert "node/b" not in cluster.docs and written(cluster, "b") == []

    cluster = excluded()
    for lab in cluster.labs.values():
        lab.store_up = False
    cluster.docs.clear()
    ask(cluster, "a", "release_node", "b", "q2")
    cluster.run(10)
    assert written(cluster, "b") == []
    for lab in cluster.labs.values():
        lab.store_up = True
    cluster.run(10)
    assert not doc(cluster, "b").excluded and len(written(cluster, "b")) <= 1

    cluster = excluded()  # and after it was written again
    cluster.docs.clear()
    cluster.run(5)
    assert doc(cluster, "b").excluded
    ask(cluster, "c", "release_node", "b", "q2")
    cluster.run(10)
    assert not doc(cluster, "b").excluded and len(written(cluster, "b")) == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_no_exclusion_is_carried_into_another_clusters_store(is_known: bool) -> None:
    """As behind `holdfast store forget`.  One whose cluster is not known takes nothing either."""
    cluster = excluded()
    for lab in cluster.labs.values():
        lab.cluster = "first"
    cluster.run(2)
    cluster.docs.clear()
    for lab in cluster.labs.values():
        lab.cluster = "second" if is_known else ""
    cluster.run(10)
    assert written(cluster, "b") == []
    for lab in cluster.labs.values():
        lab.cluster = "first"  # it was only the other's, or was seeded with this one's id
    cluster.run(10)
    assert len(written(cluster, "b")) == (0 if is_known else 1)


# ---------------------------------------------------------------- the fleet


def the_last_place_is_taken() -> Cluster:
    """By node d, whom the leader has just excluded."""
    cluster = started("abcdefgh", nnodes=2)
    cluster.fatal["c"] = "fault_0"
    cluster.run(4)
    cluster.fatal["d"] = "fault_1"
    while "node/d" not in cluster.docs:
        cluster.step(0.2)
    return cluster


@pytest.mark.parametrize("behind_s", [-0.1, 0.1])
def test_of_two_leaders_that_exclude_in_one_moment_the_later_takes_its_own_back(
    behind_s: float
) -> None:
    """One may go still, and each has read that."""
    cluster = the_last_place_is_taken()
    mine = doc(cluster, "d")
    assert mine.excluded and mine.by == cluster.leader()
    at_s = mine.since_wall_s + behind_s
    other = NodeDoc(excluded=True, reason="of another run", by="h", fault="fault_9",
                    strikes=(at_s,), since_wall_s=at_s)
    cluster.docs["node/e"] = Doc("node/e", 1, msgspec.json.encode(other))
    cluster.run(20)
    assert doc(cluster, "e") == other, "what another wrote is his to take back"
    if behind_s > 0.0:
        assert doc(cluster, "d") == mine
        return
    assert not doc(cluster, "d").excluded and doc(cluster, "d").strikes == ()
    assert "taken back, another was excluded in the same moment" in doc(cluster, "d").reason
    assert cluster.docs["node/d"].version == 2, "and it is not excluded anew"


def test_nobody_takes_back_what_a_person_asked_for_meanwhile() -> None:
    cluster = the_last_place_is_taken()
    at_s = doc(cluster, "d").since_wall_s - 0.1
    cluster.docs["node/e"] = Doc("node/e", 1, msgspec.json.encode(NodeDoc(
        excluded=True, reason="of another run", by="h", fault="fault_9", strikes=(at_s,),
        since_wall_s=at_s)))
    ask(cluster, cluster.leader(), "exclude_node", "d")
    cluster.run(20)
    assert doc(cluster, "d").excluded and not doc(cluster, "d").fault
    assert [ok for ok, _ in answers(cluster, cluster.leader())] == [True]


def test_a_node_that_was_struck_before_is_judged_as_any_other() -> None:
    """Else it is excluded by one rule, and taken back by the other, for as long as both hold."""
    cluster = started("abcdefgh", nnodes=2)
    begun_s = 1e9 + cluster.labs["a"].boot_s
    for number, name in enumerate("dcef"):
        cluster.docs[f"node/{name}"] = Doc(f"node/{name}", 1, msgspec.json.encode(NodeDoc(
            excluded=name in "ef", reason="x", by=name,
            fault=f"fault_{name}" if name in "ef" else "",
            strikes=(begun_s - 10.0 + number,), since_wall_s=begun_s)))
    cluster.fatal["d"] = "fault_7"
    cluster.run(30)
    assert cluster.docs["node/d"].version == 1


def test_a_fleet_loses_no_more_nodes_to_faults_than_it_may() -> None:
    """Two different faults a node each, one by one: no single fault opens the breaker."""
    cluster = started("abcdefgh", nnodes=2)
    for number, name in enumerate("cdef"):
        cluster.fatal[name] = f"fault_{number}"
        cluster.run(4)
    out = [name for name in "abcdefgh" if f"node/{name}" in cluster.docs]
    assert out == ["c", "d"]
    leader = cluster.labs[cluster.leader()]
    said = [one.reason for one in leader.decision.incidents if one.fault == "fault_2"
            and one.subject == "fleet"]
    assert len(said) == 1 and "2 of 8 nodes were excluded for faults within 30 min" in said[0]


def test_nodes_that_checks_released_meanwhile_count_for_the_fleet_all_the_same() -> None:
    """Else one common cause that comes and goes walks through the fleet, node by node."""
    cluster = started("abcdefgh", nnodes=2)
    for name in "cd":
        broken(cluster, name)
        cluster.run(8)
        assert not doc(cluster, name).excluded
    cluster.fatal["e"] = "host_disk_error"
    cluster.run(8)
    assert "node/e" not in cluster.docs


def test_idle_nodes_count_for_the_breaker() -> None:
    cluster = started("abcdefgh", nnodes=2)
    for name in "defgh":
        lab = cluster.labs[name]
        lab.view = replace(lab.view, connected=False)  # an agent with no run of its own
        cluster.fatal[name] = "gpu_lost"
        cluster.heard.pop((name, "r"), None)
    cluster.fatal["c"] = "gpu_lost"
    cluster.run(10)
    assert not any(key.startswith("node/") for key in cluster.docs)


def test_a_node_that_fell_silent_with_a_fault_of_many_counts_for_the_breaker() -> None:
    """Else the breaker closes when one of them goes down, and the others are excluded."""
    cluster = started("abcdefgh", nnodes=2)
    for name in "def":
        cluster.fatal[name] = "gpu_lost"
    cluster.run(3)
    assert not any(key.startswith("node/") for key in cluster.docs)
    cluster.lost.add("d")
    cluster.run(40)
    assert not any(key.startswith("node/") for key in cluster.docs)


@pytest.mark.parametrize(("more", "counts"), [
    ({"since_wall_s": 90.0}, False),  # nothing was written of them since
    ({"since_wall_s": 1.0}, True),
    ({}, True),  # not known
])
def test_nodes_that_are_gone_for_good_hold_no_breaker_open(
    more: dict[str, float], counts: bool
) -> None:
    """Three instances were excluded over the months, and replaced under other names."""
    cluster = started("abcdefgh", nnodes=2)
    wall_s = 1e9 + cluster.labs["a"].boot_s
    for name in "xyz":
        since_s = {key: wall_s - days * 86400.0 for key, days in more.items()}
        body = NodeDoc(excluded=True, fault="gpu_lost", **since_s)
        cluster.docs[f"node/{name}"] = Doc(f"node/{name}", 1, msgspec.json.encode(body))
    cluster.fatal["d"] = "gpu_lost"
    cluster.run(10)
    assert ("node/d" not in cluster.docs) is counts
