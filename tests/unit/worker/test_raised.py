"""Ranks of a trainer whose own code raised: told as ended, and alive; real processes and pages."""

from __future__ import annotations

import os
import signal

from waiting import wait_for

from holdfast.worker.launcher import levels
from holdfast.worker.launcher.process import StartCommand
from holdfast.worker.rank import outcome


def raises(trainer, process, error):
    outcome.write_page(process.fields, "exception", 1)
    trainer.ranks.on_packet(process, {
        "t": "parked", "generation": 1, "step": 4, "torn": False, "reason": "raised: x",
        "error": error})


def test_who_raised_is_told_as_ended_and_lives_on(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    raises(trainer, first, "ValueError: at\n  s3://me:secret@bucket/" + "x" * 999)
    trainer.ranks.on_packet(second, {"t": "parked", "generation": 1, "step": 4, "torn": False,
                                     "reason": "peer_lost: x"})
    told = levels.levels_of(trainer.state, trainer.ranks, "", None)["ranks"]
    assert [(one["state"], one["pid"]) for one in told] == [
        ("parked", first.child.pid), ("parked", second.child.pid)]
    ended = told[0]["ended"]
    assert (ended["code"], ended["signal"], ended["outcome"], ended["by_us"]) == (
        1, 0, "exception", False)
    assert ended["error"].startswith("ValueError: at s3://") and "secret" not in ended["error"]
    assert len(ended["error"]) <= 510 and told[1]["ended"] is None
    assert trainer.ranks.level() == "running"
    trainer.ranks.begin(StartCommand(2, (0, 1), (0, 1), 2, {"kind": "fresh"}, [], 0))
    assert (first.generation, first.raised, first.over, first.state) == (2, None, None, "running")
    os.kill(first.child.pid, signal.SIGKILL)
    wait_for(trainer.ranks.reap)
    assert (first.ended["outcome"], first.ended["signal"], first.ended["error"]) == ("", 9, "")


def test_the_end_of_a_run_still_tells_who_raised(trainer):
    """Its process is ended with all others then, which is nobody's failure."""
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    raises(trainer, first, "NameError: x")
    raised = dict(first.raised)
    trainer.ranks.end_all()
    assert first.ended == raised and not first.ended["by_us"] and second.ended["by_us"]


def test_who_raised_and_is_killed_then_ended_by_what_it_raised(trainer):
    first = trainer.ranks.by_rank()[0]
    raises(trainer, first, "ValueError: x")
    os.kill(first.child.pid, signal.SIGKILL)
    wait_for(trainer.ranks.reap)
    assert (first.state, first.over["outcome"], first.over["error"]) == (
        "ended", "exception", "ValueError: x")
