"""Edges that a changed comparison would move: which state is newer, who may delete, which end
stands.  Each was found by a mutant that nothing noticed."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Commit, Plan, Resume, RunView, SnapshotView
from holdfast.agent.core.run import plan, reconcile
from holdfast.agent.core.run.stage import check_invariants
from holdfast.agent.core.run.state import Ending, RunState

PLAN = Plan("r", 2, ("a",), ((0, "a"),), Resume("fresh"), "x")


@pytest.mark.parametrize(("in_memory", "kind"), [(30, "snapshot"), (20, "disk"), (10, "disk")])
def test_a_snapshot_counts_only_where_it_is_newer_than_the_disk(in_memory: int, kind: str) -> None:
    view = plan.PlanView(
        "r", "trainer", True, 2, 1, "x", (), current=PLAN, commits=(Commit(2, 20, "c"),),
        snapshots=(("a", SnapshotView(2, in_memory, 1)),))
    resume, kept = plan.resume_from(view, dict(PLAN.ranks))
    assert (resume.kind, resume.step, kept) == (kind, max(in_memory, 20), ())


@pytest.mark.parametrize(("generation", "may"), [(1, True), (2, True), (3, False)])
def test_commits_of_older_generations_do_not_keep_a_leader_from_deleting(
    generation: int, may: bool
) -> None:
    view = RunView("r", "a", "trainer", 1, generation=2, state="running")
    commits = (Commit(generation, 5, "c"),)
    assert reconcile.may_delete(PLAN, view, commits, True) is may
    assert not reconcile.may_delete(PLAN, view, commits, False)


@pytest.mark.parametrize(("generation", "may"), [(0, True), (1, True), (2, True), (3, False)])
def test_a_spare_that_leads_deletes_though_nothing_runs_on_it(generation: int, may: bool) -> None:
    view = RunView("r", "z", "trainer", 1, generation=generation, state="idle")
    assert reconcile.may_delete(PLAN, view, (Commit(2, 5, "c"),), True) is may


def test_an_end_that_was_decided_stands() -> None:
    before, after = RunState("r", ending=Ending(3, "one")), RunState("r", ending=Ending(0, "other"))
    assert "the end was decided twice" in check_invariants(after, before)
    assert "the end was decided twice" not in check_invariants(before, before)
    assert "the end was decided twice" not in check_invariants(after, RunState("r"))
