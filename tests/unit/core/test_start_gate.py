"""The gate before a run's first start: what refuses it, what does not, and what is asked for."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.checks.common_cause import is_common
from holdfast.agent.core.model import FATAL, CheckVerdict, Doc, GateSettings, RunCheck, Settings
from holdfast.agent.core.node import Node
from holdfast.agent.core.run.start_gate import uses

from .driver import Lab, replace
from .test_kernel import CATALOGUE, XID, parse
from .test_repair import FALLEN

GATE = ("incidents", "devices", "disk", "paths")
LOST = CheckVerdict("devices", "critical", "7 of 8", todo="reboot", confirmed=True,
                    devices=("gpu/3",))
INFO = ("accelerator_info", "vendor=nvidia,device=3,pci=00000000:4E:00.0,uuid=GPU-3", 1.0, 0.0)


def lab(gate: tuple[str, ...] = GATE, **wanted) -> Lab:
    """A node whose checks nobody has made yet."""
    view = {key: wanted.pop(key) for key in list(wanted) if key in (
        "visible", "ignored_checks", "ignore_reason", "checkpoint_dir", "wants_checks",
        "startup_s")}
    settings = Settings(gate=GateSettings(names=gate, **wanted))
    made = Lab(settings=settings, registered_boot_s=99.0, uid=7, **view)
    made.incidents = {}
    made.runbooks = load_runbooks()
    made.node = Node("a", made.settings, made.runbooks)
    return made


def asked(made: Lab) -> list[RunCheck]:
    return [one.body for one in made.log if isinstance(one.body, RunCheck)]


def begun(made: Lab, seconds: float = 3.0) -> Lab:
    for _ in range(int(seconds / 0.5)):
        made.step(0.5)
        made.incidents |= {one.id: one for one in made.decision.incidents}
    return made


def said(made: Lab) -> str:
    return next(one.body.reason for one in made.log if one.kind == "finish")


def test_a_card_of_the_network_refuses_no_run_of_one_node() -> None:
    made = lab(gate=("network",))
    made.health["network"] = replace(LOST, check="network", devices=())
    assert begun(made).view.generation == 1 and not made.finishes()


def test_what_is_not_known_is_checked_once_and_a_well_node_starts() -> None:
    made = begun(lab(checkpoint_dir="/ckpt"))
    assert [(one.checks, one.run, one.paths) for one in asked(made)] == [
        (("devices", "disk"), "", ()), (("paths",), "r", ("/ckpt",))]
    assert made.view.generation == 1 and not made.finishes()


def test_with_fresh_verdicts_nothing_is_asked_for_and_the_first_step_plans() -> None:
    made = lab()
    made.checks = {name: CheckVerdict(name, "ok", "well", wall_s=1e9 + made.boot_s - 200)
                   for name in ("devices", "disk")}
    made.settle()
    assert made.view.generation == 1 and not asked(made)


def test_a_check_that_failed_twice_refuses_with_75_and_says_what_to_do() -> None:
    made = lab()
    made.health["devices"] = LOST
    begun(made)
    assert (made.finishes(), made.starts()) == ([75], [])
    for words in ("a starts no run", "check devices: 7 of 8", "reboot",
                  "--ignore-check devices --reason"):
        assert words in said(made)
    (incident,) = [one for one in made.incidents.values() if one.fault == "start_refused"]
    assert incident.severity == FATAL and incident.state == "closed"
    assert [one.fault for one in made.decision.verdicts] == ["check_failed"]


@pytest.mark.parametrize("verdict", [
    replace(LOST, status="warning"), replace(LOST, status="unknown"),
    replace(LOST, confirmed=False)])
def test_what_is_no_proof_refuses_nothing(verdict: CheckVerdict) -> None:
    made = lab()
    made.health["devices"] = verdict
    assert begun(made).view.generation == 1


def test_a_round_that_never_ends_is_unknown_and_holds_nobody_for_long() -> None:
    made = lab(limit_s=20.0, checkpoint_dir="/ckpt")
    made.hold = {"run_check"}
    begun(made, 10.0)
    assert not made.starts() and "checked" in dict(made.decision.reasons)["r"]
    begun(made, 12.0)
    assert made.view.generation == 1 and not made.finishes()


def test_a_path_that_takes_nothing_refuses() -> None:
    made = lab(checkpoint_dir="/ckpt")
    made.unwritable = {"/ckpt": "nothing can be written: Read-only file system"}
    assert begun(made).finishes() == [75] and "/ckpt: nothing can be written" in said(made)


def test_an_ignored_check_starts_and_is_written_down_until_the_run_ends() -> None:
    made = lab(ignored_checks=("devices",), ignore_reason="a spare part is on its way")
    made.health["devices"] = LOST
    begun(made)
    assert made.view.generation == 1
    (one,) = [one for one in made.decision.incidents if one.fault == "check_ignored"]
    assert "7 of 8" in one.reason and "uid 7" in one.reason and "spare part" in one.reason
    assert one.state == "open"
    shown = [said for said in made.decision.verdicts if said.fault == "check_ignored"]
    assert [(said.subject, said.severity, said.run, said.reason) for said in shown] == [
        (one.subject, "warn", "r", one.reason)], "it is shown as long as it stands"
    made.train(2)
    made.kill(1)
    begun(made)
    made.train(4)
    assert [one.state for one in made.decision.incidents if one.fault == "check_ignored"] == [
        "open"]  # it is nothing that a recovery closes


def test_only_what_was_named_is_ignored() -> None:
    made = lab(ignored_checks=("disk",), ignore_reason="x")
    made.health["devices"] = LOST
    assert begun(made).finishes() == [75]


def test_a_start_that_waits_begins_when_the_check_passes() -> None:
    made = lab(wait_s=60.0)
    made.health["devices"] = LOST
    begun(made, 15.0)
    assert not made.starts() and not made.finishes()
    assert "waits until it is over, 60 s" in dict(made.decision.reasons)["r"]
    del made.health["devices"]
    begun(made, 12.0)
    assert made.view.generation == 1 and 2 <= len(asked(made)) <= 4
    assert not [one for one in made.decision.incidents if one.fault == "start_refused"
                and one.state == "open"]


def test_what_failed_a_moment_ago_is_made_again_before_it_refuses() -> None:
    made = lab()
    made.checks = {name: replace(LOST, check=name, wall_s=1e9 + made.boot_s - 5)
                   for name in ("devices", "disk")}
    made.hold = {"run_check"}
    begun(made, 2.0)
    assert not made.finishes() and not made.starts()  # not by what may be over
    made.hold = set()
    for effect in made.log[:]:
        if isinstance(effect.body, RunCheck):
            made._perform(effect)
    begun(made)
    assert made.view.generation == 1 and asked(made)[0].checks == ("devices", "disk")


def test_and_leaves_when_it_does_not() -> None:
    made = lab(wait_s=30.0)
    made.health["devices"] = LOST
    begun(made, 25.0)
    assert not made.finishes()
    assert begun(made, 10.0).finishes() == [75]


def test_the_next_launcher_is_checked_anew() -> None:
    made = lab()
    made.health["devices"] = LOST
    begun(made)
    del made.health["devices"]
    made.view = replace(made.view, registered_boot_s=made.boot_s, generation=0, state="idle",
                        ranks=())
    made.boot_s += 301.0
    begun(made)
    assert made.view.generation == 1


def test_an_empty_gate_refuses_nothing() -> None:
    made = lab(gate=())
    made.checks["devices"] = replace(LOST, wall_s=1e9 + 99)
    made.events = (parse(CATALOGUE, FALLEN, 1, made.boot_s),)
    assert begun(made).view.generation == 1


def test_what_nobody_makes_again_by_himself_stands_until_it_passes() -> None:
    made = lab(gate=("incidents",), disturbing=("tensor",))
    made.checks["tensor"] = CheckVerdict("tensor", "critical", "a bit", confirmed=True)
    assert begun(made).finishes() == [75]


def test_check_full_asks_for_what_takes_the_devices() -> None:
    made = begun(lab(full=("incidents", "devices", "tensor"), wants_checks="full"))
    assert asked(made)[0].checks == ("devices", "tensor")


# ------------------------------------------------------------------- between two generations


def fell(made: Lab, seconds: float) -> None:
    """The GPU under rank 0 falls off the bus, by the kernel's own word."""
    pid = next(rank.pid for rank in made.view.ranks if rank.rank == 0)
    made.events = (parse(CATALOGUE, XID % (79, pid), 1, made.boot_s),)
    begun(made, seconds)


def trained(**wanted) -> Lab:
    made = begun(lab(gate=("incidents", "devices"), disturbing=("tensor", "gemm"),
                     startup_s=8.0, **wanted))
    made.log.clear()
    return made


def test_a_restart_after_a_fault_of_the_hardware_checks_what_disturbs_nobody() -> None:
    made = trained()
    fell(made, 3.0)
    assert [one.checks for one in asked(made)] == [("devices",)]
    assert made.view.generation == 2


def test_what_takes_the_devices_is_checked_in_the_gap_where_that_is_configured() -> None:
    made = trained(between=("tensor",))
    made.hold = {"run_check"}
    fell(made, 4.0)
    (effect,) = [one for one in made.log if isinstance(one.body, RunCheck)]
    assert effect.body.checks == ("devices", "tensor") and effect.deadline_s == 8.0
    assert made.view.generation == 1  # it waits, for no longer than the start took
    begun(made, 8.0)
    assert made.view.generation == 2


def test_a_device_that_computes_wrong_in_the_gap_gets_no_generation_more() -> None:
    made = trained(between=("tensor",))
    made.health["tensor"] = CheckVerdict("tensor", "critical", "a bit", todo="run it again",
                                         confirmed=True)
    fell(made, 4.0)
    assert made.view.generation == 1 and made.finishes() == [75]
    assert "check tensor: a bit" in said(made)


def test_a_fault_of_the_job_itself_puts_no_device_in_question() -> None:
    made = trained(between=("tensor",))
    made.raises(0, "ValueError: bad sample")
    begun(made, 3.0)
    assert not asked(made)


# -------------------------------------------------------------------------- a run's devices


@pytest.mark.parametrize(("visible", "starts"), [
    ((), False), ((("nvidia", "0,3"),), False), ((("nvidia", "0,1"),), True),
    ((("nvidia", "GPU-3"),), False), ((("nvidia", "MIG-1"),), False), ((("nvidia", ""),), True),
    ((("nvidia", "-1,3"),), True), ((("amd", "0"),), False)])
def test_a_broken_device_holds_up_only_runs_that_may_use_it(visible, starts: bool) -> None:
    made = lab(gate=("incidents",), visible=visible)
    made.samples = (INFO,)
    made.events = (parse(CATALOGUE, FALLEN, 1, made.boot_s),)
    begun(made)
    assert (made.view.generation == 1, made.finishes() == [75]) == (starts, not starts)
    other = lab(gate=("devices",), visible=visible)
    other.samples, other.health["devices"] = (INFO,), LOST
    assert (begun(other).view.generation == 1) == starts


def test_the_node_itself_is_everybodys() -> None:
    view = Lab(visible=(("nvidia", "0"),)).view
    assert uses(view, "", {}) and uses(view, "disk/sda", {}) and not uses(view, "gpu/1", {})
    assert uses(view, "gpu/0000:4e:00", {})  # which number it has is not known


@pytest.mark.parametrize(("device", "visible", "used"), [
    ("gpu/3", (("nvidia", "3"),), True), ("gpu/3", (("nvidia", "4"),), False),
    ("gpu/0000:4e:00", (("nvidia", "3"),), True), ("gpu/0000:4e:00", (("nvidia", "4"),), False),
    ("gpu/3", (("nvidia", "GPU-3"),), True), ("gpu/3", (("nvidia", "GPU-4"),), False),
    ("gpu/3", (("nvidia", "4,GPU-"),), True),  # may be short for its uuid
    ("gpu/0000:9a:00", (("nvidia", "0"),), True),  # AMD's: this list says nothing of it
    ("gpu/0000:9a:00", (("amd", "0"),), False), ("gpu/0000:9a:00", (("amd", "5"),), True),
    ("gpu/0000:9a:00", (("nvidia", "0"), ("amd", "0")), False),
    ("gpu/7", (("nvidia", "0"),), False),  # unknown, but a number of NVIDIA's
    ("gpu/7", (("nvidia", "4,-1,7"),), False),
    ("neuron/7", (("nvidia", "0"),), True), ("gpu", (("nvidia", "0"),), True),
])
def test_which_devices_a_run_may_use_is_said_by_the_list_of_their_vendor(
    device: str, visible: tuple[tuple[str, str], ...], used: bool
) -> None:
    known = {("nvidia", "3"): ("0000:4e:00", "GPU-3"), ("nvidia", "4"): ("0000:5e:00", "GPU-4"),
             ("amd", "5"): ("0000:9a:00", "")}
    assert uses(Lab(visible=visible).view, device, known) is used


# ----------------------------------------------------------------------- the common cause


def test_the_same_check_failing_on_many_nodes_at_once_refuses_nobody() -> None:
    settings, nodes = Settings(), {f"n{i}": 1000.0 + i for i in range(5)}
    common, why = is_common({"devices": nodes}, "devices", 40, 1100.0, settings)
    assert common and "devices on 5 of 40" in why
    assert not is_common({"devices": nodes}, "devices", 200, 1100.0, settings)[0]
    slow = {f"n{i}": 1000.0 + 3600.0 * i for i in range(5)}
    assert not is_common({"devices": slow}, "devices", 40, 20000.0, settings)[0]
    assert not is_common({"devices": {"a": 1.0}}, "disk", 40, 2.0, settings)[0]
    common, why = is_common({"devices": {"a": 1.0}}, "devices", 1, 2.0, settings)
    assert not common and "not known" in why


def test_the_gate_reads_of_the_fleet_what_the_store_knows() -> None:
    made = lab()
    made.health["devices"] = LOST
    for name in "bcdef":
        body = msgspec.json.encode({"devices": 1e9 + made.boot_s})
        made.docs[f"checks/{name}"] = Doc(f"checks/{name}", 1, body)
        made.docs[f"node/{name}"] = Doc(f"node/{name}", 1, b"{}")
    assert begun(made).view.generation == 1
