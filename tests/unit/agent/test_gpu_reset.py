"""A GPU is reset by the root unit: what it takes, what it runs, and the way there.

Nothing here can touch the machine: see root_unit.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import subprocess
from contextlib import asynccontextmanager

import pytest
from fakes import until
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from root_unit import (
    DRIVERS_RESET,
    INCIDENT,
    RESET,
    called,
    commands,
    core,
    options,
    order,
    place,
    reset,
    unit,
)

from holdfast.agent.actions import root_helper
from holdfast.agent.actions.root_helper import Refused, carry_out
from holdfast.agent.core.nodes import repair
from holdfast.agent.system import procfs

assert commands and place and unit  # fixtures
LINE = "NVRM: Xid (PCI:0000:4e:00): 109, pid=1, name=x, Context Switch Timeout Error"


@pytest.mark.parametrize("line", [
    order(verb="reset_gpu"), order(device="0000:4e:00.0"), order(verb="drain", device=""),
    reset(""), reset("0"), reset("0000:4e:00"), reset("0000:4e:00.8"), reset("0000:4E:00.0"),
    reset("00000000:4e:00.0"), reset("0000:4e:00.0\n"), reset("0000:4e:00.0 -i 1"), reset(0),
    reset("--help"), reset("-1"), reset("0000:4e:00.0;reboot"), reset(None), reset(["0000"]),
    reset("٠٠٠٠:4e:00.0"), reset(more=1),
])
def test_what_names_no_gpu_does_nothing(place, tmp_path, line):
    with pytest.raises(Refused):
        carry_out(line, place)
    assert not called(tmp_path) and not (tmp_path / "state").exists()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=14) | st.from_regex(r"[0-9a-fA-F:.;\s-]{0,14}")
       | st.from_regex(root_helper.ADDRESS) | st.integers() | st.none())
def test_of_a_device_nothing_but_an_address_comes_through(device):
    try:
        found = root_helper.parse(reset(device))["device"]
    except Refused:
        return
    bus, _, function = found.partition(".")
    assert found == device and len(function) == 1 and function in "01234567"
    assert [len(part) for part in bus.split(":")] == [4, 2, 2]
    assert set(bus) <= set("0123456789abcdef:")


def test_a_gpu_is_reset_once_a_boot_and_another_as_well(place, tmp_path):
    carry_out(reset(), place)
    carry_out(reset("0000:5e:00.0"), place)
    for again in ("0000:4e:00.0", "0000:5e:00.0"):
        with pytest.raises(Refused, match=f"reset_gpu of {again} was carried out in this boot"):
            carry_out(reset(again), place)
    carry_out(reset(boot_id="b2"), place._replace(boot_id="b2"))
    assert [line.split()[-1] for line in called(tmp_path)] == [
        "0000:4e:00.0", "0000:5e:00.0", "0000:4e:00.0"]


def test_resets_of_devices_without_end_push_no_verb_out_of_the_memory(place, tmp_path):
    carry_out(order(verb="drain"), place)
    for number in range(300):
        line = reset(f"0000:{number % 256:02x}:0{number // 256}.0")
        if number < root_helper.RESETS_MAX:
            carry_out(line, place)
        else:
            with pytest.raises(Refused, match="a person must look"):
                carry_out(line, place)
    assert len(called(tmp_path)) == 1 + root_helper.RESETS_MAX
    with pytest.raises(Refused, match="drain was carried out in this boot"):
        carry_out(order(verb="drain"), place)


def test_what_an_older_unit_noted_is_understood(place, tmp_path):
    (tmp_path / "state").mkdir()
    old = {"boot_id": "b1", "verb": "drain", "id": "1/x/1", "wall_s": 1.0}
    (tmp_path / "state/done").write_text(json.dumps(old) + "\n")
    with pytest.raises(Refused, match="drain was carried out in this boot"):
        carry_out(order(verb="drain"), place)
    carry_out(reset(), place)


def test_a_reset_without_a_program_is_the_drivers(place, commands, tmp_path, monkeypatch):
    assert DRIVERS_RESET == ("/usr/bin/nvidia-smi", "--gpu-reset", "-i")
    (commands / "reset_gpu").unlink()
    own = tmp_path / "smi"
    own.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/called\n')
    monkeypatch.setattr(root_helper, "RESET", (str(own), *DRIVERS_RESET[1:]))
    with pytest.raises(Refused, match="put the program for reset_gpu there"):
        carry_out(reset(), place)  # there is no driver: it counts as nothing
    own.chmod(0o755)
    carry_out(reset(), place)
    assert called(tmp_path) == ["--gpu-reset -i 0000:4e:00.0"]


@pytest.mark.parametrize(("script", "said"), [
    ("exit 3", "ended with 3"), ("exec sleep 30", "not done within 0.2 s")])
def test_a_reset_that_fails_is_told_apart_from_one_that_is_refused(
    place, commands, tmp_path, monkeypatch, script, said
):
    monkeypatch.setattr(root_helper, "RESET_S", 0.2 if "sleep" in script else 20.0)
    (commands / "reset_gpu").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(root_helper.Failed, match=said):
        carry_out(reset(), place)
    with pytest.raises(Refused, match="carried out in this boot") as refused:
        carry_out(reset(), place)
    assert not isinstance(refused.value, root_helper.Failed)


def test_a_reset_that_cannot_be_killed_is_told_all_the_same(place, commands, monkeypatch):
    """As nvidia-smi in a driver that hangs: then a reboot is what is left."""
    stuck = []

    class Stuck(subprocess.Popen):
        def wait(self, timeout=None):
            assert timeout is not None, "waits for ever"
            stuck.append(self)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(root_helper, "RESET_S", 0.2)
    (commands / "reset_gpu").write_text("#!/bin/sh\nexec sleep 30\n")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Stuck)
        with pytest.raises(root_helper.Failed, match=r"cannot be killed \(pid \d+\)"):
            carry_out(reset(), place)
    assert subprocess.Popen.wait(stuck[0], 10.0) == -signal.SIGKILL


def test_what_a_late_program_started_is_ended_with_it(place, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(root_helper, "RESET_S", 2.0)  # it tells its pid before, however busy
    (commands / "reset_gpu").write_text(
        f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n")
    with pytest.raises(root_helper.Failed, match="not done within"):
        carry_out(reset(), place)
    pid = int((tmp_path / "pid").read_text())
    asyncio.run(until(lambda: not procfs.process_alive(pid)))


def test_an_order_that_waits_too_long_for_another_is_not_carried_out(place, tmp_path, monkeypatch):
    monkeypatch.setattr(root_helper, "LOCK_S", 0.2)
    (tmp_path / "state").mkdir()
    with open(tmp_path / "state/lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another order is still being carried out"):
            carry_out(reset(), place)
    assert not called(tmp_path)
    carry_out(reset(), place)


# ------------------------------------------------------------------------ with the agent


@pytest.mark.parametrize(("program", "error"), [
    ("", ""), ("exit 3", "carried out: %s/node.d/reset_gpu ended with 3")])
def test_a_gpu_is_reset_while_nobody_of_ours_holds_it(
    agent, unit, commands, tmp_path, program, error
):
    if program:
        (commands / "reset_gpu").write_text(f"#!/bin/sh\n{program}\n")

    async def scenario():
        given = options(tmp_path, actions__allow=("reset_gpu",))
        async with agent(**given) as (daemon, node):
            held, real = [], daemon.state.runner.without

            @asynccontextmanager
            async def without(name):
                async with real(name):
                    held.append((name, len(unit.intents)))
                    yield
                    held.append((name, len(unit.intents)))

            daemon.state.runner.without = without
            node.incidents, node.todo = (INCIDENT,), [RESET]
            daemon.wake("test")
            await until(lambda: node.seen[-1].outcomes)
            (outcome,) = node.seen[-1].outcomes
            wanted = error % tmp_path if error else ""
            assert (outcome.ok, outcome.error) == (not error, wanted)
            assert unit.intents == [1] and held == [("nvidia", 0), ("nvidia", 1)]
            node.todo = [replace(RESET, id="8/node/node-a/reset_gpu/1")]
            daemon.wake("test")
            await until(lambda: len(node.seen[-1].outcomes) == 2)
            again = node.seen[-1].outcomes[1].error
            assert again.startswith("reset_gpu of 0000:4e:00.0 was carried out in this boot")

    asyncio.run(scenario())
    wanted = [] if program else ["reset_gpu node-a gpu_needs_reset 0000:4e:00.0"]
    assert called(tmp_path) == wanted
    assert (tmp_path / "kept/i1.json").exists()


@pytest.mark.parametrize(("program", "calls"), [
    ("", ["reset_gpu node-a gpu_needs_reset 0000:4e:00.0"]),
    ("exit 3", ["reboot node-a gpu_needs_reset"]),
])
def test_a_line_of_the_kernels_becomes_one_reset(
    agent, unit, commands, tmp_path, monkeypatch, program, calls
):
    """The whole way with the real core; where the reset fails, the runbook's next rung."""
    monkeypatch.setattr(repair, "SETTLE_S", 0.1)
    (tmp_path / "kmsg").write_text(f"3,5,1,-;{LINE}\n")
    if program:
        (commands / "reset_gpu").write_text(f"#!/bin/sh\n{program}\n")
    allow = {"actions__allow": ("reset_gpu", "reboot_node")}

    async def scenario():
        given = {"collectors__kmsg": str(tmp_path / "kmsg"), "agent__tick_s": 0.05}
        node = core(tmp_path, **allow)
        async with agent(node=node, **given, **options(tmp_path, **allow)) as (daemon, _):
            def said() -> list[str]:
                return [text for one in daemon.incident_log.incidents.values()
                        for _, text in one.timeline]

            last = "reboot_node: the node's unit took it" if program else "the GPU was reset"
            await until(lambda: last in said(), 60.0, said)
            steps = daemon.state.steps
            await until(lambda: daemon.state.steps > steps + 10)
            (one,) = daemon.incident_log.incidents.values()
            assert (one.state == "closed") == (not program)

    asyncio.run(scenario())
    assert called(tmp_path) == calls and len(unit.intents) == 1 + bool(program)
