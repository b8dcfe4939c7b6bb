"""A defect that one run's levels bring out costs that run alone, and is said."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.core.detect.devices.accelerator import Accelerators
from holdfast.agent.core.model import Decision, Now, RunView

from .driver import Lab, replace

NOTHING: Any = None  # where a number belongs: it stands for the defect that is not known yet


def decide(lab: Lab, *views: RunView) -> Decision:
    lab.boot_s += 1.0
    now = Now(boot_s=lab.boot_s, wall_s=1e9 + lab.boot_s, boot_id="b")
    return lab.node.step(now, replace(lab.observed(), runs=views))


def failed(decision: Decision) -> list[str]:
    return [one.subject for one in decision.verdicts if one.fault == "run_not_judged"]


def standing() -> tuple[Lab, RunView]:
    """A run that stands still, and the same run in a form that the core raises on."""
    lab = Lab(grade="script")
    lab.begin()
    lab.train(20)
    lab.all(still_s=60.0)
    return lab, replace(lab.view, hang_limit_s=NOTHING)


def test_a_run_that_the_core_fails_on_stands_alone_and_comes_back() -> None:
    lab, odd = standing()
    other = RunView(run="z", node="a", grade="script", nproc=1)
    decision = decide(lab, odd, other)
    (verdict,) = [one for one in decision.verdicts if one.fault == "run_not_judged"]
    assert verdict.subject == "run/r" and "TypeError: " in verdict.reason
    assert "suspect_s, line " in dict(verdict.evidence)["raised in"]
    assert dict(decision.reasons)["r"] == verdict.reason
    assert [getattr(one.body, "key", "") for one in decision.effects] == ["run/z"]
    assert failed(decide(lab, odd, other)) == ["run/r"]  # each step tries anew
    decision = decide(lab, lab.view, other)
    assert failed(decision) == [] and "rank_hung" in {one.fault for one in decision.verdicts}


def test_what_a_run_did_is_unknown_while_it_is_not_judged() -> None:
    lab, odd = standing()
    decide(lab, odd)
    before = dict(decide(lab, odd).ledger)["unknown"]
    after = dict(decide(lab, odd).ledger)["unknown"]
    assert 0.9 < after - before < 1.1


def test_a_detector_that_fails_on_readings_halts_no_run_and_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, _ = standing()
    lab.samples = (("accelerator_row_remap_failed", "vendor=nvidia,device=3", 1.0, 1.0),)
    assert "row_remap_failed" in {one.fault for one in decide(lab, lab.view).verdicts}

    def fails(*_: object) -> None:
        raise KeyError("name")

    monkeypatch.setattr(Accelerators, "look", fails)
    lab.boot_s += 100.0
    decision = decide(lab, lab.view)
    assert {"row_remap_failed", "rank_hung"} <= {one.fault for one in decision.verdicts}
    (failure,) = [one for one in decision.verdicts if one.fault == "collector_failed"]
    assert failure.subject == "node/a/detector/accelerator" and "KeyError" in failure.reason
    assert "closed" not in {one.state for one in decision.incidents}
