"""What an alert from outside does to a run: at most one restart, and never an end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Alert, Request, Runbook, Settings
from holdfast.agent.core.run.alerts import STORM_S

from .driver import Lab

ACTING = Settings(act=(*Settings().act, "alerts"))
BOOK = Runbook("fabric_storm", "degraded", "run", ("restart_ranks",), budget_count=2)


def alert(number: int = 1, generation: int = 1, **fields: object) -> Alert:
    values = {"id": f"{number}/t", "name": "FabricStorm", "runbook": "fabric_storm", "run": "r",
              "summary": "two nodes lose packets", "taken_wall_s": 1e9 + 100.0,
              "generation": generation}
    return Alert(**(values | fields))  # type: ignore[arg-type]


def trained(settings: Settings = ACTING, **view: int) -> Lab:
    lab = Lab(settings=settings, **view)
    lab.node.configure(settings, {"fabric_storm": BOOK})
    lab.begin()
    lab.train(to=20)
    return lab


def send(lab: Lab, *alerts: Alert) -> None:
    """Steps until every alert has its answer; the edge takes each away with it."""
    lab.alerts, lab.told = alerts, {}  # type: ignore[attr-defined]
    for _ in range(40):
        lab.step(0.1)
        answered = {answer.id: answer for answer in lab.decision.answers}
        lab.told |= answered  # type: ignore[attr-defined]
        lab.alerts = tuple(one for one in lab.alerts if one.id not in answered)
        if not lab.alerts:
            return
    raise AssertionError(f"no answer to {lab.alerts}: {lab.decision}")


def told(lab: Lab, number: int = 1) -> tuple[bool, str]:
    answer = lab.told[f"{number}/t"]  # type: ignore[attr-defined]
    return answer.ok, answer.text


def test_an_alert_restarts_the_run_that_it_names_and_says_so() -> None:
    lab = trained()
    send(lab, alert())
    assert told(lab) == (True, "generation 2 was started for it")
    assert lab.view.generation == 2
    (incident,) = (one for one in lab.incidents.values() if one.fault == "fabric_storm")
    assert "two nodes lose packets" in incident.reason
    assert dict(lab.plan().spent)["restarts"] == 1


def test_a_thousand_alerts_are_one_restart() -> None:
    lab = trained()
    send(lab, *(alert(number) for number in range(1000)))
    assert lab.view.generation == 2
    assert sum(told(lab, number)[0] for number in range(1000)) == 1
    assert "generation 2 was started since" in told(lab, 999)[1]


def test_what_joins_a_storm_minutes_later_is_answered_by_its_restart() -> None:
    lab = trained(max_restarts=9)
    send(lab, alert())
    lab.train(to=40)
    lab.boot_s += STORM_S / 2
    lab.step()
    send(lab, alert(2, generation=2))
    ok, text = told(lab, 2)
    assert not ok and text.startswith("generation 2 was started for fabric_storm 30")
    assert text.endswith(" s ago: one restart answers a storm")
    lab.boot_s += STORM_S / 2
    lab.step()
    send(lab, alert(3, generation=2))
    assert told(lab, 3) == (True, "generation 3 was started for it")


def test_another_runbooks_alert_belongs_to_no_storm() -> None:
    lab = trained(max_restarts=9)
    slow = replace(BOOK, fault="slow_disks")
    lab.node.configure(ACTING, {"fabric_storm": BOOK, "slow_disks": slow})
    send(lab, alert())
    lab.train(to=40)
    send(lab, alert(2, generation=2, runbook="slow_disks"))
    assert told(lab, 2) == (True, "generation 3 was started for it")


def test_an_alert_that_was_answered_is_not_answered_again_by_a_new_agent() -> None:
    lab = trained()
    send(lab, alert())
    lab.restart_agent()
    lab.node.configure(ACTING, {"fabric_storm": BOOK})
    lab.train(to=40)
    send(lab, alert())
    assert told(lab) == (True, "generation 2 was started for it")
    assert lab.view.generation == 2


def test_a_spent_budget_refuses_an_alert_and_leaves_the_run_alone() -> None:
    lab = trained(max_restarts=9)
    for generation in (1, 2):
        send(lab, alert(generation, generation))
        assert lab.view.generation == generation + 1
        lab.boot_s += STORM_S
        lab.train(to=20 + generation)  # too few steps to give a restart back
    send(lab, alert(3, 3))
    ok, text = told(lab, 3)
    assert not ok
    assert text.startswith("nothing is done: ")
    assert "used up its 2 restarts" in text
    assert lab.view.generation == 3
    assert lab.finishes() == []
    assert lab.decision.plans[0].finished < 0


@pytest.mark.parametrize(("settings", "fields", "text"), [
    (Settings(), {}, "shown alone: detect.act does not name 'alerts'; it would have: "
                     "restart_ranks"),
    (ACTING, {"runbook": "pray"}, "no runbook is named 'pray': shown alone"),
    (ACTING, {"runbook": ""}, "no runbook is named '': shown alone"),
    (ACTING, {"run": "other"}, "no launcher of run 'other' came"),
    (ACTING, {"generation": 0}, "generation 1 was started since: nothing more is done"),
])
def test_what_is_not_acted_on_is_said(
    settings: Settings, fields: dict[str, object], text: str
) -> None:
    lab = trained(settings)
    lab.alerts = (alert(**fields),)
    lab.step()
    lab.boot_s += 61.0  # nobody waits longer for a launcher
    send(lab, alert(**fields))
    assert told(lab) == (False, text)
    assert lab.view.generation == 1


def test_a_paused_run_lets_an_alert_wait() -> None:
    lab = trained()
    lab.requests = (Request("1", "pause", "run/r", "debugging"),)
    lab.alerts = (alert(),)
    for _ in range(20):
        lab.step(0.1)
        assert not [one for one in lab.decision.answers if one.id == "1/t"]
    assert lab.view.generation == 1
    lab.requests = (Request("2", "resume", "run/r", "done"),)
    send(lab, alert())
    assert lab.view.generation == 2


def test_an_alert_whose_run_ends_is_settled() -> None:
    lab = trained()
    for rank in (0, 1):
        lab.raises(rank, "SystemExit", code=0)
    lab.settle()
    send(lab, alert())
    assert told(lab)[0] is False
