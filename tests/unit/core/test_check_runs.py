"""run_check as an action: for an incident, a person, after a job, and before a restart in place."""

from __future__ import annotations

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import (
    CheckVerdict,
    GateSettings,
    Request,
    Runbook,
    RunCheck,
    Settings,
)
from holdfast.agent.core.node import Node

from .driver import Lab, replace
from .test_kernel import CATALOGUE, parse
from .test_repair import FALLEN

GATE = GateSettings(names=("incidents", "devices", "accelerators"), disturbing=("tensor",))
BOOK = Runbook("gpu_fell_off_bus", "fatal", "gpu", ("run_check", "reboot_node"), budget_count=1,
               clears="check")
FAULT = ("NVRM: Xid (PCI:0000:4e:00): 31, pid=4711, name=python3, Ch 00000008, intr 10000000. MMU "
         "Fault: ENGINE GRAPHICS GPCCLIENT_T1_1 faulted @ 0x7f00_00000000. Fault is of type "
         "FAULT_PDE ACCESS_TYPE_VIRT_READ")
BAD = CheckVerdict("tensor", "critical", "a bit flipped", confirmed=True)


def lab(book: Runbook = BOOK, gate: GateSettings = GATE, **wanted) -> Lab:
    made = Lab(settings=Settings(gate=gate, **wanted), state="done", generation=1)
    made.runbooks = {**load_runbooks(), book.fault: book}
    made.node = Node("a", made.settings, made.runbooks)
    return made


def rounds(made: Lab) -> list[tuple[str, ...]]:
    return [one.body.checks for one in made.log if isinstance(one.body, RunCheck)]


def falls(made: Lab, seconds: float = 5.0) -> Lab:
    made.events = (parse(CATALOGUE, FALLEN, 1, made.boot_s),)
    return later(made, seconds)


def later(made: Lab, seconds: float) -> Lab:
    for _ in range(int(seconds)):
        made.step(1.0)
    return made


def of(made: Lab) -> list:
    return [one for one in made.decision.incidents
            if one.fault == BOOK.fault and one.state in ("open", "acted")]


def test_a_ladder_asks_for_a_check_and_one_that_passes_clears_the_incident() -> None:
    made = falls(lab())
    assert rounds(made) == [("devices", "accelerators", "tensor")] and of(made) == []


def test_a_check_that_fails_or_is_unknown_clears_nothing_and_is_not_repeated_without_end() -> None:
    for bad in (BAD, replace(BAD, status="unknown")):
        made = lab()
        made.health["tensor"] = bad
        falls(made, 60.0)
        (incident,) = of(made)
        assert len(rounds(made)) == 1  # the budget
        assert any("tensor " + bad.status in text for _, text in incident.timeline)


def test_a_gpu_that_repeats_a_page_fault_has_the_gpus_checked_once_no_run_goes_on() -> None:
    """By the shipped catalogue and runbook; the first one is the job's own, most likely."""
    fault = FAULT.replace("00000000", "{address}")
    made = lab()
    made.view = replace(made.view, state="running")
    for number in (1, 2):
        line = fault.format(address=f"{number:08d}")
        made.events = (*made.events, parse(CATALOGUE, line, number, made.boot_s))
        later(made, 20.0)
        assert rounds(made) == []
        (incident,) = [one for one in made.decision.incidents
                       if one.fault == "gpu_application_error"]
        assert ("waits while r goes on" in incident.would_have) == (number == 2)
    made.view = replace(made.view, state="done")
    later(made, 5.0)
    assert rounds(made) == [("devices", "accelerators", "tensor")]
    (incident,) = [one for one in made.incidents.values() if one.fault == "gpu_application_error"]
    assert any("tensor ok" in text for _, text in incident.timeline)


def test_a_verdict_from_before_the_fault_clears_nothing() -> None:
    made = lab(replace(BOOK, ladder=()))
    for name in ("devices", "accelerators", "tensor"):
        made.checks[name] = CheckVerdict(name, "ok", "", wall_s=1e9 + made.boot_s - 1)
    assert len(of(falls(made))) == 1
    for name in made.checks:
        made.checks[name] = CheckVerdict(name, "ok", "", wall_s=1e9 + made.boot_s)
    assert of(later(made, 2.0)) == []  # whoever made them


def test_what_takes_the_devices_waits_for_the_run() -> None:
    made = lab()
    made.view = replace(made.view, state="idle", generation=0)
    made.begin()
    falls(made, 10.0)
    (incident,) = of(made)
    assert not [one for one in rounds(made) if "tensor" in one]
    assert "waits while r goes on" in incident.would_have


def test_a_reboot_comes_behind_the_check_that_failed() -> None:
    made = lab(allow=("reboot_node",), alone=True)
    made.health["tensor"] = BAD
    falls(made, 60.0)
    kinds = [one.kind for one in made.log if one.kind in ("run_check", "reboot_node")]
    assert kinds[:2] == ["run_check", "reboot_node"]
    well = falls(lab(allow=("reboot_node",), alone=True), 60.0)
    assert not [one for one in well.log if one.kind == "reboot_node"]


def test_a_runbook_names_its_own_checks() -> None:
    assert rounds(falls(lab(replace(BOOK, checks=("devices",))))) == [("devices",)]


def test_explain_says_that_it_would_be_made() -> None:
    made = later(lab(), 2.0)
    assert [one.action for one in made.node.outlook(BOOK.fault)][-1] == "run_check"


def test_a_person_is_answered_with_what_was_found() -> None:
    made = lab()
    made.health["tensor"] = BAD
    made.requests = (Request("op-1", "run_check", "node/a", "why not", checks=("tensor",)),)
    answers = []
    for _ in range(4):
        made.step(0.5)
        answers += made.decision.answers
    assert rounds(made) == [("tensor",)]
    assert answers[-1].ok and "tensor critical: a bit flipped" in answers[-1].text


def test_after_a_job_where_that_is_configured() -> None:
    for after in (False, True):
        made = lab(gate=replace(GATE, after=after))
        made.view = replace(made.view, state="idle", generation=0)
        made.begin()
        before = len(rounds(made))
        made.view = replace(made.view, state="done")
        later(made, 3.0)
        assert len(rounds(made)) - before == after


# ----------------------------------------------------------------- before a restart in place


def broken(made: Lab, fault: str = "gpu_fell_off_bus") -> Lab:
    made.view = replace(made.view, state="idle", generation=0)
    made.begin()
    made.train(3)
    made.log.clear()
    made.boot_s += 400.0  # what the start knew is old
    made.kill(1)
    return later(made, 20.0)


def test_an_ordinary_death_is_restarted_without_a_check() -> None:
    made = broken(lab())
    assert rounds(made) == [] and made.view.generation == 2


def test_what_is_known_alone_refuses_a_restart() -> None:
    made = lab()
    made.view = replace(made.view, state="idle", generation=0)
    made.begin()
    made.train(3)
    made.checks["devices"] = CheckVerdict(
        "devices", "critical", "7 of 8", confirmed=True, wall_s=1e9 + made.boot_s)
    made.kill(1)
    later(made, 5.0)
    assert made.finishes() == [75] and made.view.generation == 1


def test_what_a_hardware_fault_puts_in_question_is_checked_first_and_boundedly() -> None:
    for found, held in ((None, False), (replace(BAD, check="devices"), False), (None, True)):
        made = lab()
        made.runbooks["rank_killed"] = Runbook("rank_killed", "fatal", "gpu", ("restart_ranks",))
        made.view = replace(made.view, state="idle", generation=0)
        made.begin()
        made.train(3)
        made.log.clear()
        if found:
            made.health["devices"] = found
        made.hold = {"run_check"} if held else set()
        made.kill(1)
        later(made, 10.0)
        assert rounds(made)[:1] == [("devices", "accelerators")]
        assert (made.view.generation == 2) != bool(found) and made.finishes() == [75] * bool(found)
