"""The whole run as any of its agents knows it, with the age of each node's word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from holdfast.agent.cli import report
from holdfast.agent.core.model import (
    Beat,
    Commit,
    Decision,
    Doc,
    Documents,
    Lease,
    Now,
    Observed,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
    StoreView,
    node_subject,
)
from holdfast.agent.web import fleet, status

PLAN = Plan("r", 2, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test", spares=("c", "d"))


def rank(number: int, node: str, step: int = 5) -> RankView:
    return RankView(number, node, 100 + number, 2, "running", step=step)


def seen(*beats: Beat, single: bool = False, docs: Documents | None = None) -> Any:
    store = StoreView(True, leases=(Lease("r", "b"),), docs=docs or Documents())
    snapshot = SimpleNamespace(
        now=Now(100.0, 0.0), observed=Observed(beats=beats, store=store),
        decision=Decision(plans=(PLAN,)))
    config = SimpleNamespace(core_settings=lambda: SimpleNamespace(single_node=single))
    return SimpleNamespace(name="a", snapshot=snapshot, config=config)


VIEW = RunView("r", "a", "trainer", 1, 2, ranks=(rank(0, "a"),))


def test_every_node_of_the_run_has_a_row_and_its_word_an_age() -> None:
    state = seen(Beat("b", "r", 2, 97.5, (rank(1, "b", 7),)), Beat("c", "r", 0, 99.0, lost=True),
                 Beat("z", "another", 1, 99.0))
    rows = fleet.nodes(state, VIEW)
    told = [(row["node"], row["part"], row["word"], row["age_s"], row["leads"]) for row in rows]
    assert told == [
        ("a", "ranks 0", "here", 0.0, False), ("b", "ranks 1", "heard", 2.5, True),
        ("c", "spare", "lost", 1.0, False), ("d", "spare", "not heard of", None, False)]
    assert fleet.trains(rows, PLAN)
    lines = ["".join(str(cell) for cell in line) for line in report._nodes(rows)]
    assert any("ranks 1" in line and "leads" in line and "heard, 2.5 s ago" in line
               for line in lines), lines
    assert any("not heard of" in line for line in lines)


def test_a_leader_that_a_plan_names_for_its_permits_is_no_spare_while_it_is_excluded() -> None:
    for body, part in ((b'{"excluded":true}', "excluded"), (b'{"excluded":false}', "spare")):
        docs = Documents((Doc(node_subject("c"), 1, body),))
        parts = {row["node"]: row["part"] for row in fleet.nodes(seen(docs=docs), VIEW)}
        assert (parts["c"], parts["d"]) == (part, "spare")


def test_a_checkpoint_that_rank_0_s_node_alone_heard_of_is_shown_on_every_node() -> None:
    plan = replace(PLAN, ranks=((0, "b"), (1, "a")), checkpoint_dir="/c")
    old, new, unread = (Commit(1, step, f"/c/{step}", 2, verified=step < 30)
                        for step in (10, 20, 30))
    beat = Beat("b", "r", 2, 99.0, commits=(new, unread), checkpoint_dir="/c")
    for told, step, unread_step in (
            (beat, 20, 30), (replace(beat, boot_s=1.0), 10, -1),
            (replace(beat, commits=()), 10, -1),
            (replace(beat, checkpoint_dir="/d"), 10, -1), (replace(beat, node="c"), 10, -1)):
        state = seen(told)
        state.snapshot.decision = Decision(plans=(plan,))
        state.config = SimpleNamespace(core_settings=lambda: Settings(single_node=False))
        state.checkpoints = SimpleNamespace(age_s=lambda _, commit: 100.0 - commit.step)
        view = replace(VIEW, commits=(old,), checkpoint_dir="/c", generation=2)
        found = status.checkpoint(state, view)
        assert found == {"step": step, "age_s": 100.0 - step, "path": f"/c/{step}",
                         "unread_step": unread_step}
        assert (old in status._commits(state, view)) == (step == 10), "it may be deleted by now"


def test_a_run_does_not_train_while_a_node_of_it_is_lost_or_behind() -> None:
    for beat in (Beat("b", "r", 2, 99.0, (rank(1, "b"),), lost=True),
                 Beat("b", "r", 1, 99.0, (RankView(1, "b", 7, 1, "running"),)),
                 Beat("b", "r", 2, 99.0, (RankView(1, "b", 7, 2, "parked"),))):
        assert not fleet.trains(fleet.nodes(seen(beat), VIEW), PLAN)


def test_a_node_whose_launcher_and_ranks_are_stopped_is_told_as_suspended() -> None:
    stopped = replace(rank(1, "b"), proc_state="T")
    for there, word in ((stopped, "suspended"), (rank(1, "b"), "heard")):
        rows = fleet.nodes(seen(Beat("b", "r", 2, 99.0, (there,), suspended=True)), VIEW)
        assert [row["word"] for row in rows][:2] == ["here", word]
        assert fleet.trains(rows, PLAN) == (word == "heard")
    rows = fleet.nodes(seen(Beat("b", "r", 2, 99.0, (stopped,))), VIEW)
    assert rows[1]["word"] == "heard", "its launcher answers for it"


def test_a_run_of_one_node_has_no_such_rows() -> None:
    assert fleet.nodes(seen(single=True), VIEW) == []
