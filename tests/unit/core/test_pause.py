"""A pause that ends by itself, of a run and of a node."""

from __future__ import annotations

import msgspec

from holdfast.agent.core.model import Request

from .driver import Lab


def paused(lab: Lab, until_s: float, run: str = "r") -> None:
    subject = f"run/{run}" if run else f"node/{lab.name}"
    lab.requests = (Request("op-1", "pause", subject, "why", run=run, until_wall_s=until_s),)
    lab.step(1.0)
    lab.requests = ()


def wall_s(lab: Lab) -> float:
    return 1e9 + lab.boot_s


def test_a_run_is_resumed_when_its_time_is_over_and_a_fault_is_answered_then() -> None:
    lab = Lab()
    lab.begin()
    lab.train(5)
    until_s = wall_s(lab) + 60.0
    paused(lab, until_s)
    assert lab.node.paused_until() == {"run/r": until_s}
    lab.kill(0)
    for _ in range(30):
        lab.step(1.0)
    assert len(lab.starts()) == 1, "nothing is done while it is paused"
    for _ in range(40):
        lab.step(1.0)
    assert len(lab.starts()) == 2 and not lab.node.paused_until()


def test_a_restart_of_the_agent_forgets_no_end_of_a_pause() -> None:
    lab = Lab()
    lab.begin()
    paused(lab, wall_s(lab) + 5.0, run="")
    lab.restart_agent()
    assert lab.node.kept.paused == "why"
    for _ in range(10):
        lab.step(1.0)
    assert lab.node.kept.paused == "" and not lab.node.cases["r"].state.held.paused
    assert msgspec.json.decode(lab.node.memory())["paused_until_wall_s"] == 0.0


def test_a_pause_without_an_end_stays() -> None:
    lab = Lab()
    lab.begin()
    paused(lab, 0.0)
    for _ in range(100):
        lab.step(1.0)
    assert lab.node.cases["r"].state.held.paused and lab.node.paused_until() == {}
