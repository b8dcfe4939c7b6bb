"""A run whose checkpoints are all put aside does not begin anew by itself, and one that some rank
cannot read is not put aside."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Commit, Ended, Parked, Plan, Resume
from holdfast.agent.core.node import Node
from holdfast.agent.core.run import plan as planning
from holdfast.agent.core.run.layout import Member

from .driver import Lab, replace

UNREAD = "restore_failed: step-10.gen-1: rank 1 on a: COMMIT: cannot be read: Stale file handle"


def refused(lab: Lab, path: str) -> None:
    """Every rank says that these bytes are bad, and rank 0 has put them aside."""
    commits = tuple(replace(one, bad="digest") if one.path == path else one
                    for one in lab.view.commits)
    lab.view = replace(lab.view, commits=commits)
    parked(lab, f"bad_checkpoint: {path}: digest")


def parked(lab: Lab, reason: str) -> None:
    for rank in (0, 1):
        lab.change(rank, state="parked", parked=Parked(0, True, reason))
    lab.settle()


def over(lab: Lab) -> str:
    """Why the run ended."""
    return next(str(getattr(one.body, "reason", "")) for one in lab.log if one.kind == "finish")


def submitted_again(lab: Lab, folder: str = "") -> Lab:
    """The same name once more, by an agent that remembers nothing but the document."""
    again = Lab(checkpoint_dir=folder)
    again.docs, again.boot_s = lab.docs, lab.boot_s + 60.0
    return again


def begun(*steps: int) -> Lab:
    lab = Lab()
    for step in steps:
        lab.commit(step, generation=1)
    lab.begin()
    return lab


def test_a_run_whose_checkpoints_were_all_put_aside_ends_and_says_so() -> None:
    lab = begun(5, 10)
    refused(lab, "step-10.gen-1")
    assert lab.plan().resume.path == "step-5.gen-1" and lab.finishes() == []
    refused(lab, "step-5.gen-1")
    assert lab.finishes() == [76] and lab.plan().finished == 76
    said = over(lab)
    assert "step-10.gen-1" in said and "step-5.gen-1" in said and "checkpoint.dir" in said
    assert [one.resume.kind for one in lab.starts()] == ["disk", "disk"]


def test_it_does_not_begin_anew_when_it_is_submitted_again_either() -> None:
    lab = begun(10)
    for rank in (0, 1):
        lab.end(rank, Ended(1, 0, "bad_checkpoint", "step-10.gen-1: digest", boot_s=100.0))
    lab.settle()
    assert lab.finishes() == [76]
    again = submitted_again(lab)
    again.settle()
    assert again.finishes() == [76] and again.starts() == []
    assert "step-10.gen-1" in over(again)


def test_nor_where_the_run_had_begun_at_step_0_itself() -> None:
    """Its first checkpoint was found bad when it was read back, and then all ranks were lost."""
    lab = Lab()
    lab.begin()
    lab.train(7)
    lab.commit(5, bad="digest")
    for rank in (0, 1):
        lab.kill(rank)
    lab.settle()
    assert lab.finishes() == [76] and (lab.plan().peak, lab.plan().finished) == (7, 76)
    again = submitted_again(lab)
    again.settle()
    assert again.finishes() == [76] and again.starts() == []


def test_another_folder_is_begun_in_at_once() -> None:
    """So does who was told to name one: nothing in it was put aside."""
    lab = begun(10)
    refused(lab, "step-10.gen-1")
    again = submitted_again(lab, "/other")
    again.begin()
    assert [one.resume.kind for one in again.starts()] == ["fresh"] and again.finishes() == []


def test_a_run_that_never_had_a_checkpoint_begins_at_step_0_again() -> None:
    lab = Lab()
    lab.begin()
    lab.train(3)
    for rank in (0, 1):
        lab.kill(rank)
    lab.settle()
    assert lab.plan().resume.kind == "fresh" and lab.finishes() == []


def view(**fields: object) -> planning.PlanView:
    seen = planning.PlanView(
        "r", "trainer", True, 3, 1, "x", (Member("a", fresh=True),), checkpoint_dir="/c",
        quarantined=("/c/step-10.gen-1",), peak=12)
    return replace(seen, **fields)


@pytest.mark.parametrize(("fields", "kind"), [
    ({}, ""), ({"peak": 0}, "fresh"), ({"quarantined": ()}, "fresh"),
    ({"quarantined": ("/b/step-10.gen-1",)}, "fresh"),  # another folder's
    ({"commits": (Commit(1, 5, "/c/step-5.gen-1"),)}, "disk"),
    ({"commits": (Commit(1, 5, "/c/step-5.gen-1", bad="digest"),)}, ""),
    # Wrong from step 4 on: what is there is void, and not put aside.
    ({"commits": (Commit(1, 5, "/c/step-5.gen-1"),), "bad_from": 4}, "fresh"),
    ({"grade": "script"}, "fresh"), ({"grade": "opaque"}, "fresh"),
    ({"peak": 0, "current": Plan("r", 2, ("a",), ((0, "a"),), Resume("disk", 10), "x", peak=10)},
     ""),
])
def test_where_a_run_begins_anew(fields: dict[str, object], kind: str) -> None:
    made, why = planning.plan_run(view(**fields))
    assert (made.resume.kind if made else "") == kind, why
    assert made is not None or why.startswith(planning.NOTHING_LEFT) and "/c/step-10.gen-1" in why


def test_no_more_are_named_than_a_person_reads() -> None:
    paths = tuple(f"/c/step-{step}.gen-1" for step in range(9))
    _, why = planning.plan_run(view(quarantined=paths))
    assert why.count("step-") == 3 and "6 more" in why and paths[-1] in why


def test_what_a_rank_cannot_read_is_tried_again_and_then_ends_the_run_with_the_reason() -> None:
    lab = begun(10)
    for again in (1, 2):
        parked(lab, UNREAD)
        assert lab.plan().resume.path == "step-10.gen-1" and lab.plan().quarantined == (), again
        assert lab.finishes() == []
    parked(lab, UNREAD)
    assert lab.finishes() == [76] and UNREAD in over(lab) and lab.plan().quarantined == ()
    again = submitted_again(lab)  # its mount is back
    again.commit(10, generation=1)
    again.begin()
    assert again.plan().resume.path == "step-10.gen-1"


def test_an_older_one_is_tried_where_the_newest_could_not_be_read_twice() -> None:
    lab = begun(5, 10)
    parked(lab, UNREAD)
    assert lab.plan().resume.path == "step-10.gen-1"
    parked(lab, UNREAD)
    assert lab.plan().resume.path == "step-5.gen-1" and lab.plan().quarantined == ()
    older = UNREAD.replace("step-10", "step-5")
    parked(lab, older)
    assert lab.plan().resume.path == "step-5.gen-1", "only one is given up for it"
    parked(lab, older)
    assert lab.finishes() == [76] and "Stale file handle" in over(lab)


def test_an_agent_that_forgot_tries_it_again_as_well() -> None:
    lab = begun(5, 10)
    parked(lab, UNREAD)
    lab.node = Node("a", lab.settings, lab.runbooks)
    parked(lab, UNREAD)
    assert lab.plan().resume.path == "step-5.gen-1" and lab.finishes() == []
