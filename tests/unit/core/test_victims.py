"""Ends that are only consequences: evidence, and nobody's blame."""

from __future__ import annotations

from .driver import Lab


def test_when_only_consequences_ended_nobody_is_named() -> None:
    for grade in ("script", "trainer"):
        lab = Lab(grade=grade, nproc=3)
        lab.begin()
        lab.train(3)
        lab.raises(0, "RuntimeError: Connection reset by peer", code=3)
        lab.raises(2, "RuntimeError: Broken pipe", after_s=0.1)
        lab.step()
        asked = lab.kinds(lab.step(0.6))  # nobody's end explains it
        # A trainer's survivor is about to park with its state: it is not stopped for that.
        assert ("stop" in asked) == (grade == "script")
        verdict = lab.decision.verdicts[0]
        assert (verdict.fault, verdict.subject, verdict.confidence) == ("rank_exited", "run/r", 0.5)
        assert verdict.reason == (
            "culprit unknown: rank 0 and 1 more ended because a peer went away "
            "(RuntimeError: Connection reset by peer)"
        )
        assert ("first victim", "rank 0 (pid 1001) on a") in verdict.evidence
        assert lab.decision.incidents[0].culprit == "culprit unknown"
        if grade == "trainer":
            lab.park(1, 3)
        lab.settle()
        start = lab.starts()[-1]
        assert start.generation == 2
        assert start.resume.kind == ("survivor" if grade == "trainer" else "own")


def test_an_end_on_its_own_account_after_a_consequence_is_still_named() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.raises(0, "RuntimeError: Connection reset by peer")
    lab.raises(1, "ValueError: no", after_s=0.2)
    lab.step()
    assert lab.decision.verdicts[0].subject == "run/r/rank/1"
    assert lab.decision.verdicts[0].confidence == 1.0
