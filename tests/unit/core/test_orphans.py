"""Requests that an earlier life of the agent took: never begun again, and each is answered."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Request, Settings
from holdfast.agent.core.node import ABSENT_S, NOT_DONE, Node
from holdfast.agent.core.nodes.alert_actions import LOST

from .driver import Lab, replace

RESTART = Request("op-1", "restart_ranks", "run/r", "slow", run="r", by="ann")
PAUSE = Request("op-1", "pause", "run/r", "hands off", run="r", by="ann")
EXCLUDE = Request("op-1", "exclude_node", "node/b", "noisy", by="ann")
CHECK = Request("op-1", "run_check", "node/a", "why not", by="ann", checks=("tensor",))
ALL = (RESTART, PAUSE, EXCLUDE, CHECK, Request("op-1", "pause", "fleet", "upgrade", by="ann"),
       Request("op-1", "stop_run", "run/r", "no more", run="r", by="ann"))


def trained() -> Lab:
    lab = Lab()
    lab.begin()
    lab.train(5)
    return lab


def reborn(lab: Lab, request: Request, memory: bytes | None = None) -> None:
    """The agent is killed and starts again, with what its journal has of it."""
    if memory is None:
        lab.restart_agent()
    else:
        lab.node = Node(lab.name, lab.settings, lab.runbooks, memory)
    lab.requests = ()
    lab.orphans = (replace(request, run="", checks=()),)


def answer(lab: Lab) -> tuple[bool, str] | None:
    """As the edge takes it: what is answered is asked no more."""
    found = [one for one in lab.decision.answers if one.id == "op-1"]
    assert len(found) < 2
    if found:
        lab.orphans = ()
    return (found[0].ok, found[0].text) if found else None


@pytest.mark.parametrize("request_", ALL, ids=lambda one: f"{one.action} {one.subject}")
def test_what_no_step_had_seen_is_not_done_and_that_is_said(request_: Request) -> None:
    lab = trained()
    reborn(lab, request_)
    before = dict(lab.docs)
    lab.step(0.1)
    assert answer(lab) == (False, NOT_DONE)
    lab.settle()
    assert lab.docs == before and len(lab.starts()) == 1 and not lab.finishes()
    assert not lab.node.cases["r"].state.held.paused and not lab.decision.fleet_paused


def test_a_pause_that_was_taken_stands_and_is_answered_so() -> None:
    lab = trained()
    lab.requests = (PAUSE,)
    lab.step(0.1)
    reborn(lab, PAUSE)
    lab.view = replace(lab.view, connected=False)  # it is not back yet
    lab.step(0.1)
    assert answer(lab) == (True, "pause: taken")
    assert lab.node.cases["r"].state.held.paused


def test_a_restart_that_was_begun_goes_on_and_is_made_once() -> None:
    lab = trained()
    lab.requests, lab.hold = (RESTART,), {"put"}
    lab.step(0.1)  # its cause is known, and no plan names it
    reborn(lab, RESTART)
    view, lab.view, lab.hold = lab.view, replace(lab.view, connected=False), set()
    lab.step(1.0)
    assert answer(lab) is None, "its launcher was told something, perhaps"
    lab.view = view
    for _ in range(20):
        lab.step(0.1)
        if lab.orphans and (came := answer(lab)) is not None:
            assert came == (True, "generation 2")
    assert not lab.orphans and len(lab.starts()) == 2 and lab.plan().generation == 2


def test_a_restart_is_done_where_the_plan_names_it_and_the_memory_is_older() -> None:
    lab = trained()
    lab.requests = (RESTART,)
    lab.step(0.1)
    memory = lab.node.memory()
    lab.settle()
    assert lab.plan().granted == ("op-1",)
    reborn(lab, RESTART, memory)
    lab.step(0.1)
    assert answer(lab) == (True, "generation 2") and len(lab.starts()) == 2


def test_a_restart_that_waited_in_memory_alone_is_not_done() -> None:
    """Beside a fault, or under a pause, it is no cause yet."""
    lab = trained()
    lab.node.kept.handled = ["op-1"]
    reborn(lab, RESTART)
    lab.step(0.1)
    assert answer(lab) == (False, NOT_DONE) and len(lab.starts()) == 1


def test_a_restart_whose_launcher_does_not_come_back_is_not_waited_for() -> None:
    lab = trained()
    lab.node.kept.handled = ["op-1"]
    reborn(lab, RESTART)
    lab.view = replace(lab.view, connected=False)
    lab.step(0.1)
    assert answer(lab) is None
    lab.step(ABSENT_S)
    assert answer(lab) == (False, NOT_DONE)


@pytest.mark.parametrize("written", [True, False])
def test_an_exclusion_that_was_taken_is_written_and_answered_so(written: bool) -> None:
    lab = Lab(settings=Settings(single_node=False))
    lab.requests, lab.hold = (EXCLUDE,), set() if written else {"put"}
    lab.step(0.1)
    for _ in range(3):
        lab.step(1.0)
    reborn(lab, EXCLUDE)
    lab.hold, lab.store_up, lab.docs, docs = set(), False, {}, lab.docs
    assert ("node/b" in docs) == written
    lab.step(0.1)
    assert answer(lab) is None, "what the store says of it is not known"
    lab.store_up, lab.docs = True, docs
    for _ in range(5):
        lab.step(1.0)
        if lab.orphans and (came := answer(lab)) is not None:
            assert came == (True, "b is excluded from runs")
    assert not lab.orphans


def test_a_check_that_was_cut_off_is_not_done() -> None:
    lab = Lab()
    lab.requests, lab.hold = (CHECK,), {"check"}
    lab.step(0.1)
    reborn(lab, CHECK)
    lab.step(0.1)
    assert answer(lab) == (False, NOT_DONE)


def test_an_order_that_a_launcher_may_have_carried_out_is_told_as_unknown() -> None:
    lab = trained()
    reborn(lab, Request("op-1", "inject kill", "run/r/rank/1", "game day"))
    lab.step(0.1)
    assert answer(lab) == (False, LOST)


def test_what_an_alert_became_is_answered_by_the_alert() -> None:
    lab = trained()
    asked = replace(CHECK, by="alert Hot")
    lab.node.kept.alerts.asked["op-1"] = asked
    reborn(lab, asked)
    lab.step(0.1)
    assert answer(lab) is None, "it is the alert's to say"
    lab.step(0.1)
    assert answer(lab) == (False, LOST)
