"""The daemon with a fake core and a fake launcher on a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

from fakes import FakeLauncher, joined, rank_level, until
from msgspec.structs import replace
from waiting import LIMIT_S

from holdfast.agent.core.model import Effect, Incident, Start, StoreWrite, TakeEvidence
from holdfast.agent.history.incident_log import PHASES


def start_effect(generation=1, run="demo", deadline_s=LIMIT_S):
    body = Start(run=run, generation=generation, ranks=(0, 1), keep=(), world=2,
                 resume={"kind": "fresh"}, reason="test")
    effect_id = f"{generation}/run/{run}/start/1"
    return Effect(effect_id, "start", f"run/{run}", "test", deadline_s, body)


def test_a_launcher_registers_and_gets_orders(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node), joined(tmp_path, node) as launcher:
            welcome = await launcher.receive("welcome")
            assert welcome["node"] == "node-a" and welcome["generation"] == 0
            assert node.seen[-1].runs[0].run == "demo" and node.seen[-1].runs[0].connected
            node.todo = [start_effect()]
            daemon.wake("test")
            order = await launcher.receive("do")
            assert order["kind"] == "start" and order["body"]["generation"] == 1
            assert order["body"]["ranks"] == [0, 1] and order["body"]["resume"]["kind"] == "fresh"
            launcher.send(t="outcome", id=order["id"], ok=True)
            await until(lambda: node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].ok
            launcher.send(t="outcome", id=order["id"], ok=True)  # again: no second outcome
            launcher.send(t="bye", code=0)
            await until(lambda: not node.seen[-1].runs)
            assert daemon.performer.counters[("actions", ("start", "", "ok"))] == 1

    asyncio.run(scenario())


def test_a_restart_is_a_start_because_of_a_fault(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node), joined(tmp_path, node) as launcher:
            # A second submission goes on as generation 4; then a rank of it is killed.
            for effect in (start_effect(4), replace(start_effect(5), fault="rank_killed")):
                node.todo = [effect]
                daemon.wake("test")
                order = await launcher.receive("do")
                launcher.send(t="outcome", id=order["id"], ok=True)
                await until(lambda: node.seen[-1].outcomes)
            wanted = {("restarts", ("demo", "rank_killed")): 1}
            await until(lambda: {key: value for key, value in daemon.performer.counters.items()
                                 if key[0] == "restarts"} == wanted)

    asyncio.run(scenario())


def test_pages_and_processes_become_levels(agent, tmp_path, monkeypatch):
    async def scenario():
        child = subprocess.Popen(["sleep", "60"])
        try:
            async with agent() as (daemon, node):
                launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
                launcher.hello()
                page = launcher.page(0, child.pid)
                launcher.levels(generation=1, state="running", ranks=[rank_level(0, child.pid)])
                await until(lambda: node.seen and node.seen[-1].runs)
                from holdfast.worker import page as layout

                page[layout.F_STEP] = 7
                page[layout.F_PHASE] = layout.PHASES.index("collective")
                daemon.wake("test")
                await until(lambda: node.seen[-1].runs[0].ranks[0].step == 7)
                rank = node.seen[-1].runs[0].ranks[0]
                assert rank.phase == "collective" and rank.proc_state == "S"
                os.kill(child.pid, signal.SIGSTOP)
                await until(lambda: node.seen[-1].runs[0].ranks[0].proc_state == "T")
                await until(lambda: node.seen[-1].runs[0].ranks[0].stopped_s > 0.5)
                os.kill(child.pid, signal.SIGCONT)
                await until(lambda: node.seen[-1].runs[0].ranks[0].stopped_s == 0.0)
                woken, wake = [], daemon.launchers.listener.wake
                monkeypatch.setattr(daemon.launchers.listener, "wake",
                                    lambda why: woken.append((why, node.steps)) or wake(why))
                child.kill()
                (at,) = await until(lambda: [steps for why, steps in woken if why == "rank died"])
                await until(lambda: node.steps > at)
                launcher.close()
                await until(lambda: not node.seen[-1].runs[0].connected)
        finally:
            child.kill()
            child.wait()

    asyncio.run(scenario())


def test_put_goes_to_the_store_once_and_a_conflict_says_so(agent):
    async def scenario():
        async with agent() as (daemon, node):
            def put(number):
                return Effect(f"1/run/x/put/{number}", "put", "run/x", "plan", 5.0,
                              StoreWrite("run/x", 0, b'{"generation":4}'))

            node.todo = [put(1)]
            daemon.wake("test")
            await until(lambda: node.seen and node.seen[-1].store.docs)
            node.todo = [put(2)]
            daemon.wake("test")
            await until(lambda: len(node.seen[-1].outcomes) == 2)
            first, second = node.seen[-1].outcomes
            assert first.ok and not second.ok and "version 1" in second.error
            assert daemon._highest_generation("x") == 4

    asyncio.run(scenario())


def test_a_crashing_core_and_a_crashing_part_stop_nothing(agent, tmp_path):
    async def scenario():
        async with agent(agent__tick_s=0.05) as (daemon, node):
            node.fail = True
            daemon.wake("test")
            await until(lambda: daemon.state.errors.counts.get("core", 0) >= 3)
            node.fail = False
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            await launcher.receive("welcome")
            before = daemon.state.steps
            await until(lambda: daemon.state.steps > before)
            launcher.close()

    asyncio.run(scenario())


def test_a_memory_that_cannot_be_written_keeps_no_effect_back(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node), joined(tmp_path, node) as launcher:
            node.memory = lambda: "/job\udcff".encode()
            node.todo = [start_effect()]
            daemon.wake("test")
            order = await launcher.receive("do")
            assert order["kind"] == "start" and daemon.state.errors.counts["memory"] >= 1
            assert not daemon.state.errors.counts.get("core")
            await daemon.reload()
            assert daemon.state.reload_ok and daemon.node is node  # the living one goes on

    asyncio.run(scenario())


def test_an_order_that_no_packet_takes_fails_alone(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node), joined(tmp_path, node) as launcher:
            body = TakeEvidence("demo", 1, 0, 1, "why \udcff")
            node.todo = [Effect("1/e/1", "evidence", "run/demo/rank/0", "x", LIMIT_S, body),
                         start_effect()]
            daemon.wake("test")
            assert (await launcher.receive("do"))["kind"] == "start"
            await until(lambda: node.seen[-1].outcomes)
            (failed,) = node.seen[-1].outcomes
            assert failed.id == "1/e/1" and failed.error.startswith("cannot be sent: ")
            assert daemon.performer.in_flight == 1

    asyncio.run(scenario())


def test_a_name_of_the_machine_that_is_no_text_is_made_one(agent, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node\udcff")

    async def scenario():
        async with agent(agent__node="") as (daemon, node):
            assert daemon.state.name == node.name == "node\ufffd"

    asyncio.run(scenario())


def test_an_incident_is_said_counted_and_remembered_once(agent, tmp_path):
    opened = Incident(
        id="i1", fault="rank_killed", subject="run/demo/rank/1", severity="fatal", run="demo",
        generation=1, opened_wall_s=1.0, opened_boot_s=1.0, reason="killed by SIGKILL",
        culprit="rank 1 (pid 7) on node-a",
    )

    async def first_life():
        async with (
            agent() as (daemon, node),
            joined(tmp_path, node, generation=1, state="running") as launcher,
        ):
            node.incidents = (opened,)
            daemon.wake("test")
            line = await launcher.receive("say")
            assert line["text"] == "rank 1 (pid 7) on node-a: killed by SIGKILL"
            assert line["rank"] == 1 and line["level"] == "error"
            node.incidents = (replace(
                opened, state="closed", lost_steps=1, lost_s=0.44, detection_s=0.3,
                restart_s=0.14),)
            daemon.wake("test")
            line = await launcher.receive("say")
            assert line["text"] == "training goes on after rank_killed: 0.44 s and 1 step lost"

    async def second_life():
        async with agent() as (daemon, node):
            assert daemon.incident_log.incidents["i1"].state == "closed"
            assert daemon.performer.counters[("lost_steps", ("demo",))] == 1.0
            counters = daemon.performer.counters
            assert {phase: counters[("recovery_sum", (phase,))] for phase in PHASES} == {
                "total": 0.44, "detection": 0.3, "decision": 0.0, "restart": 0.14}
            assert counters[("recovery_bucket", ("total", "0.5"))] == 1.0
            assert ("recovery_bucket", ("total", "0.2")) not in counters

    asyncio.run(first_life())
    asyncio.run(second_life())


def test_an_unanswered_intent_is_reported_once_and_never_replayed(agent, tmp_path):
    async def first_life():
        async with agent() as (daemon, node), joined(tmp_path, node) as launcher:
            node.todo = [start_effect()]
            daemon.wake("test")
            await launcher.receive("do")

    async def second_life():
        async with agent() as (daemon, node):
            assert [one.id for one in daemon.journal.seed.unfinished] == [start_effect().id]
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            launcher.send(t="outcome", id=start_effect().id, ok=True)  # resent after hello
            await until(lambda: node.seen and node.seen[-1].outcomes)
            assert node.seen[-1].outcomes[0].ok
            later = replace(start_effect(), id="3/run/demo/start/1")
            node.todo = [start_effect(), later]
            daemon.wake("test")
            assert (await launcher.receive("do"))["id"] == later.id  # and no other before it
            assert not any(packet["t"] == "do" for packet in launcher.mail)
            launcher.close()

    asyncio.run(first_life())
    asyncio.run(second_life())


def test_evidence_names_the_source_line(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node):
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            launcher.page(0, os.getpid())
            launcher.levels(generation=1, state="running", ranks=[rank_level(0, os.getpid())])
            await until(lambda: node.seen and node.seen[-1].runs)
            body = TakeEvidence("demo", 1, 0, os.getpid(), "stall")
            node.todo = [Effect("1/e/1", "evidence", "run/demo/rank/0", "stall", LIMIT_S, body)]
            daemon.wake("test")
            order = await launcher.receive("do")
            launcher.send(t="outcome", id=order["id"], ok=True, detail='{"where":"a.py:3 in f"}')
            await until(lambda: node.seen[-1].runs[0].ranks[0].where == "a.py:3 in f")
            launcher.close()

    asyncio.run(scenario())


def test_a_deadline_is_an_outcome(agent):
    async def scenario():
        async with agent() as (daemon, node):
            node.todo = [start_effect(deadline_s=0.1)]
            daemon.wake("test")
            await until(lambda: node.seen and node.seen[-1].outcomes)
            assert "no outcome within" in node.seen[-1].outcomes[0].error

    asyncio.run(scenario())
