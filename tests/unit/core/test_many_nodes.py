"""Many nodes: what they tell each other, and what a leader makes of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.detect.ranks.hang import name_culprits
from holdfast.agent.core.model import (
    Beat,
    Doc,
    Documents,
    Ended,
    Now,
    RankView,
    Settings,
    StoreView,
)
from holdfast.agent.core.run import members
from holdfast.agent.core.series.wait_history import History

from .driver import Cluster, Lab

replace = msgspec.structs.replace
OWN_WORDS = "ValueError: no neighbour answers"  # a consequence that nothing tells by its text


def started(**given: object) -> Cluster:
    cluster = Cluster(**given)  # type: ignore[arg-type]
    cluster.run(6)
    return cluster


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("days", [{}, {"a": 20.0}, {"b": 20.0}], ids=["together", "a", "b"])
def test_who_failed_first_is_told_by_ages_and_not_by_clocks(days: dict[str, float]) -> None:
    """Rank 1 raises, rank 0 two seconds later because of it; the leader comes to know both at once,
    and the machines were booted weeks apart."""
    cluster = started(names="abc", nnodes=2, grade="script")
    cluster.apart(**days)
    cluster.run(1)
    cluster.labs["b"].raises(1, "ValueError: bad sample")
    cluster.labs["a"].raises(0, OWN_WORDS, after_s=2.0)
    for lab in cluster.labs.values():
        lab.boot_s += 2.5
    heard = cluster.labs["b"].decision.beats
    cluster.heard["b", "r"] = replace(
        next(one for one in heard if one.run == "r"), ranks=cluster.labs["b"].view.ranks,
        sent_boot_s=cluster.labs["b"].boot_s)
    cluster.at_s["b", "r"] = cluster.labs["b"].boot_s - cluster.labs["b"].ahead_s
    cluster.run(3)
    assert cluster.plan().generation == 2
    assert cluster.plan().reason.startswith("rank 1 ")


def test_anothers_times_are_moved_into_this_machines_clock() -> None:
    ended = Ended(1, boot_s=1_000_000.0)
    rank = RankView(0, "b", 7, 1, "ended", ended=ended, start_boot_s=999_000.0)
    beat = Beat("b", "r", 1, boot_s=50.0, ranks=(rank,), sent_boot_s=1_000_003.0)
    moved = members.here(rank, beat, Now(51.5, 0.0))
    assert moved.ended is not None and (moved.ended.boot_s, moved.start_boot_s) == (47.0, -953.0)
    assert moved.told_s == 1.5
    assert members.here(rank, replace(beat, sent_boot_s=0.0), Now(50.0, 0.0)) == rank


@pytest.mark.parametrize(("said_s", "named"), [(7.5, 0), (9.0, None), (14.5, 1)])
def test_who_stood_still_first_does_not_depend_on_when_it_was_said(
    said_s: float, named: int | None
) -> None:
    """Rank 0 is here and stands still for 12 s; another node said something of rank 1 2 s ago."""
    here = RankView(0, "a", 7, 1, "running", step=5, phase="forward_backward", still_s=12.0)
    there = replace(here, rank=1, node="b", still_s=said_s, told_s=2.0)
    found, how = name_culprits((here, there), History(), None, "trainer")
    assert [one.rank for one in found] == ([0, 1] if named is None else [named]), how


def test_a_run_over_nodes_goes_on_from_its_first_new_step_not_from_when_that_was_said() -> None:
    cluster = started()
    lab = cluster.labs[cluster.leader()]
    other = next(one for name, one in cluster.labs.items()
                 if one is not lab and name in cluster.plan().members)
    lab.kill(lab.view.ranks[0].rank)
    other.park(other.view.ranks[0].rank, 0)
    cluster.run(8)
    state = lab.node.cases["r"].state
    assert cluster.plan().generation == 2 and state.history.restarts_s == []
    lab.all(step=1, still_s=5.0)
    told = replace(cluster.heard[other.name, "r"], boot_s=lab.boot_s - 2.0, ranks=tuple(
        replace(rank, step=4, still_s=0.25, step_time_s=0.5) for rank in other.view.ranks))
    lab.beats = (told,)
    lab.step()
    assert state.history.restarts_s == [lab.boot_s - 3.75 - state.progress.broken_boot_s]


# ---------------------------------------------------------------- beats


def test_a_node_tells_of_itself_and_of_each_run() -> None:
    cluster = started()
    lab = cluster.labs["a"]
    lab.commit(3)
    cluster.run(1)
    own, run = lab.decision.beats
    assert (own.run, own.ranks, own.fatal) == ("", (), "")
    assert (run.run, run.generation, run.nproc, run.grade) == ("r", 1, 1, "trainer")
    assert [one.step for one in run.commits] == [3]
    assert run.boot_s == 0.0 and run.sent_boot_s == lab.boot_s


def test_a_single_node_has_nobody_to_tell() -> None:
    lab = Lab()
    lab.begin()
    assert lab.decision.beats == ()


def test_an_open_fatal_incident_of_the_node_goes_out_with_its_beats() -> None:
    cluster = started()
    cluster.fatal["b"] = "gpu_lost"
    cluster.run(1)
    assert [one.fatal for one in cluster.labs["b"].decision.beats] == ["gpu_lost", "gpu_lost"]


def test_a_leaders_own_fatal_fault_takes_its_ranks_too() -> None:
    """Without a beat of its own that comes back from anywhere."""
    cluster = started()
    leader = cluster.leader()
    cluster.fatal[leader] = "gpu_lost"
    cluster.run(6)
    assert leader not in cluster.plan().members


def test_a_fault_that_is_only_observed_excludes_no_node() -> None:
    cluster = started()
    for lab in cluster.labs.values():
        lab.node.configure(replace(lab.settings, act=("ended", "hang")), {})
    cluster.fatal["b"] = "gpu_lost"
    cluster.run(8)
    assert cluster.plan().generation == 1 and "node/b" not in cluster.docs


# ---------------------------------------------------------------- the store's documents


def test_documents_are_found_by_key_and_by_kind() -> None:
    docs = Documents([Doc("node/a", 3, b"{}"), Doc("run/r", 1), Doc("node/b/x", 2)])
    assert docs.get("node/a").version == 3 and docs.get("node/z") == Doc("node/z", 0)
    assert [name for name, _ in docs.of("node")] == ["a", "b/x"]
    assert docs.of("lease") == () and len(docs) == 3 and "run/r" in docs
    some = [Doc("run/r", 1)]
    assert StoreView(True, some).docs == Documents(some)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(
    st.sampled_from(("node/a", "node/b", "node/b/x", "run/r", "run/", "lease")),
    st.one_of(st.none(), st.integers(1, 5)), max_size=3)), max_size=8))
def test_documents_by_kind_are_the_same_whether_read_anew_or_changed(
    steps: list[tuple[bool, dict[str, int | None]]]
) -> None:
    docs, expected = Documents(), dict[str, Doc]()
    for is_asked, change in steps:
        if is_asked:
            docs.of("node"), docs.of("none")
        made = {key: Doc(key, version) if version else None for key, version in change.items()}
        docs = docs.changed(made)
        for key, doc in made.items():
            expected.pop(key, None) if doc is None else expected.update({key: doc})
        for kind in ("node", "run", "lease", "none"):
            assert docs.of(kind) == tuple(
                (key.partition("/")[2], doc) for key, doc in expected.items()
                if key.partition("/")[0] == kind)


def test_a_document_is_decoded_once_for_each_version() -> None:
    read: list[Doc] = []

    def look(doc: Doc) -> int:
        read.append(doc)
        return len(doc.body)

    docs = Documents([Doc("a/1", 1, b"x"), Doc("a/2", 1, b"xy")])
    assert [docs.decoded("a/1", look) for _ in range(3)] == [1, 1, 1] and len(read) == 1
    newer = docs.changed({"a/1": Doc("a/1", 2, b"xyz"), "a/3": Doc("a/3", 1)})
    docs.decoded("a/2", look)
    newer = docs.changed({"a/1": Doc("a/1", 2, b"xyz"), "a/3": Doc("a/3", 1)})
    assert newer.decoded("a/1", look) == 3 and newer.decoded("a/2", look) == 2
    assert len(read) == 3 and len(newer) == 3 and len(newer.changed({"a/3": None})) == 2
    assert newer.changed({"a/2": None, "a/9": None}).decoded("a/2", look) == 0
    assert newer.decoded("a/2", look) == docs.decoded("a/2", look) == 2 and len(read) == 4


def test_what_was_made_of_no_document_is_forgotten_with_the_next_change() -> None:
    """Else a store of short runs would be remembered for ever."""
    docs = Documents([Doc("a/1", 1)])
    read: list[int] = []
    for number in range(3):
        assert docs.decoded(f"b/{number}", lambda doc: read.append(doc.version) or doc.key)
        assert docs.decoded("c", read_nothing) is None
    docs = docs.changed({"b/1": Doc("b/1", 4)})
    assert docs.decoded("b/1", lambda doc: doc.version) == 4 and not docs._absent


def read_nothing(doc: Doc) -> None:
    assert doc.version == 0


# ---------------------------------------------------------------- the size of a world


def elastic(names: str = "abc", most: int = 3, least: int = 2, **view: object) -> Cluster:
    """A run that trains on `most` nodes and goes on with `least`."""
    cluster = Cluster(names, most, least=least, **view)  # type: ignore[arg-type]
    cluster.run(6)
    assert len(cluster.plan().members) == most
    for lab in cluster.labs.values():
        if lab.view.ranks:
            lab.all(step=3, phase="forward_backward", step_time_s=0.5)
    cluster.run(2)
    return cluster


def lose(cluster: Cluster, name: str) -> None:
    """The node is gone, and the others' ranks park."""
    cluster.dead.add(name)
    for other, lab in cluster.labs.items():
        if other not in cluster.dead and lab.view.ranks:
            lab.park(lab.view.ranks[0].rank, 3)


def culprits(cluster: Cluster) -> dict[str, str]:
    return {one.fault: one.culprit for lab in cluster.labs.values()
            for one in lab.incidents.values()}


def test_a_lost_node_without_a_spare_shrinks_the_world_to_what_is_left() -> None:
    cluster = elastic()
    lose(cluster, "b")
    cluster.run(20)
    plan = cluster.plan()
    assert (plan.generation, plan.ranks) == (2, ((0, "a"), (1, "c")))
    # c's process lives on as rank 1: its node has another slot, and holds what it held.
    assert (plan.resume.kind, plan.resume.step, plan.keep) == ("survivor", 3, (0, 1))
    (start,) = [e.body for e in cluster.labs["c"].log if e.kind == "start" and
                e.body.generation == 2]
    assert (start.ranks, start.keep) == ((1,), (1,))
    assert plan.reason.startswith("b: not heard of for longer")
    assert dict(plan.spent)["restarts"] == 1
    assert culprits(cluster) == {"node_lost": "b"}


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_a_node_that_is_lost_and_only_watched_ends_nobody_who_lives(grade: str) -> None:
    """Its agent may be what stands still: whoever trains on is not ended for it."""
    cluster = elastic(grade=grade, settings=Settings(single_node=False, act=()))
    cluster.dead.add("b")
    for step in range(40):
        for name in "ac":
            cluster.labs[name].all(step=4 + step, phase="forward_backward", step_time_s=0.5)
        cluster.run(1)
    assert culprits(cluster)["node_lost"] == "b"
    kinds = {e.kind for name in "ac" for e in cluster.labs[name].log[-200:]}
    assert not kinds & {"stop", "finish"} and cluster.plan().generation == 1


def test_a_world_grows_back_at_the_end_of_a_step_when_the_node_is_there_again() -> None:
    cluster = elastic()
    lose(cluster, "b")
    cluster.run(20)
    before, lab = cluster.plan().spent, cluster.labs["b"]
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=lab.boot_s)
    for name in "ac":
        cluster.labs[name].all(step=4, phase="forward_backward", step_time_s=0.5, parked=None,
                               state="running")
    cluster.dead.clear()
    cluster.run(20)
    plan = cluster.plan()
    assert plan.members == ("a", "c", "b")
    assert (plan.resume.kind, plan.resume.step, plan.keep) == ("survivor", 4, (0, 1))
    assert plan.spent == before  # it costs no restart
    assert (plan.generation, plan.attempt) == (3, 1)
    stops = [e.body for e in cluster.labs["c"].log if e.kind == "stop"]
    assert stops and stops[-1].park  # type: ignore[union-attr]
    assert culprits(cluster) == {"node_lost": "b", "world_grows": ""}


def test_a_spare_goes_before_a_smaller_world() -> None:
    cluster = elastic("abcd")
    lose(cluster, "b")
    cluster.run(20)
    assert cluster.plan().members == ("a", "d", "c")


def test_with_the_least_it_starts_only_when_no_more_come() -> None:
    cluster = Cluster("ab", 3, least=2)
    cluster.run(20)
    assert "run/r" not in cluster.docs
    cluster.run(15)
    assert cluster.plan().members == ("a", "b")


def test_a_run_that_cannot_start_whole_is_tried_elsewhere() -> None:
    cluster = Cluster("ab", 3, gang_limit_s=40.0)
    cluster.run(35)
    assert cluster.labs["a"].finishes() == cluster.labs["b"].finishes() == []
    cluster.run(40)
    assert "run/r" not in cluster.docs
    ends = [e.reason for lab in cluster.labs.values() for e in lab.log if e.kind == "finish"]
    assert cluster.labs["a"].finishes() == [75]
    assert ends[0] == "waiting for nodes: 2 of 3 can take ranks, for 40 s"


def test_a_lost_node_that_nobody_follows_ends_the_run_in_the_end() -> None:
    cluster = elastic("abc", 3, 3, gang_limit_s=60.0)
    cluster.dead.add("b")
    cluster.run(50)
    assert cluster.plan().finished == -1
    cluster.run(40)
    assert cluster.plan().finished == 75
    assert cluster.labs["a"].finishes() == cluster.labs["c"].finishes() == [75]


# ---------------------------------------------------------------- whose it is


def test_another_users_run_of_that_name_is_refused() -> None:
    cluster = Cluster("abc", 2, uid=1000)
    cluster.labs["c"].view = replace(cluster.labs["c"].view, uid=1001)
    cluster.run(8)
    assert cluster.plan().members == ("a", "b") and cluster.plan().owner == 1000
    assert cluster.plan().spares == ()
    assert cluster.labs["c"].finishes()[0] == 78 and cluster.plan().finished == -1
    said = next(e.reason for e in cluster.labs["c"].log if e.kind == "finish")
    assert said == "run r is user 1000's, and goes on: give yours another name with --run"


def test_a_name_is_free_when_its_run_is_over() -> None:
    cluster = Cluster("ab", 2, uid=1000)
    cluster.run(6)
    for name, rank in (("a", 0), ("b", 1)):
        cluster.labs[name].end(rank, Ended(0, 0, "done"))
    cluster.run(6)
    assert cluster.plan().finished == 0
    for lab in cluster.labs.values():
        lab.view = replace(lab.view, uid=1001, generation=0, state="idle", ranks=(),
                           registered_boot_s=lab.boot_s)
    cluster.run(8)
    assert (cluster.plan().owner, cluster.plan().finished, cluster.plan().generation) == (
        1001, -1, 2)
    assert cluster.plan().attempt == 2


# ---------------------------------------------------------------- what a leader plans from


def test_a_spare_that_leads_resumes_from_what_members_have() -> None:
    cluster = Cluster("abc", 1, checkpoint_dir="/ckpt")
    cluster.run(4)
    first = cluster.plan().members[0]
    cluster.labs[first].commit(7)
    cluster.run(2)
    beats = [b for b in cluster.labs[first].decision.beats if b.run == "r"]
    assert [c.step for c in beats[0].commits] == [7]
    for lab in cluster.labs.values():  # a shared folder, whose list the others had not made yet
        lab.view = replace(lab.view, checkpoint_dir="/ckpt")
    seen = members.known(cluster.labs["b"].view, tuple(
        replace(b, boot_s=cluster.labs["b"].boot_s) for b in beats),
        cluster.labs["b"].node._seen[0], cluster.labs["b"].settings,  # type: ignore[index]
        {})
    assert [c.step for c in seen.commits] == [7] and seen.checkpoint_dir == "/ckpt"


def test_two_leaders_never_open_incidents_of_one_id() -> None:
    cluster = started()
    cluster.labs["b"].kill(1)
    cluster.labs["a"].park(0, 3)
    cluster.run(6)
    ids = {one for lab in cluster.labs.values() for one in lab.incidents}
    assert ids == {f"r-g1-rank_killed-r1-1-{cluster.leader()}"}


# ---------------------------------------------------------------- reaching another node


def hurt(cluster: Cluster, **levels: object) -> tuple[str, int]:
    """The node and the rank of somebody who does not lead, whose levels change."""
    name = next(node for _, node in cluster.plan().ranks if node != cluster.leader())
    (rank,) = cluster.labs[name].view.ranks
    cluster.labs[name].change(rank.rank, **levels)
    return name, rank.rank


def orders(cluster: Cluster, kind: str) -> list[tuple[str, str]]:
    """Of the leader's last step, with the node that each is for."""
    return [(effect.subject, effect.body.node) for effect  # type: ignore[union-attr]
            in cluster.labs[cluster.leader()].decision.effects if effect.kind == kind]


def test_a_suspect_on_another_node_is_looked_at_and_stopped_there() -> None:
    cluster = started(names="ab", nnodes=2)
    name, rank = hurt(cluster, proc_state="T", beat_age_s=3.0, still_s=3.0)
    cluster.step(0.2)
    leader = cluster.labs[cluster.leader()]
    asked: list[tuple[str, str]] = []
    while not asked:
        cluster.step(0.2)
        asked = orders(cluster, "evidence")
        assert leader.boot_s < 200.0
    assert asked == [(f"run/r/rank/{rank}", name)]
    stopped: list[tuple[str, str]] = []
    while not stopped:
        cluster.step(0.2)
        stopped = orders(cluster, "stop")
        assert leader.boot_s < 200.0 and cluster.plan().generation == 1
    assert stopped == [(f"run/r/node/{name}", name)]
    cluster.step(0.2)
    assert cluster.labs[name].view.ranks[0].ended is not None  # long before anything is planned
    (one,) = [one for one in leader.decision.incidents if one.fault == "rank_stopped"]
    assert ("where", "train.py:12 in step") in one.evidence and name in one.culprit


@pytest.mark.parametrize("answers", [True, False])
def test_a_suspect_on_another_node_is_not_stopped_before_it_was_looked_at(answers: bool) -> None:
    """Of a rank that a signal has ended nobody can say where it stood.  A node that does not answer
    is waited for no longer than a second."""
    cluster = started(names="ab", nnodes=2)
    name, _ = hurt(cluster, proc_state="T", stopped_s=3.0, beat_age_s=3.0, still_s=3.0)
    other, leader = cluster.labs[name], cluster.labs[cluster.leader()]
    other.hold = {"evidence"}
    while not orders(cluster, "evidence"):
        cluster.step(0.1)
        assert leader.boot_s < 200.0
    asked_s, stopped = leader.boot_s, orders(cluster, "stop")
    while leader.boot_s < asked_s + 0.75:
        cluster.step(0.1)
        stopped += orders(cluster, "stop")
    assert stopped == []
    if answers:
        (effect,) = [one for one in leader.log if one.kind == "evidence"]
        other.hold = set()
        cluster._ask(leader, effect)
    for _ in range(1 if answers else 5):
        cluster.step(0.1)
        stopped += orders(cluster, "stop")
    assert [node for _, node in stopped if node] == [name]


def test_a_scripts_ranks_on_every_node_are_stopped_at_once() -> None:
    cluster = started(names="abc", nnodes=3, grade="script")
    leader = cluster.leader()
    cluster.labs[leader].raises(
        cluster.labs[leader].view.ranks[0].rank, "ValueError: bad sample")
    told: list[str] = []
    for _ in range(10):
        cluster.step(0.1)
        told += [node for _, node in orders(cluster, "stop") if node]
    assert sorted(told) == sorted({"a", "b", "c"} - {leader})  # each once


def test_a_node_that_does_not_answer_holds_nothing_up() -> None:
    cluster = started(names="abc", nnodes=2)
    name, _ = hurt(cluster, proc_state="T", beat_age_s=3.0, still_s=3.0)
    cluster.step(0.2)
    cluster.dead.add(name)
    cluster.run(30)
    assert cluster.plan().generation > 1 and name not in cluster.plan().members


def test_the_logs_of_a_dead_rank_are_read_where_it_was() -> None:
    cluster = started(names="ab", nnodes=2, logs=True)
    name = next(node for _, node in cluster.plan().ranks if node != cluster.leader())
    cluster.labs[name].raises(cluster.labs[name].view.ranks[0].rank, "ValueError: bad sample")
    for lab in cluster.labs.values():
        lab.hold = {*lab.hold, "logs"}
    told: list[tuple[str, str]] = []
    for _ in range(30):
        cluster.step(0.1)
        told += orders(cluster, "logs")
    assert told and {node for _, node in told} == {name}


# ---------------------------------------------------------------- a store that lost what it had


def anew(cluster: Cluster) -> None:
    """Every launcher comes again, under agents that remember the run's last life."""
    for lab in cluster.labs.values():
        lab.restart_agent()
        lab.view = replace(lab.view, generation=0, state="idle", ranks=(),
                           registered_boot_s=lab.boot_s)
    cluster.heard.clear()


def test_a_store_that_lost_all_is_taken_as_it_is_and_no_generation_comes_twice() -> None:
    """A leader's write is refused, for it compares with a version that the store never had; and
    whoever only reads sees versions that he passed long ago."""
    cluster = started(names="ab", grade="script")
    for _ in range(3):
        victim = cluster.labs[cluster.leader()]
        victim.raises(victim.view.ranks[0].rank, "RuntimeError: NCCL error")
        cluster.run(12)
    before = cluster.plan()
    assert before.generation > 1
    cluster.docs.clear()
    cluster.leases.clear()
    anew(cluster)
    cluster.run(5)
    assert cluster.plan().generation == before.generation + 1
    assert [lab.view.generation for lab in cluster.labs.values()] == [before.generation + 1] * 2


def test_a_view_of_the_store_that_is_merely_late_changes_nothing() -> None:
    cluster = started(names="ab")
    lab = cluster.labs[cluster.leader()]
    old = dict(cluster.docs)
    known = lab.node.cases["r"].state.document
    lab.docs = {key: doc for key, doc in old.items() if not key.startswith("run/")}
    lab.step()
    assert lab.node.cases["r"].state.document == known


# ---------------------------------------------------------------- a store on one node


def first_run(grade: str, **view: object) -> Cluster:
    settings = Settings(single_node=False, store_node="a:29400", gang_limit_s=30.0)
    cluster = Cluster("ab", 2, grade=grade, settings=settings, **view)  # type: ignore[arg-type]
    cluster.run(6)
    assert cluster.plan().generation == 1
    return cluster


def without_store(cluster: Cluster) -> Lab:
    cluster.dead.add("a")
    cluster.labs["b"].store_up = False
    return cluster.labs["b"]


def test_who_stands_still_without_the_node_that_has_the_store_ends_with_75() -> None:
    cluster = first_run("script")
    lab = without_store(cluster)
    lab.end(1, Ended(137, 9, by_us=True, boot_s=lab.boot_s))  # by its permit
    cluster.run(28)
    assert lab.finishes() == []
    cluster.run(6)
    assert lab.finishes() == [75]
    assert "--rdzv-endpoint a:29400" in lab.log[-1].body.reason  # type: ignore[union-attr]


def test_whoever_goes_on_without_that_node_is_left_alone_and_the_store_may_come_back() -> None:
    cluster = first_run("script")
    lab = without_store(cluster)
    cluster.run(100)
    assert lab.finishes() == []
    lab.end(1, Ended(137, 9, by_us=True, boot_s=lab.boot_s))
    cluster.run(25)
    lab.store_up = True
    cluster.run(2)
    lab.store_up = False
    cluster.run(25)
    assert lab.finishes() == []


def test_a_trainers_rank_that_makes_no_step_is_not_waited_for() -> None:
    cluster = first_run("trainer")
    lab = without_store(cluster)
    lab.change(1, still_s=1.0)
    cluster.run(40)
    assert lab.finishes() == []
    lab.change(1, still_s=31.0)
    cluster.run(40)
    assert lab.finishes() == [75]


def test_a_store_of_three_members_is_waited_for() -> None:
    cluster = first_run("script")
    for one in cluster.labs.values():
        one.node.configure(replace(one.settings, store_node=""), {})
    lab = without_store(cluster)
    lab.end(1, Ended(137, 9, by_us=True, boot_s=lab.boot_s))
    cluster.run(100)
    assert lab.finishes() == []
