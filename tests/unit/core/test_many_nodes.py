"""Many nodes: what they tell each other, and what a leader makes of it."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import Beat, Doc, Documents, Ended, RankView, StoreView
from holdfast.agent.core.run import members

from .driver import Cluster

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
    moved = members.here(rank, beat)
    assert moved.ended is not None and (moved.ended.boot_s, moved.start_boot_s) == (47.0, -953.0)
    assert members.here(rank, replace(beat, sent_boot_s=0.0)) is rank


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
    from .driver import Lab

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
