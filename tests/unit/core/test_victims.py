"""Ends that are only consequences: evidence, and nobody's blame."""

from __future__ import annotations

from holdfast.agent.core.detect.ranks import ended
from holdfast.agent.core.model import Parked

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


def test_who_lost_a_connection_of_its_own_is_named_where_nobody_else_ended() -> None:
    """Torch raises no such type: it was a pipe to a child, or a connection to a server."""
    for error in ("BrokenPipeError: [Errno 32] Broken pipe",
                  "ConnectionRefusedError: [Errno 111] Connection refused"):
        lab = Lab(grade="script", nproc=3)
        lab.begin()
        lab.train(3)
        lab.raises(0, "RuntimeError: [pair.cc:553] Connection closed by peer")
        lab.raises(1, error, after_s=0.1)
        lab.step()
        assert not lab.decision.verdicts, "another end may yet explain both"
        lab.step(0.6)
        verdict = lab.decision.verdicts[0]
        assert (verdict.subject, verdict.confidence) == ("run/r/rank/1", 0.8)
        assert error in verdict.reason and "rank 1" in verdict.reason


def test_who_lost_a_connection_long_after_the_first_end_is_not_named() -> None:
    lab = Lab(grade="script", nproc=2)
    lab.begin()
    lab.train(3)
    lab.raises(0, "RuntimeError: [pair.cc:553] Connection closed by peer")
    lab.raises(1, "BrokenPipeError: [Errno 32] Broken pipe", after_s=ended.CASCADE_S + 1.0)
    lab.step()
    assert lab.decision.verdicts[0].subject == "run/r"


def test_a_lost_connection_is_a_consequence_where_another_rank_was_killed() -> None:
    lab = Lab(grade="script", nproc=2)
    lab.begin()
    lab.raises(0, "ConnectionResetError: [Errno 104] Connection reset by peer")
    lab.kill(1)
    lab.step()
    assert lab.decision.verdicts[0].subject == "run/r/rank/1"


def test_an_end_on_its_own_account_after_a_consequence_is_still_named() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.raises(0, "RuntimeError: Connection reset by peer")
    lab.raises(1, "ValueError: no", after_s=0.2)
    lab.step()
    assert lab.decision.verdicts[0].subject == "run/r/rank/1"
    assert lab.decision.verdicts[0].confidence == 1.0


def test_what_broke_a_collective_is_said_alike_in_each_generation() -> None:
    """By who saw it: who was told to leave has no word of it, and a port is another each time."""
    counted = []
    for port in (44930, 922):
        lab = Lab(nproc=3)
        lab.begin()
        lab.train(5)
        for rank, reason in enumerate((
            f"generation_over: generation {port} is over", "generation_over: generation is over",
            "peer_lost: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
            f"[10.0.0.3]:{port}",
        )):
            lab.change(rank, state="parked", parked=Parked(5, False, reason))
        lab.settle()
        (verdict,) = {one.reason: one for one in lab.decision.incidents}
        assert verdict.endswith(f"Connection closed by peer [10.0.0.3]:{port})"), verdict
        counted += [key for key, _ in lab.plan().spent if key.startswith("signature/")]
    assert counted == 2 * ["signature/rank_hung/5/peer_lost: [/gloo/transport/tcp/pair.cc:553] "
                           "Connection closed by peer [10.0.0.3]"]
