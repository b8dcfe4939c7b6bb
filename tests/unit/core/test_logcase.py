"""A death or a suspicion has the ranks' logs read, once; the answer joins its incident."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from holdfast.agent.core.detect.ranks import live_logs
from holdfast.agent.core.model import Effect, EffectOutcome, Ended, Incident, Request, TakeEvidence

from .driver import Lab, replace

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ROOT = {
    "signature": "cuda_ecc", "culprit": "infra", "rank": 0, "line": ECC, "retryable": "elsewhere",
    "weak": False, "path": "/l/rank-0/stderr.log", "offset": 12,
}
SAID: dict[str, Any] = {"root": ROOT, "blames": "node", "note": "The memory is bad.", "others": [
    {"signature": "nccl_remote_error", "role": "cascade", "ranks": [1, 2]}]}
TEXT = f"cuda_ecc on rank 0 (infra): {ECC}"


class Reading(Lab):
    """A lab whose launcher can read logs; its child answers when the test says so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(logs=True, **options)
        self.hold = {"logs"}

    def wanted(self) -> list[Effect]:
        return [one for one in self.log if one.kind == "logs"]

    def answer(self, said: object = SAID, ok: bool = True, error: str = "") -> None:
        detail = said if isinstance(said, str) else json.dumps(said)
        self.outcomes.append(EffectOutcome(self.wanted()[-1].id, ok, error, detail))

    def incident(self) -> Incident:
        """The newest that a step showed."""
        return self.decision.incidents[-1]


def training(**options: Any) -> Reading:
    lab = Reading(**options)
    lab.begin()
    lab.train(3)
    return lab


def test_a_death_is_asked_about_once_when_the_others_had_their_word() -> None:
    lab = training()
    lab.hold = {"logs", "start"}
    lab.kill(1)
    lab.step(0.01)
    assert lab.wanted() == []
    lab.step(0.31)
    lab.step(0.31)
    assert [(one.body.generation, one.body.rank) for one in lab.wanted()  # type: ignore[union-attr]
            ] == [(1, -1)]
    assert isinstance(lab.wanted()[0].body, TakeEvidence)
    for _ in range(5):
        lab.step(1.0)
    assert len(lab.wanted()) == 1


def test_a_generation_that_is_gone_is_asked_about_at_once() -> None:
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    assert lab.view.generation == 2
    assert [one.body.generation for one in lab.wanted()] == [1]  # type: ignore[union-attr]


def test_the_root_is_the_first_row_and_a_verdict_while_the_incident_is_open() -> None:
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    lab.answer()
    lab.step(0.1)
    seen = lab.incident()
    assert seen.fault == "rank_killed" and seen.evidence[0] == ("root", TEXT)
    assert seen.timeline[-1][1] == f"root: {TEXT}"
    verdict = next(one for one in lab.decision.verdicts if one.detector == "logs")
    assert (verdict.fault, verdict.subject, verdict.act) == ("log_root_cause", "run/r/logs", False)
    assert verdict.reason == f"root: {TEXT}" and verdict.generation == 1
    assert ("also there", "nccl_remote_error (cascade) on ranks 1, 2") in verdict.evidence
    lab.train(6)
    assert [one for one in lab.decision.verdicts if one.detector == "logs"] == []


@pytest.mark.parametrize("waits_s", [0.0, 25.0])
def test_a_late_answer_joins_the_incident_that_closed(waits_s: float) -> None:
    """As late as a launcher gives its child on a machine that is short of processors."""
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    lab.train(6)
    assert lab.decision.incidents == ()
    lab.train(6 + round(waits_s), seconds=1.0)
    lab.answer()
    lab.step(0.1)
    seen = lab.incident()
    assert seen.state == "closed" and seen.evidence[0] == ("root", TEXT)
    lab.step(0.1)
    assert lab.decision.incidents == ()


@pytest.mark.parametrize(
    ("said", "ok", "error", "row"),
    [
        ({"hint": "look at 10.0.0.7\x1b[2J"}, True, "",
         ("logs", "no root: look at 10.0.0.7 [2J")),
        ("{", True, "", ("logs not read", "the answer makes no sense")),
        ('{"root": 3}', True, "", ("logs not read", "the answer makes no sense")),
        ("", False, "took too long", ("logs not read", "took too long")),
    ],
)
def test_an_answer_without_a_root_is_said_and_is_no_verdict(
    said: object, ok: bool, error: str, row: tuple[str, str]
) -> None:
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    lab.answer(said, ok, error)
    lab.step(0.1)
    assert lab.incident().evidence[0] == row
    assert [one for one in lab.decision.verdicts if one.detector == "logs"] == []


def test_what_the_logs_say_changes_nothing_that_is_done() -> None:
    """The same death, with the worst that a log can say and with nothing: the same effects."""
    found = []
    for said in (SAID, {}):
        lab = training()
        lab.raises(1, "ValueError: bad row")
        lab.park(0, 3)
        lab.settle()
        lab.answer(said)
        lab.step(0.1)
        lab.train(8)
        kept = [one for one in lab.log if one.kind != "logs"]
        found.append([(one.kind, one.subject, one.reason) for one in kept])
    assert found[0] == found[1]


def story(seed: int, logs: bool) -> list[tuple[str, str, str]]:
    """What is done in a random hour of a run, with a child that reads logs or without."""
    dice = random.Random(seed)
    lab = Lab(logs=logs, grade=dice.choice(("trainer", "script")), max_restarts=2)
    lab.hold = {"logs"} if seed % 2 else set()  # a child that never answers, or at once
    lab.begin()
    for _ in range(60):
        rank, what = dice.randrange(2), dice.random()
        live = [r for r in lab.view.ranks if r.ended is None]
        if what < 0.1 and lab.rank(rank) in live:
            lab.kill(rank)
        elif what < 0.15 and lab.rank(rank) in live:
            lab.raises(rank, "ValueError: x")
        elif what < 0.3 and len(live) == 2:
            lab.all(still_s=dice.choice((0.0, 6.0, 90.0)), phase="collective")
        elif what < 0.7 and len(live) == 2:
            lab.all(step=lab.rank(0).step + 1, still_s=0.0, phase="forward_backward")
        lab.step(dice.choice((0.05, 0.3, 1.0)))
    for _ in range(36):  # longer than an end waits for an answer
        lab.step(0.5)
    return [(e.kind, e.subject, e.reason) for e in lab.log if e.kind != "logs"]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_same_is_done_with_logs_and_without(seed: int) -> None:
    assert story(seed, logs=True) == story(seed, logs=False)


def test_the_last_end_waits_for_the_root_but_not_for_ever() -> None:
    for answered in (True, False):
        lab = training(max_restarts=0)
        lab.raises(1, "ValueError: bad row", code=3)
        for _ in range(8):
            lab.step(0.1)
        assert len(lab.wanted()) == 1 and lab.finishes() == []
        if answered:
            lab.answer()
            lab.step(0.1)
            rows = [one.evidence[0] for one in lab.decision.incidents if one.fault == "rank_exited"]
            assert rows == [("root", TEXT)]
        else:
            for _ in range(18):  # on a busy machine a child that began then took more than 3 s
                lab.step(0.5)
            assert lab.finishes() == []
            for _ in range(12):
                lab.step(0.5)
        assert lab.finishes() == [3]


def test_a_good_end_and_an_operators_restart_ask_nothing() -> None:
    lab = training()
    lab.requests = (Request("q", "restart_ranks", "run/r/rank/1", "please", "r"),)
    for _ in range(10):
        lab.step(0.3)
    assert lab.view.generation == 2
    lab.train(6)
    for rank in (0, 1):
        lab.end(rank, Ended(0, 0, "done", boot_s=lab.boot_s))
    lab.settle()
    assert lab.finishes() == [0] and lab.wanted() == []


def test_a_good_end_and_an_interrupt_wait_for_no_answer() -> None:
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    assert len(lab.wanted()) == 1
    lab.train(4)
    for rank in (0, 1):
        lab.end(rank, Ended(0, 0, "done", boot_s=lab.boot_s))
    lab.settle()
    assert lab.finishes() == [0]
    lab = training(max_restarts=0)
    lab.kill(1)
    lab.step(0.01)
    lab.view = replace(lab.view, shutdown="interrupted")
    lab.kill(0)
    lab.settle()
    assert len(lab.finishes()) == 1


def test_a_launcher_that_reads_no_logs_is_not_asked() -> None:
    lab = Lab(max_restarts=0)
    lab.begin()
    lab.train(3)
    lab.kill(1)
    lab.settle()
    assert [one for one in lab.log if one.kind == "logs"] == []


def test_a_suspicion_is_looked_into_every_half_minute_at_most() -> None:
    lab = training()
    asked = []
    for second in range(120):
        still = second % 12 < 6
        lab.all(still_s=(second % 12) + 5.0 if still else 0.0, phase="collective", active=True)
        if not still:
            lab.all(step=lab.rank(0).step + 1)
        lab.step(1.0)
        if lab.wanted() and (not asked or lab.wanted()[-1].id != asked[-1][1]):
            asked.append((lab.boot_s, lab.wanted()[-1].id))
            lab.answer()
    times = [at for at, _ in asked]
    assert len(times) >= 2, lab.decision
    assert all(b - a >= 29.0 for a, b in zip(times, times[1:], strict=False)), times


def test_a_suspicion_of_the_boot_before_keeps_none_of_this_one_waiting() -> None:
    lab = training()
    state = lab.node.cases["r"].state
    state.logs = replace(state.logs, suspected_boot_s=1e6)  # by another boot's clock
    lab.all(still_s=6.0, phase="collective", active=True)
    lab.step(1.0)
    lab.step(1.0)
    assert state.incidents.suspicion and state.cause is None and len(lab.wanted()) == 1


def test_an_agent_that_began_anew_asks_again() -> None:
    lab = training(max_restarts=0)
    lab.kill(1)
    lab.step(0.01)
    lab.step(0.31)
    assert len(lab.wanted()) == 1
    lab.answer()
    lab.restart_agent()
    lab.step(0.1)
    assert len({one.id for one in lab.wanted()}) == 2
    lab.answer()
    lab.step(0.1)
    assert [one.evidence[0] for one in lab.decision.incidents if one.fault == "rank_killed"
            ] == [("root", TEXT)]
    for _ in range(3):
        lab.step(0.1)
    assert len(lab.finishes()) == 1 and len(lab.wanted()) == 2


def test_a_question_that_is_too_old_is_given_up() -> None:
    lab = training()
    lab.hold = {"logs", "start"}
    lab.kill(1)
    lab.step(0.01)
    lab.view = replace(lab.view, logs=False)
    for _ in range(20):
        lab.step(1.0)
    lab.view = replace(lab.view, logs=True)
    lab.step(1.0)
    assert lab.wanted() == [] and lab.node.cases["r"].state.logs.asked is None


def test_a_reading_that_failed_is_not_repeated() -> None:
    lab = training()
    lab.kill(1)
    lab.park(0, 3)
    lab.settle()
    for _ in range(40):
        lab.answer(ok=False, error="busy")
        lab.step(1.0)
    assert len(lab.wanted()) == 1


def test_a_log_cannot_move_the_cursor_or_fill_the_incident() -> None:
    text = live_logs.root_text(live_logs.Line("x", "user", 2, "a\x1b[31m\r\nb" + "c" * 5000))
    assert "\x1b" not in text and "\n" not in text and len(text) < 400
    loud = "x\x1b" * 9000
    line = live_logs.Line(loud, loud, 1, loud, loud, path=loud)
    answer = live_logs.Answer(line, others=(live_logs.Kind(loud, loud, tuple(range(99))),) * 50,
                             note=loud, hint=loud, problems=(loud,) * 50)
    verdict = live_logs.verdict_of(answer, "r", 1)
    assert verdict is not None
    said = str(verdict) + str(live_logs.rows(answer))
    assert len(said) < 5000 and "\x1b" not in said and "x1b" not in said
