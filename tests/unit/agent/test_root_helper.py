"""Orders for the whole node: what the root side takes, and the way there from a kernel line.

Nothing here can touch the machine: see root_unit.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fakes import until
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from root_unit import (
    INCIDENT,
    REBOOT,
    SYSTEMDS_REBOOT,
    Unit,
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
from holdfast.agent.actions.root_helper import Place, Refused, carry_out
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.core.model import Request
from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes import repair
from holdfast.agent.system.procfs import boot_id
from holdfast.agent.web import status

assert commands and place and unit  # fixtures


def test_each_verb_is_carried_out_once_a_boot(place, tmp_path):
    assert root_helper.VERBS[-1] == "reset_gpu"
    for verb in root_helper.VERBS:
        of = reset if verb == "reset_gpu" else order
        carry_out(of(verb=verb), place)
        for again in (of(verb=verb), of(verb=verb, id="2/another/1")):
            with pytest.raises(Refused, match="carried out in this boot"):
                carry_out(again, place)
    wanted = [f"{verb} node-a gpu_fell_off_bus" for verb in root_helper.VERBS]
    wanted[-1] += " 0000:4e:00.0"
    assert called(tmp_path) == wanted
    carry_out(order(boot_id="b2"), place._replace(boot_id="b2"))
    assert len(called(tmp_path)) == 5


def test_reboots_are_few_a_day(place, tmp_path):
    for number in range(5):
        now = place._replace(boot_id=f"b{number}", wall_s=1000.0 + number)
        line = order(boot_id=now.boot_id, wall_s=now.wall_s)
        if number < root_helper.REBOOTS_MAX:
            carry_out(line, now)
        else:
            with pytest.raises(Refused, match="a person must look"):
                carry_out(line, now)
    assert len(called(tmp_path)) == root_helper.REBOOTS_MAX
    later = place._replace(boot_id="b9", wall_s=1e6)
    carry_out(order(boot_id="b9", wall_s=1e6), later)
    assert len(called(tmp_path)) == root_helper.REBOOTS_MAX + 1


@pytest.mark.parametrize("line", [
    b"", b"\n", order()[:-1], b"{}\n", b"[]\n", b"null\n", b"\xff\xfe\n", b"[" * 3000 + b"\n",
    order(verb="halt"), order(verb="reboot; rm"), order(verb=["reboot"]), order(verb="Reboot"),
    order(more=1), order(id=""), order(id="a b"), order(id="x" * 400), order(fault="../x"),
    order(fault="a b"), order(fault=""), order(node="node-b"), order(node=1), order(boot_id="b0"),
    order(wall_s=900.0), order(wall_s=1100.0), order(wall_s="1000"), order(wall_s=True),
    order(wall_s=float("nan")), order(wall_s=float("inf")), order(fault="x" * 5000),
    order(wall_s=10**400), order(wall_s=-(10**400)),
])
def test_what_is_no_order_for_here_and_now_does_nothing(place, tmp_path, line):
    with pytest.raises(Refused):
        carry_out(line, place)
    assert not called(tmp_path) and not (tmp_path / "state").exists()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.dictionaries(
    st.sampled_from([*root_helper.FIELDS, "device", "x"]),
    st.none() | st.booleans() | st.floats() | st.text(max_size=9)
    | st.sampled_from(["reboot", "reset_gpu"]),
).map(lambda value: json.dumps(value).encode() + b"\n"))
def test_no_bytes_make_an_order_by_chance(line):
    with pytest.raises(Refused):
        root_helper.check(root_helper.parse(line), Place(None, None, "\x00", "\x00", 0.0))


def test_a_program_that_others_may_change_is_not_run(place, commands, tmp_path):
    for path in (commands / "drain", commands):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(Refused, match="chmod"):
            carry_out(order(verb="drain"), place)
        path.chmod(mode)
    (commands / "drain").unlink()
    (commands / "drain").symlink_to("/bin/true")
    with pytest.raises(Refused):
        carry_out(order(verb="drain"), place)
    (commands / "drain").unlink()
    with pytest.raises(Refused, match="put the program for drain there"):
        carry_out(order(verb="drain"), place)
    assert not called(tmp_path) and not (tmp_path / "state/done").exists()


@pytest.mark.parametrize(("owner", "own", "runs"), [
    (0, 0, True), (0, 7, True), (7, 7, True), (8, 7, False), (1, 0, False), (1, 7, False)])
def test_a_program_is_roots_or_the_units_own(place, monkeypatch, owner, own, runs):
    status = SimpleNamespace(st_uid=owner, st_mode=0o100755)
    monkeypatch.setattr(os, "lstat", lambda path: status)
    monkeypatch.setattr(os, "geteuid", lambda: own)
    drain = {"verb": "drain", "fault": "x"}
    if runs:
        assert root_helper.command_of(drain, place)[1:] == ("node-a", "x")
        return
    with pytest.raises(Refused, match="may be changed by others than root"):
        root_helper.command_of(drain, place)


def test_its_memory_may_lie_in_folders_that_are_not_there_yet(place, tmp_path):
    state = tmp_path / "var/lib/holdfast-node"
    carry_out(order(), place._replace(state=state))
    assert (state / "done").exists() and state.stat().st_mode & 0o777 == 0o700


def test_an_order_waits_for_the_one_before_it_and_not_for_ever(place, tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    looks = []
    with open(tmp_path / "state/lock", "a") as before:
        fcntl.flock(before, fcntl.LOCK_EX)

        def sleep(seconds):
            looks.append(seconds)
            if len(looks) == 3:
                fcntl.flock(before, fcntl.LOCK_UN)

        monkeypatch.setattr(root_helper, "time", SimpleNamespace(
            sleep=sleep, monotonic=time.monotonic))
        carry_out(order(verb="drain"), place)
        assert len(looks) == 3 and len(called(tmp_path)) == 1
        fcntl.flock(before, fcntl.LOCK_EX)
        monkeypatch.setattr(root_helper, "LOCK_S", -1.0)
        with pytest.raises(Refused, match="another order is still being carried out"):
            carry_out(order(verb="reboot"), place)
    assert len(looks) == 3 and len(called(tmp_path)) == 1


def test_it_is_a_program_by_itself():
    done = subprocess.run([sys.executable, root_helper.__file__, "--help"], capture_output=True,
                          timeout=60, check=True)
    assert b"The root side of Holdfast's orders for a node." in done.stdout


def test_a_reboot_without_a_program_is_systemds(place, commands):
    (commands / "reboot").unlink()
    assert SYSTEMDS_REBOOT[0].endswith("/systemctl") and SYSTEMDS_REBOOT[-1] == "reboot"
    reboot = {"verb": "reboot", "fault": "x"}
    assert root_helper.command_of(reboot, place) == root_helper.REBOOT == ("/bin/false",)


def test_a_program_that_cannot_be_looked_at_is_not_passed_over_for_systemds(place, commands):
    with pytest.raises(Refused, match="Not a directory"):
        carry_out(order(), place._replace(commands=commands / "drain"))


@pytest.mark.parametrize("junk", [b"{", b"[]\n", b'{"verb": 1}\n', b"\xff\n", b"null\n",
    b'{"boot_id": "b1", "verb": "reboot", "id": "x", "wall_s": 1' + b"0" * 400 + b"}\n"])
def test_a_memory_that_cannot_be_read_lets_nothing_happen(place, tmp_path, junk):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/done").write_bytes(junk)
    with pytest.raises(Refused, match="look at it"):
        carry_out(order(), place)
    assert not called(tmp_path) and (tmp_path / "state/done").read_bytes() == junk


def test_a_program_that_fails_was_carried_out_all_the_same(place, commands, tmp_path):
    (commands / "drain").write_text(f"#!/bin/sh\necho x >> {tmp_path}/called\nexit 3\n")
    with pytest.raises(Refused, match="ended with 3"):
        carry_out(order(verb="drain"), place)
    with pytest.raises(Refused, match="carried out in this boot"):
        carry_out(order(verb="drain"), place)
    assert called(tmp_path) == ["x"]


# ------------------------------------------------------------------------ with the agent


def test_an_order_is_in_the_journal_before_it_leaves_and_is_carried_out_once(
    agent, unit, tmp_path
):
    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, node):
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen[-1].outcomes)
            (outcome,) = node.seen[-1].outcomes
            assert outcome.ok and outcome.error == "" and unit.intents == [1]
            again = "8/node/node-a/reboot_node/1"
            node.todo = [replace(REBOOT, id=again)]
            daemon.wake("test")
            await until(lambda: len(node.seen[-1].outcomes) == 2)
            assert "carried out in this boot" in node.seen[-1].outcomes[1].error
            counters = daemon.performer.counters
            assert counters[("actions", ("reboot_node", "gpu_fell_off_bus", "ok"))] == 1
            assert counters[("actions", ("reboot_node", "gpu_fell_off_bus", "failed"))] == 1

    asyncio.run(scenario())
    assert called(tmp_path) == ["reboot node-a gpu_fell_off_bus"]
    assert json.loads((tmp_path / "kept/i1.json").read_text())["reason"] == "XID 79"
    done = json.loads((tmp_path / "unit/done").read_text())
    assert done["boot_id"] == boot_id() and done["id"] == REBOOT.id


def test_a_unit_of_these_tests_never_has_the_machines_reboot(agent, unit, tmp_path):
    (tmp_path / "node.d/reboot").unlink()

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, node):
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].error == "/bin/false ended with 1"

    asyncio.run(scenario())


def test_no_order_leaves_before_its_intent_is_on_disk(agent, unit, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.actions.performer.SYNC_WAIT_S", 0.3)

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, node):
            await until(lambda: node.steps)
            daemon.journal._database.execute("PRAGMA busy_timeout=20")
            other = sqlite3.connect(tmp_path / "state/journal.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].error.startswith(repair.REFUSED)
            other.execute("ROLLBACK")
            other.close()

    asyncio.run(scenario())
    assert unit.intents == [] and called(tmp_path) == []


def test_an_order_that_was_under_way_when_the_agent_died_is_not_sent_again(
    agent, commands, tmp_path
):
    unit = Unit(tmp_path, answers=False)

    async def first():
        async with agent(**options(tmp_path)) as (daemon, node):
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: unit.held)

    async def second():
        async with agent(**options(tmp_path)) as (daemon, node):
            node.todo = [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen and node.seen[-1].outcomes)
            assert "before it learned the outcome" in node.seen[-1].outcomes[0].error

    try:
        asyncio.run(first())
        asyncio.run(second())
        assert len(unit.intents) == 1
    finally:
        unit.close()


@pytest.mark.parametrize(("more", "said"), [
    ({}, "refused: %s: No such file or directory: is holdfast-node.socket enabled?"),
    ({"evidence__store": ""}, "refused: evidence.store is not set"),
    ({"evidence__store": "/proc/no/such"}, "refused: evidence.store:"),
])
def test_what_keeps_an_order_here_says_so(agent, tmp_path, more, said):
    async def scenario():
        given = options(tmp_path, **more) | {"actions__allow": ()}
        async with agent(**given) as (daemon, node):
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen and node.seen[-1].outcomes)
            wanted = said.replace("%s", str(tmp_path / "n.sock"))
            assert node.seen[-1].outcomes[0].error.startswith(wanted)

    asyncio.run(scenario())


def test_a_unit_that_talks_nonsense_is_an_error_and_no_more(agent, tmp_path):
    async def scenario():
        async def nonsense(reader, writer):
            await reader.readline()
            writer.write(b"\xff" * 9000)
            writer.close()

        server = await asyncio.start_unix_server(nonsense, tmp_path / "n.sock")
        async with agent(**options(tmp_path)) as (daemon, node):
            node.incidents, node.todo = (INCIDENT,), [REBOOT]
            daemon.wake("test")
            await until(lambda: node.seen and node.seen[-1].outcomes)
            assert not node.seen[-1].outcomes[0].ok and node.seen[-1].outcomes[0].error
        server.close()

    asyncio.run(scenario())


def test_a_pause_of_an_idle_node_is_shown_and_on_disk_at_once(agent, tmp_path):
    def kept() -> bytes:
        with sqlite3.connect(tmp_path / "state/journal.db") as database:
            rows = database.execute("SELECT body FROM memory").fetchall()
        database.close()
        return bytes(rows[0][0]) if rows else b""

    async def scenario():
        async with agent(node=core(tmp_path), **options(tmp_path)) as (daemon, _):
            await until(lambda: daemon.state.steps > 1)
            assert not status.status(daemon.state)["paused"]
            wish = Request("q1", "pause", "node/node-a", "a fan")
            daemon.operators.request(wish)
            await until(lambda: status.node_paused(daemon.state))
            assert status.status(daemon.state)["paused"]
            await until(lambda: b'"paused":"a fan"' in kept())  # not with the next save, in 10 s

    asyncio.run(scenario())


def test_a_line_of_the_kernels_becomes_one_reboot(agent, unit, tmp_path, monkeypatch):
    """The whole way with the real core: line, incident, order, unit, program; and no second."""
    monkeypatch.setattr(repair, "SETTLE_S", 0.1)
    line = b"NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus."
    (tmp_path / "kmsg").write_bytes(b"3,5,1,-;" + line + b"\n" + b"3,6,2,-;" + line + b"\n")

    async def life(node):
        async with agent(node=node, collectors__kmsg=str(tmp_path / "kmsg"), agent__tick_s=0.05,
                         **options(tmp_path)) as (daemon, _):
            await until(lambda: called(tmp_path))
            taken = "reboot_node: the node's unit took it"
            await until(lambda: any(
                text == taken for one in daemon.incident_log.incidents.values()
                for _, text in one.timeline
            ))
            steps = daemon.state.steps
            await until(lambda: daemon.state.steps > steps + 10)
            return node.memory()

    memory = asyncio.run(life(core(tmp_path)))
    begun = time.time()
    again = core(tmp_path)
    again = Node("node-a", again.settings, again.runbooks, memory)
    asyncio.run(life(again))
    assert called(tmp_path) == ["reboot node-a gpu_fell_off_bus"] and unit.intents == [1]
    with sqlite3.connect(tmp_path / "state/journal.db") as database:
        rows = database.execute(
            "SELECT kind, ok, begun_wall_s FROM intents WHERE kind = 'reboot_node'").fetchall()
    database.close()
    assert [row[:2] for row in rows] == [("reboot_node", 1)] and rows[0][2] < begun


@pytest.mark.parametrize(("text", "said"), [
    ('[actions]\nallow = ["rebot_node"]', "'rebot_node' is no action: did you mean reboot_node?"),
    ('[actions]\nallow = ["reboot_node"]', "evidence.store is empty, but actions.allow names"),
    ('[actions]\nallow = ["reset_gpu"]', "evidence.store is empty, but actions.allow names"),
])
def test_what_may_not_be_allowed_is_an_error_of_the_configuration(tmp_path, text, said):
    file = tmp_path / "agent.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="actions.allow") as caught:
        load(file)
    assert said in str(caught.value)
    file.write_text('[actions]\nallow = ["remove_lock"]')
    assert load(file).config.actions.allow == ("remove_lock",)
