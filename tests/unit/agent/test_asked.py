"""What people ask for over the API: what is taken, what is refused, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time

import aiohttp
import pytest
from browsing import INCIDENT, browse
from fakes import until

from holdfast.agent.cli.ended import EndedRun
from holdfast.agent.core.model import Runbook, Settings
from holdfast.agent.core.node import Node
from holdfast.agent.history import past_runs
from holdfast.agent.history.journal import Asked, Journal


def test_a_fault_on_purpose_goes_to_the_launcher(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        route = "/api/v1/runs/demo/inject"
        body = {"fault": "stall", "rank": 1, "args": {"seconds": 2}, "reason": "game day",
                "by": "ann"}
        for ok, error in ((False, "rank 1 is not running"), (True, "")):
            asked = asyncio.create_task(unix.post(route, json=body))
            order = await launcher.receive("inject")
            assert (order["fault"], order["rank"], order["args"]) == ("stall", 1, {"seconds": 2})
            async with unix.get("/api/v1/requests") as answer:
                (newest, *_) = await answer.json()
            assert newest["state"] == "waiting" and newest["id"] == order["id"], "before it is done"
            launcher.send(t="outcome", id=order["id"], ok=ok, error=error)
            answer = await asked
            assert answer.status == (200 if ok else 409)
            assert ok or (await answer.json())["error"] == error
        async with unix.get("/api/v1/requests") as answer:
            done, refused = await answer.json()
        for one in (done, refused):
            assert (one["action"], one["subject"]) == ("inject stall", "run/demo/rank/1")
            assert (one["reason"], one["by"]) == ("game day", f"ann (uid {os.getuid()})")
        assert (refused["state"], refused["text"]) == ("refused", "rank 1 is not running")
        assert done["state"] == "done"
        for wrong in ({"fault": "melt", "reason": "x"}, {"fault": "kill"}):
            async with unix.post(route, json=wrong) as answer:
                assert answer.status == 400, wrong

    browse(scenario, agent, tmp_path, inject__enabled=True)


def test_nothing_is_accepted_that_is_not_done(agent, tmp_path):
    """Each field of a body, asked of each verb: taken by those that read it, and named by the
    others."""
    fields = {"for_s": 3600, "rank": 1, "fault": "kill", "args.seconds": {"seconds": 2},
              "args.checks": {"checks": []}, "args.label": {"label": True}}
    readers = {
        "runs/demo/pause": {"for_s"}, "runs/demo/resume": set(), "runs/demo/restart": {"rank"},
        "runs/demo/drain": set(), "runs/demo/inject": {"rank", "fault"},  # a kill lasts no time
        "nodes/node-a/pause": {"for_s"}, "nodes/node-a/resume": set(),
        "nodes/node-a/exclude": set(), "nodes/node-a/release": set(),
        "nodes/node-a/drain": set(), "nodes/node-a/check": {"args.checks"},
        "fleet/pause": {"for_s"}, "fleet/resume": set(), "incidents/demo/1/ack": set(),
        "incidents/demo/1/label": {"args.label"}, "incidents/demo/1/bundle": set(),
    }

    async def scenario(daemon, node, launcher, tcp, unix):
        node.incidents = (INCIDENT,)
        daemon.wake("test")
        await until(lambda: INCIDENT.id in daemon.state.incident_log.incidents)
        for place, read in readers.items():
            for field, value in fields.items():
                name = field.partition(".")[0]
                body = {"reason": "why", name: value}
                if place.endswith("inject") and field != "fault":
                    body["fault"] = "melt"  # refused as well, and by another word
                async with unix.post(f"/api/v1/{place}", json=body) as answer:
                    said = await answer.json()
                    named = answer.status == 400 and said["error"].startswith(f"{field} is not")
                assert named == (field not in read), (place, field, said)
        for fault, wanted in (("stop", 400), ("stall", 403)):
            body = {"reason": "why", "fault": fault, "args": {"seconds": 2}}
            async with unix.post("/api/v1/runs/demo/inject", json=body) as answer:
                assert answer.status == wanted, fault

    browse(scenario, agent, tmp_path)


def test_who_took_a_bundle_is_kept(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        node.incidents = (INCIDENT,)
        daemon.wake("test")
        await until(lambda: INCIDENT.id in daemon.state.incident_log.incidents)
        route = f"/api/v1/incidents/{INCIDENT.id}/bundle"
        for body, status in (({}, 400), ({"reason": "for the vendor", "by": "ann"}, 200)):
            async with unix.post(route, json=body) as answer:
                assert answer.status == status, body
        async with unix.post("/api/v1/incidents/demo/2/bundle", json=body) as answer:
            assert answer.status == 404
        async with unix.get("/api/v1/requests") as answer:
            (one,) = await answer.json()
        assert (one["action"], one["subject"]) == ("bundle", "incident/demo/1")
        assert (one["reason"], one["state"]) == ("for the vendor", "done")
        assert one["by"] == f"ann (uid {os.getuid()})"

    browse(scenario, agent, tmp_path)


def test_a_pause_may_have_an_end(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        path = "/api/v1/runs/demo/pause"
        for seconds in (-1, 31 * 86400, "2h"):
            async with unix.post(path, json={"reason": "r", "for_s": seconds}) as answer:
                assert answer.status == 400
        before = time.time()
        async with unix.post(path, json={"reason": "r", "for_s": 7200}) as answer:
            assert answer.status == 202
        await until(lambda: node.seen[-1].requests)
        assert before + 7200 <= node.seen[-1].requests[0].until_wall_s <= time.time() + 7200

    browse(scenario, agent, tmp_path)


def test_a_pause_of_the_fleet_and_who_asked_for_it_outlive_the_agent(agent, tmp_path):
    """With the real core and the store of one node, over a restart."""
    paths = ("/api/v1/requests", "/api/v1/status", "/metrics")

    async def life(ask: bool) -> None:
        core = Node("node-a", Settings(), {})  # it remembers nothing: the store has it
        async with agent(node=core) as (daemon, _):
            await until(lambda: daemon.launchers.address)
            connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
            async with aiohttp.ClientSession("http://agent", connector=connector) as unix:
                if ask:
                    async with unix.post("/api/v1/fleet/stop", json={"reason": "x"}) as answer:
                        assert answer.status == 404
                    async with unix.post("/api/v1/fleet/pause", json={}) as answer:
                        assert answer.status == 400, "no reason"
                    body = {"reason": "switch upgrade", "by": "ann", "for_s": 600}
                    async with unix.post("/api/v1/fleet/pause", json=body) as answer:
                        id = (await answer.json())["id"]
                    await until(lambda: daemon.operators.answer(id)["state"] == "done")
                await until(lambda: daemon.state.snapshot.decision.fleet_paused)
                (asked,), status, metrics = [
                    json.loads(text) if path.startswith("/api") else text for path in paths
                    for text in [await (await unix.get(path)).text()]]
                assert (asked["action"], asked["subject"]) == ("pause", "fleet")
                assert asked["by"] == f"ann (uid {os.getuid()})" and asked["state"] == "done"
                assert asked["reason"] == "switch upgrade"
                assert status["fleet_paused"] and not status["paused"]
                until_s = status["fleet_paused_until_wall_s"]
                assert until_s == pytest.approx(asked["until_wall_s"], abs=1.0)
                assert until_s > time.time()
                assert 'holdfast_paused{scope="fleet"} 1.0' in metrics

    asyncio.run(life(ask=True))
    asyncio.run(life(ask=False))


def test_what_an_agent_took_and_did_not_answer_its_next_life_answers(
    agent, tmp_path
):
    """Killed right after the 202: the core had not seen it, a launcher had perhaps."""
    left = [Asked("op-1", "restart_ranks", "run/demo", "slow", "ann", 1.0),
            Asked("op-2", "inject kill", "run/demo/rank/1", "game day", "bob", 2.0)]

    async def lives() -> None:
        async with agent() as (daemon, _):  # whose core answers nothing
            daemon.journal.append(*left)
        async with agent(node=Node("node-a", Settings(), {})) as (daemon, _):
            await until(lambda: daemon.launchers.address)
            connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
            async with aiohttp.ClientSession("http://agent", connector=connector) as unix:
                await until(lambda: daemon.operators.answer("op-2")["state"] != "waiting")
                said = [await (await unix.get(f"/api/v1/requests/{one.id}")).json()
                        for one in left]
                assert [one["state"] for one in said] == ["refused", "refused"]
                assert [one["text"] for one in said] == [
                    "the agent ended before it was carried out: ask again",
                    "the agent ended before it learned the outcome"]
                assert (await unix.get("/api/v1/requests/op-3")).status == 404
        async with agent() as (daemon, _):  # it is settled for good
            assert [one["state"] for one in daemon.operators.asked()] == ["refused", "refused"]
            assert daemon.operators.answer("op-1")["state"] == "refused"

    asyncio.run(lives())


def test_what_an_ended_agent_left_unanswered_is_told_as_not_done(tmp_path) -> None:
    async def write() -> None:
        journal = Journal(tmp_path)
        journal.append(Asked("op-1", "pause", "run/m5", "hands off", "ann", 1.0))
        journal.close()

    asyncio.run(write())
    (one,) = EndedRun("m5", past_runs.read(tmp_path)).get("/api/v1/requests")
    assert (one["state"], one["text"]) == (
        "refused", "the agent ended before it was carried out: ask again")


def test_what_an_alert_had_done_with_a_node_is_in_the_journal_and_outlives_the_agent(
    agent, tmp_path
):
    """With the real core and the store of one node, over a restart."""
    settings = Settings(act=(*Settings().act, "alerts"))
    books = {"hot_rack": Runbook("hot_rack", "degraded", "node", ("exclude_node",),
                                 clears="operator")}
    labels = {"alertname": "HotRack", "holdfast_runbook": "hot_rack", "node": "node-a",
              "instance": "node-b:9855"}

    async def send(unix, status: str) -> dict[str, int]:
        one = {"status": status, "labels": labels, "fingerprint": "f1", "startsAt": "t",
               "annotations": {"summary": "41 degrees"}}
        async with unix.post("/api/v1/alerts", json={"alerts": [one]}) as answer:
            assert answer.status == 200
            return await answer.json()

    async def life(scenario) -> None:
        async with agent(node=Node("node-a", settings, books)) as (daemon, _):
            await until(lambda: daemon.launchers.address)
            connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
            async with aiohttp.ClientSession("http://agent", connector=connector) as unix:

                async def get(route: str):
                    async with unix.get(route) as answer:
                        return await answer.json()

                await scenario(daemon, unix, get)

    async def excluded(daemon, unix, get) -> None:
        assert await send(unix, "firing") == {"alerts": 1, "new": 1}
        while not (await get("/api/v1/alerts"))[0]["outcome"]:
            await asyncio.sleep(0.01)
        assert await send(unix, "firing") == {"alerts": 1, "new": 0}

    async def stands(daemon, unix, get) -> None:
        await until(lambda: daemon.state.snapshot.number)
        (alert,), (asked,) = await get("/api/v1/alerts"), await get("/api/v1/requests")
        assert (alert["node"], alert["outcome"]) == ("node-a", "node-a is excluded from runs")
        assert (asked["id"], asked["action"], asked["subject"], asked["state"]) == (
            "f1/t", "exclude_node", "node/node-a", "done")
        assert (asked["by"], asked["reason"]) == ("alert HotRack", "alert HotRack: 41 degrees")
        database = sqlite3.connect(tmp_path / "state" / "journal.db")
        rows = database.execute(
            "SELECT subject, request, ok FROM intents WHERE request != ''").fetchall()
        database.close()
        assert rows == [("store/node/node-a", "f1/t", 1)]
        assert await send(unix, "resolved") == {"alerts": 1, "new": 0}
        await until(lambda: not daemon.state.snapshot.observed.firing)

    asyncio.run(life(excluded))
    asyncio.run(life(stands))
