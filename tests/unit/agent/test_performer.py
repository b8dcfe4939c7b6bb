"""Effects at the edge while the journal is stalled, the launcher dies, or rubbish comes in."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time

from fakes import FakeLauncher, joined, until
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import DecodeError
from msgspec.structs import replace
from waiting import LIMIT_S

from holdfast.agent.core.model import Effect, Incident, Resume, Start, Stop, StoreWrite
from holdfast.agent.launchers import protocol

STOP = Effect("1/run/demo/stop/1", "stop", "run/demo", "test", LIMIT_S,
              Stop("demo", 1, (), 1.0, "test"))


def intents(folder):
    """Id of each effect in the journal that an agent left -> whether it was done."""
    database = sqlite3.connect(folder / "state" / "journal.db")
    return dict(database.execute("SELECT id, ok FROM intents").fetchall())


def is_quiet(journal):
    return not (journal._queue or journal._taken_s)


def test_a_stalled_journal_lets_ordinary_effects_go_on_and_refuses_lasting_ones(agent, tmp_path):
    async def scenario():
        async with (
            agent() as (daemon, node),
            joined(tmp_path, node, generation=1, state="running") as launcher,
        ):
            daemon.journal._database.execute("PRAGMA busy_timeout=20")
            journal = daemon.journal
            # Who joined is written by then: of a journal that has failed nobody waits for a commit.
            await until(lambda: is_quiet(journal))
            other = sqlite3.connect(tmp_path / "state" / "journal.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            node.todo = [STOP, replace(STOP, id="2", kind="reboot_node", outlives_node=True)]
            daemon.wake("test")
            order = await launcher.receive("do")
            assert order["id"] == STOP.id  # while the other still holds the journal
            await until(lambda: node.seen[-1].outcomes)
            assert "journal is stalled" in node.seen[-1].outcomes[0].error
            await until(lambda: node.seen[-1].journal_stalled)
            other.execute("ROLLBACK")
            other.close()
            await until(lambda: not node.seen[-1].journal_stalled)
            launcher.send(t="outcome", id=STOP.id, ok=True)
            await until(lambda: len(node.seen[-1].outcomes) == 2)

    asyncio.run(scenario())
    assert intents(tmp_path) == {STOP.id: 1, "2": 0}


def test_what_another_node_orders_is_journalled_and_carried_out_once(agent, tmp_path):
    async def scenario():
        async with (
            agent() as (daemon, node),
            joined(tmp_path, node, generation=1, state="running") as launcher,
        ):
            first, second = (asyncio.ensure_future(daemon.performer.obey(STOP)) for _ in range(2))
            assert (await launcher.receive("do"))["id"] == STOP.id
            launcher.send(t="outcome", id=STOP.id, ok=True, detail="done")
            assert (await first).detail == (await second).detail == "done"
            assert (await daemon.performer.obey(STOP)).ok
            far = replace(STOP, id="2", body=replace(STOP.body, node="b"))
            daemon.performer.perform([far], None)
            await until(lambda: "2" in daemon.performer._levels)
            assert "no other node" in daemon.performer._levels["2"][0].error

    asyncio.run(scenario())
    assert intents(tmp_path) == {STOP.id: 1, "2": 0}


def test_an_order_in_flight_is_sent_again_when_its_launcher_comes_back(agent, tmp_path):
    async def scenario():
        async with (
            agent() as (daemon, node),
            joined(tmp_path, node, generation=1, state="running") as launcher,
        ):
            node.todo = [STOP]
            daemon.wake("test")
            await launcher.receive("do")
            launcher.close()
            await until(lambda: not node.seen[-1].runs[0].connected)
            again = FakeLauncher(tmp_path / "run" / "agent.sock")
            again.hello()
            assert (await again.receive("do"))["id"] == STOP.id
            again.send(t="outcome", id=STOP.id, ok=True)
            again.send(t="outcome", id=STOP.id, ok=True)
            await until(lambda: node.seen[-1].outcomes)
            assert daemon.performer.counters[("actions", ("stop", "", "ok"))] == 1
            again.close()

    asyncio.run(scenario())


FIRST = """
import json, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(json.dumps({"t": "hello", "run": "demo", "protocol": 1}).encode())
sock.send(json.dumps({"t": "levels", "n": 1, "generation": 1, "state": "running"}).encode())
while json.loads(sock.recv(65536))["t"] != "do":
    pass
print("got it", flush=True)
sock.recv(65536)
"""


def test_an_order_never_reaches_a_later_launcher_of_the_same_name(agent, tmp_path):
    """Its ranks and pids are those of the launcher that it was decided for."""

    async def scenario():
        async with agent() as (daemon, node):
            path = tmp_path / "run" / "agent.sock"
            first = await asyncio.create_subprocess_exec(
                sys.executable, "-c", FIRST, str(path), stdout=asyncio.subprocess.PIPE
            )
            await until(lambda: node.seen and node.seen[-1].runs)
            node.todo = [STOP]
            daemon.wake("test")
            assert await first.stdout.readline() == b"got it\n"
            first.kill()
            await first.wait()
            await until(lambda: not node.seen[-1].runs[0].connected)
            later = FakeLauncher(path)
            later.hello()
            await later.receive("welcome")
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].error == "another launcher serves the run now"
            later.send(t="outcome", id=STOP.id, ok=True)  # nor does its word count for it
            node.todo = [replace(STOP, id="1/run/demo/stop/2")]
            later.levels(generation=1, state="running", ranks=[])
            order = await later.receive("do")
            assert order["id"] == "1/run/demo/stop/2"
            assert all(packet["t"] != "do" for packet in later.mail)
            assert daemon.performer.counters[("actions", ("stop", "", "failed"))] == 1
            assert ("actions", ("stop", "", "ok")) not in daemon.performer.counters
            later.close()

    asyncio.run(scenario())


def test_a_launcher_answers_for_its_own_run_alone(agent, tmp_path):
    async def first_life():
        async with (
            agent() as (daemon, node),
            joined(tmp_path, node, generation=1, state="running") as launcher,
        ):
            node.todo = [STOP]
            daemon.wake("test")
            await launcher.receive("do")

    async def second_life():
        async with agent() as (daemon, node):
            launchers = {run: FakeLauncher(tmp_path / "run" / "agent.sock", run=run)
                         for run in ("dem", "demo")}
            for launcher in launchers.values():
                launcher.hello()
                launcher.send(t="outcome", id=STOP.id, ok=launcher.run == "demo", error="not mine")
                launcher.levels(generation=1, state="running", ranks=[])
                await until(lambda run=launcher.run: node.seen and any(
                    one.run == run for one in node.seen[-1].runs))
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].ok
            for launcher in launchers.values():
                launcher.close()

    asyncio.run(first_life())
    asyncio.run(second_life())


def test_a_private_agent_ends_when_its_launcher_was_killed(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.daemon.parts.private_life.AFTER_LOSS_S", 0.3)
    code = (
        "import socket,sys,time;s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]);s.send(b'{\"t\":\"hello\",\"run\":\"demo\",\"protocol\":1}');"
        "s.recv(65536);print('up',flush=True);time.sleep(60)"
    )

    async def scenario():
        async with agent(private=True, run="demo") as (daemon, _node):
            path = str(tmp_path / "run" / "agent.sock")
            launcher = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
            await asyncio.to_thread(launcher.stdout.readline)
            assert not daemon.stop.is_set()
            launcher.send_signal(signal.SIGKILL)
            launcher.communicate()
            await asyncio.wait_for(daemon.stop.wait(), 30.0)

    asyncio.run(scenario())


def test_incidents_are_kept_beside_the_journal(agent, tmp_path):
    incident = Incident("demo/1", "rank_killed", "run/demo/rank/0", "fatal", "demo", 1, 1.0, 1.0,
                        "killed", "rank 0")

    async def scenario():
        async with agent(evidence__store=str(tmp_path / "kept")) as (daemon, node):
            await until(lambda: node.steps)
            node.incidents = (incident,)
            daemon.wake("test")
            await until(lambda: (tmp_path / "kept" / "demo_1.json").exists())
        assert json.loads((tmp_path / "kept" / "demo_1.json").read_text())["id"] == "demo/1"

    asyncio.run(scenario())


def test_urgent_wakes_are_joined_and_the_first_is_immediate(agent):
    async def scenario():
        async with agent(agent__tick_s=0.9) as (daemon, node):
            await until(lambda: node.steps)
            before, begin_s = node.steps, time.monotonic()
            daemon.wake("first")
            await until(lambda: node.steps > before)
            while node.steps - before < 20:
                daemon.wake("storm")
                await asyncio.sleep(0)
            took_s = time.monotonic() - begin_s
            assert node.steps - before <= 2 + took_s / 0.01, "at most once in 10 ms"

    asyncio.run(scenario())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["t", "run", "ranks", "rank", "id", "ok", "commits", "n"]), inner),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode()))
def test_no_packet_raises_anything_but_a_decode_error(packet):
    try:
        protocol.decode(packet)
    except DecodeError:
        pass


def test_a_restart_is_counted_once_however_often_the_agent_dies(agent, tmp_path):
    """Neither lost with the agent that asked for it, nor counted again by the one behind it."""
    body = Start("demo", 2, (0, 1), (), 2, Resume("own"), "test")
    start = Effect("2/run/demo/start/1", "start", "run/demo", "t", LIMIT_S, body,
                   fault="rank_killed")

    def restarts(daemon):
        return {key[1]: n for key, n in daemon.performer.counters.items() if key[0] == "restarts"}

    async def scenario():
        async with agent() as (_, node), joined(tmp_path, node, generation=1) as launcher:
            node.todo = [start]
            launcher.levels(generation=1, state="running", ranks=[])
            assert (await launcher.receive("do"))["id"] == start.id
        async with agent() as (daemon, node), joined(tmp_path, node, generation=2) as launcher:
            assert restarts(daemon) == {}
            launcher.send(t="outcome", id=start.id, ok=True)
            await until(lambda: restarts(daemon) == {("demo", "rank_killed"): 1})
            node.todo = [replace(start, id="2/run/demo/start/2")]
            launcher.levels(generation=2, state="running", ranks=[])
            await launcher.receive("do")
            launcher.send(t="outcome", id="2/run/demo/start/2", ok=True)
            await until(lambda: any(o.id.endswith("/2") for o in node.seen[-1].outcomes))
            assert restarts(daemon) == {("demo", "rank_killed"): 1}
        async with agent() as (daemon, node):
            assert restarts(daemon) == {("demo", "rank_killed"): 1}

    asyncio.run(scenario())


def test_a_lease_waits_for_no_disk_and_a_slow_write_for_no_other(agent, tmp_path, monkeypatch):
    """A leader whose renewal comes late leads no more; one run's store is every run's."""
    def put(key, number):
        kind = "lease/r" if key.startswith("lease") else f"store/{key}"
        return Effect(str(number), "put", kind, "test", 5.0, StoreWrite(key, 0, b"x"))

    async def scenario():
        async with agent() as (daemon, node):
            held, done = asyncio.Event(), []

            async def slow(write):
                if write.key == "run/a":
                    await held.wait()
                done.append(write.key)
                return 1

            monkeypatch.setattr(daemon.store, "put", slow)
            daemon.journal._database.execute("PRAGMA busy_timeout=20")
            await until(lambda: is_quiet(daemon.journal))
            other = sqlite3.connect(tmp_path / "state" / "journal.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            node.todo = [put("run/a", 1), put("run/b", 2), put("lease/r", 3)]
            daemon.wake("test")
            await until(lambda: done)
            assert done[0] == "lease/r"  # the other holds the journal, and nobody waits for ever
            other.execute("ROLLBACK")
            other.close()
            await until(lambda: "run/b" in done)
            assert "run/a" not in done
            held.set()
            await until(lambda: len(node.seen[-1].outcomes) == 3)

    asyncio.run(scenario())
    database = sqlite3.connect(tmp_path / "state" / "journal.db")
    assert {row[0] for row in database.execute("SELECT id FROM intents")} == {"1", "2"}
