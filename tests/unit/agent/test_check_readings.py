"""What the agent's detectors conclude over time, as checks that look once take it from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.agent.checks import gate, readings
from holdfast.agent.checks.facts import Facts, Fault, faults_in
from holdfast.agent.checks.round import Round, wanted_of
from holdfast.agent.config.load import load
from holdfast.agent.core.model import FATAL, WARN, Decision, Now, Observed, Verdict
from holdfast.agent.daemon.parts.checks import Checks
from holdfast.agent.daemon.state import AgentState, Snapshot
from holdfast.collectors.contract import Roots

FACTS = Facts("node-a")
DOWN = Fault("network", "nic_link_down", "degraded", "card eth1: its link is down")
GONE = Fault("network", "nic_lost", "fatal", "card mlx5_0: it is not on the PCI bus any more")
KERNEL = Fault("kernel_log", "nic_error", "fatal", "mlx5_core: firmware stopped")


def test_what_takes_more_than_one_look_is_the_agents_word(tmp_path: Path) -> None:
    """A link that is down now, and was never seen up by who looks once, may be nobody's."""
    roots = Roots(proc=str(tmp_path), sys=str(tmp_path))
    one_look = gate.network(FACTS._replace(roots=roots))
    assert not one_look.critical and not one_look.warning
    answer = gate.network(FACTS._replace(roots=roots, faults=(DOWN, GONE, KERNEL)))
    assert (answer.critical, answer.warning) == ((GONE.reason,), (DOWN.reason,))
    assert answer.todo == "`holdfast explain nic_link_down`; `holdfast explain nic_lost`"
    assert not gate.clock(FACTS._replace(faults=(DOWN, GONE))).critical


def test_one_look_that_says_the_milder_thing_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 of 32 cards are listed: one look warns, and the agent knows which of them it had."""
    milder = Verdict("nic_lost", "node/a", WARN, 1.0, "31 of 32 cards", detector="network")
    monkeypatch.setattr(readings.NodeWatch, "look", lambda watch, observed: (milder,))
    roots = Roots(proc=str(tmp_path), sys=str(tmp_path))
    answer = gate.network(FACTS._replace(roots=roots, faults=(GONE,)))
    assert (answer.critical, answer.warning) == ((GONE.reason,), ("31 of 32 cards",))


def test_an_agents_faults_reach_its_rounds_and_the_command(tmp_path: Path) -> None:
    state = AgentState(load(None, {"agent.state_dir": (str(tmp_path), "a test")}),
                       is_private=False)
    verdicts = [Verdict(one.fault, "node/a", one.severity, 1.0, one.reason, detector=one.detector)
                for one in (DOWN, GONE)]
    of_a_run = Verdict("rank_hung", "run/r/rank/1", FATAL, 0.5, "still", detector="hang", run="r")
    state.snapshot = Snapshot(1, Now(boot_s=1.0, wall_s=1.0, boot_id="b"), Observed(),
                              Decision(verdicts=(*verdicts, of_a_run)))
    state.launchers = SimpleNamespace(sessions=lambda: ())
    asked = Checks(state, lambda why: None)._asked(("network",), 0.0)
    assert asked.faults == (DOWN, GONE)
    sent = msgspec.json.decode(msgspec.json.encode(asked), type=Round)
    assert wanted_of(sent).facts.faults == (DOWN, GONE)
    told = {"faults": [*map(msgspec.to_builtins, (*verdicts, of_a_run)), 7]}
    assert faults_in(told) == (DOWN, GONE)
    assert faults_in(None) == faults_in({"faults": "x"}) == ()
