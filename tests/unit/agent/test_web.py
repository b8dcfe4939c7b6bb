"""Page, API and metrics over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
import yaml
from browsing import INCIDENT, browse
from fakes import until
from msgspec.structs import replace
from pages import taken_by_prometheus
from ports import free_port

from holdfast.agent.cli import parser
from holdfast.agent.config.load import ConfigError
from holdfast.agent.core.model import (
    Answer,
    Ended,
    Plan,
    RankView,
    Resume,
    RunView,
    StoreWrite,
    Verdict,
)
from holdfast.agent.core.run.state import NOTHING
from holdfast.agent.daemon.alerts import ALL_MAX
from holdfast.agent.metrics.names import NAMES
from holdfast.agent.metrics.selection import render_docs
from holdfast.agent.web import auth
from holdfast.agent.web.auth import Tokens
from holdfast.agent.web.page import load_page
from holdfast.agent.web.server import WebServer
from holdfast.agent.web.status import waiting
from holdfast.dashboards.rules import files


def test_reading(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        node.incidents = (INCIDENT,)
        node.extra = {
            "ledger": (("training", 30.0), ("idle", 10.0)),
            "run_ledger": (("demo", "training", 30.0),),
            "verdicts": (Verdict("rank_hung", "run/demo/rank/0", "warn", 0.5, "still"),),
        }
        daemon.wake("test")
        await until(lambda: daemon.state.snapshot.decision.verdicts)
        for client in (tcp, unix):
            async with client.get("/api/v1/status") as answer:
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                status = await answer.json()
            assert status["node"] == "node-a" and status["store_up"]
            run = status["runs"][0]
            assert run["run"] == "demo" and run["checkpoint"]["step"] == 20
            assert run["ranks"][0]["health"] == "suspect" and run["ranks"][0]["why"] == "still"
            assert run["suspicion"] == ""  # nothing says that it is the run's own
            assert run["need"] == "nothing"
            async with client.get("/api/v1/ledger") as answer:
                ledger = await answer.json()
            assert ledger["wall_s"] == 40.0 and ledger["runs"]["demo"]["training"] == 30.0
            async with client.get("/api/v1/incidents") as answer:
                assert [one["id"] for one in await answer.json()] == ["demo/1"]
            async with client.get("/api/v1/incidents/demo/1") as answer:
                assert (await answer.json())["culprit"] == "rank 0"
            async with client.get("/api/v1/incidents/nope") as answer:
                assert answer.status == 404 and "set" in await answer.json()
            for path in ("/healthz", "/readyz", "/"):
                async with client.get(path) as answer:
                    assert answer.status == 200
        assert (tmp_path / "run" / "address").read_text().strip() == daemon.launchers.address
        address = await launcher.receive("address") if not daemon.launchers.address else None
        assert address is None or address["address"] == daemon.launchers.address

    browse(scenario, agent, tmp_path)


def test_changing_needs_a_role(agent, tmp_path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('"operator-token-0123" = "operator"\n"reading-token-01234" = "read"\n')
    tokens.chmod(0o600)

    async def scenario(daemon, node, launcher, tcp, unix):
        path, body = "/api/v1/runs/demo/pause", {"reason": "maintenance"}
        for token, status in (("", 401), ("reading-token-01234", 401), ("wrong", 401),
                              ("operator-token-0123", 202)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with tcp.post(path, json=body, headers=headers) as answer:
                assert answer.status == status, token
        await until(lambda: node.seen[-1].requests)
        request = node.seen[-1].requests[0]
        assert (request.action, request.subject, request.run) == (
            "pause", "run/demo", "demo"
        )
        assert request.by == "token"
        # A claimed name never hides what is proven, nor does it pass for a node's own.
        more = {"rank": 1, "by": "node-a\n"}
        async with unix.post("/api/v1/runs/demo/restart", json=body | more) as answer:
            assert answer.status == 202
        await until(lambda: len(node.seen[-1].requests) == 2)
        assert node.seen[-1].requests[1].subject == "run/demo/rank/1"
        assert node.seen[-1].requests[1].by == f"node-a (uid {os.getuid()})"
        first, second = node.seen[-1].requests
        plan = Plan("demo", 1, ("node-a",), ((0, "node-a"),), Resume("fresh"), "r", paused=True)
        node.extra = {"plans": (plan,), "answers": (
            Answer(first.id, True, "pause: taken"), Answer(second.id, False, "no rank runs"))}
        daemon.wake("test")
        await until(lambda: not node.seen[-1].requests)
        for one, state in ((first, "done"), (second, "refused")):
            async with unix.get(f"/api/v1/requests/{one.id}") as answer:
                assert (await answer.json())["state"] == state
        async with unix.get("/api/v1/requests/op-none") as answer:
            assert answer.status == 404
        async with unix.get("/api/v1/status") as answer:
            run = (await answer.json())["runs"][0]
        assert run["paused"]
        _, _, told = run["need"].partition("holdfast ")
        assert parser.build().parse_args(shlex.split(told)).run == "demo", "a command as it is said"

    browse(scenario, agent, tmp_path, api__tokens_file=str(tokens))


def test_an_incident_of_the_kernels_is_closed_by_hand_and_no_other(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        route, body = "/api/v1/incidents/%s/close", {"reason": "cable changed"}
        node.incidents = (INCIDENT,)
        daemon.wake("test")
        await until(lambda: INCIDENT.id in daemon.incident_log.incidents)
        for which, status in (("nope", 404), (INCIDENT.id, 409)):
            async with unix.post(route % which, json=body) as answer:
                assert answer.status == status and (await answer.json())["set"]
        told = Verdict(INCIDENT.fault, INCIDENT.subject, "fatal", 1.0, "x", detector="kernel")
        node.extra = {"verdicts": (told,)}
        daemon.wake("test")
        await until(lambda: told in daemon.state.snapshot.decision.verdicts)
        for data, status in ((b"{}", 400), (b"{", 400), (b'{"reason": "cable changed"}', 202)):
            async with unix.post(route % INCIDENT.id, data=data) as answer:
                assert answer.status == status
        await until(lambda: node.seen[-1].requests)
        (request,) = node.seen[-1].requests
        assert (request.action, request.subject) == ("close_incident", f"incident/{INCIDENT.id}")

    browse(scenario, agent, tmp_path)


def test_any_agent_takes_what_is_asked_of_a_node_that_it_knows(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        body = b'{"excluded":true,"reason":"hot","by":"ann"}'
        await daemon.store.put(StoreWrite("node/node-b", 0, body))
        daemon.wake("test")
        await until(lambda: daemon.state.snapshot.observed.store.docs.get("node/node-b").version)
        async with unix.get("/api/v1/status") as answer:
            rows = (await answer.json())["nodes"]
        assert [(one["node"], one["excluded"], one["age_s"]) for one in rows] == [
            ("node-a", False, 0.0), ("node-b", True, None)]
        async with unix.post("/api/v1/nodes/node-b/release", json={"reason": "cold"}) as answer:
            assert answer.status == 202
        await until(lambda: node.seen[-1].requests)
        request = node.seen[-1].requests[0]
        assert (request.action, request.subject) == ("release_node", "node/node-b")

    browse(scenario, agent, tmp_path)


def test_bad_requests_say_what_to_set(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        async with tcp.get("/api/v1/status", headers={"Host": "evil.example:1"}) as answer:
            assert answer.status == 403 and "not this machine" in (await answer.json())["error"]
        async with tcp.post("/api/v1/runs/demo/pause", json={"reason": "x"}) as answer:
            assert answer.status == 403 and "tokens" in (await answer.json())["error"]
        for path, data, status in (
            ("/api/v1/runs/demo/pause", b"{", 400),
            ("/api/v1/runs/demo/pause", b"{}", 400),
            ("/api/v1/runs/demo/pause", b'{"args":{"x":' + b"[" * 60_000, 400),
            ("/api/v1/runs/demo/pause", b'{"raeson": "x"}', 400),
            ("/api/v1/runs/demo/explode", b'{"reason": "x"}', 404),
            ("/api/v1/runs/nope/pause", b'{"reason": "x"}', 404),
            ("/api/v1/nodes/other/pause", b'{"reason": "x"}', 404),
            *((f"/api/v1/nodes/{node_name}/{verb}", body, status)
              for verb in ("exclude", "release", "drain")
              for node_name, body, status in (
                  ("elsewhere", b'{"reason": "x"}', 404), ("node-a", b"{}", 400))),
            ("/api/v1/runs/demo/pause", b"x" * 100_000, 413),
            ("/api/v1/runs/demo/inject", b'{"fault": "kill", "reason": "x"}', 403),
        ):
            async with unix.post(path, data=data) as answer:
                assert answer.status == status, (path, data[:20])
                assert "set" in await answer.json()
        async with unix.put("/api/v1/status") as answer:
            assert answer.status == 405
        assert not node.seen[-1].requests

    browse(scenario, agent, tmp_path)


def delivery(*numbers, status="firing", **labels):
    """What Alertmanager sends, version 4; newer fields and Grafana's are passed over."""
    base = {"alertname": "FabricStorm", "holdfast_runbook": "fabric_storm", "run": "demo"}
    return json.dumps({
        "version": "4", "groupKey": "{}", "status": status, "receiver": "holdfast", "orgId": 1,
        "externalURL": "http://alertmanager:9093", "truncatedAlerts": 0,
        "alerts": [{
            "status": status, "labels": base | labels, "fingerprint": f"{number:016x}",
            "annotations": {"summary": "rank 3 token=s3cr3tvalue0123456789 waits"},
            "startsAt": "2026-11-22T10:00:00Z", "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "http://prometheus/graph", "silenceURL": "",
        } for number in numbers],
    }).encode()


def test_alerts_are_taken_once_and_settled(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        async def send(body, status=200):
            async with unix.post("/api/v1/alerts", data=body) as answer:
                assert answer.status == status, await answer.text()
                return await answer.json()

        async def kept():
            async with unix.get("/api/v1/alerts") as answer:
                return {one["id"].split("/")[0][-2:]: one for one in await answer.json()}

        plan = Plan("demo", 3, ("node-a",), ((0, "node-a"),), Resume("fresh"), "r")
        node.extra = {"plans": (plan,)}
        await until(lambda: daemon.state.snapshot.decision.plans)
        assert await send(delivery(1, 2)) == {"alerts": 2, "new": 2}
        assert await send(delivery(2, 1)) == {"alerts": 2, "new": 0}  # another Alertmanager
        await until(lambda: len(node.seen[-1].alerts) == 2)
        seen = node.seen[-1].alerts[0]
        assert (seen.run, seen.runbook, seen.generation) == ("demo", "fabric_storm", 3)
        assert "s3cr3t" not in seen.summary
        # The end comes before the beginning: it never begins.
        assert await send(delivery(3, status="resolved")) == {"alerts": 1, "new": 1}
        assert await send(delivery(3)) == {"alerts": 1, "new": 0}
        node.extra = {"answers": (Answer(seen.id, True, "generation 4 was started for it"),)}
        await until(lambda: [one.id for one in node.seen[-1].alerts] != [seen.id]
                    and len(node.seen[-1].alerts) == 1)
        while not (await kept())["01"]["outcome"]:
            await asyncio.sleep(0.01)
        assert (await kept())["01"]["outcome"] == "generation 4 was started for it"
        await send(delivery(2, status="resolved"))
        await until(lambda: not node.seen[-1].alerts)
        assert (await kept())["02"]["outcome"].startswith("resolved before")
        async with tcp.post("/api/v1/alerts", data=delivery(4)) as answer:
            assert answer.status == 403  # no token, no word
        for bad in (b"{", b"[]", b'{"alerts": [{}]}', b'{"alerts": [1]}', b"\xff",
                    delivery(1, status="pending"), delivery(*range(1001))):
            assert (await send(bad, 400))["set"]
        assert len(await kept()) == 3

    browse(scenario, agent, tmp_path)


def test_more_alerts_than_are_kept_are_sent_again(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        for start in range(0, ALL_MAX, 320):
            body = delivery(*range(start, start + 320))
            async with unix.post("/api/v1/alerts", data=body) as one:
                assert one.status == 200
        async with unix.post("/api/v1/alerts", data=delivery(9000)) as answer:
            assert answer.status == 503
        async with unix.post("/api/v1/alerts", data=delivery(0, status="resolved")) as answer:
            assert answer.status == 200
        async with unix.post("/api/v1/alerts", data=delivery(9000)) as answer:
            assert answer.status == 200
        async with unix.get("/api/v1/alerts") as answer:
            assert len(await answer.json()) == ALL_MAX

    browse(scenario, agent, tmp_path)


def test_a_run_is_changed_by_its_own_user_alone():
    """The kernel says who asks; a number above or below the owner's is another's."""
    owners = {"own": 70_007, "nobody's": None}
    door = auth.Authorizer(None, True, owners.get, None, None)
    for uid, run, may in ((70_007, "own", True), (70_006, "own", False), (70_008, "own", False),
                          (70_007, "nobody's", False), (70_007, "", False), (0, "own", True),
                          (os.getuid(), "nobody's", True)):
        refused = door._peer_refusal(SimpleNamespace(match_info={"run": run}), uid)
        assert (refused is None) is may, (uid, run)


def test_who_came_over_the_network_is_no_user_of_this_machine():
    assert auth.uid_of(SimpleNamespace(transport=None)) == -1


def test_metrics_are_complete_and_clean(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        node.incidents = (INCIDENT,)
        daemon.wake("test")
        await until(lambda: daemon.state.runner is not None and daemon.state.runner.samples())
        await until(lambda: daemon.performer.counters)
        steps = daemon.state.steps
        daemon.wake("test")
        await until(lambda: daemon.state.steps > steps)
        async with tcp.get("/metrics") as answer:
            text = await answer.text()
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert {f"holdfast_{name}" for name in NAMES} == {  # with no row where there is nothing
            name for name in names if name.removeprefix("holdfast_") in NAMES
        }
        assert 'holdfast_checkpoint_verified_step{run="demo"} 20.0' in text
        assert 'holdfast_incidents_total{detector="",fault="rank_killed"' in text
        assert "holdfast_host_memory_total_bytes" in text
        assert "job=" not in text and "instance=" not in text
        texts.append(text)

    texts: list[str] = []
    browse(scenario, agent, tmp_path)
    taken_by_prometheus(texts[0])


def test_a_node_whose_ranks_ended_while_others_train_says_since_when_it_waits_and_why() -> None:
    left = (RankView(rank=0, node="node-a", pid=7, generation=1, state="ended", step=4,
                     ended=Ended(137, 9, by_us=True, boot_s=100.0)),)
    view = RunView(run="demo", node="node-a", grade="trainer", nproc=1, generation=1, ranks=left)
    assert waiting(view, "n1 leads the run", 135.4) == (
        "waiting for the cluster for 35 s: n1 leads the run")
    assert waiting(view, NOTHING, 135.4) == (
        "waiting for the cluster for 35 s: other nodes have its ranks")
    assert waiting(msgspec.structs.replace(view, ranks=()), NOTHING, 135.4) == (
        "waiting for the cluster: other nodes have its ranks")


def test_what_a_run_is_doing_and_may_still_spend_is_a_series_each(agent, tmp_path):
    """One word at a time, and no series of a budget that nothing was taken from."""
    async def scenario(daemon, node, launcher, tcp, unix):
        plan = Plan("demo", 2, ("node-a",), ((0, "node-a"),), Resume("fresh"), "r", spent=(
            ("rank_killed/restart_ranks/run/demo/rank/0", 1), ("restarts", 1)))
        count = daemon.state.runbooks["rank_killed"].budget_count
        for stage in ("recovering", "training", "waiting"):
            node.doing, node.extra = {"demo": stage}, {"plans": (plan,)}
            steps = daemon.state.steps
            daemon.wake("test")
            await until(lambda before=steps: daemon.state.steps > before + 1)
            async with tcp.get("/metrics") as answer:
                lines = (await answer.text()).splitlines()
            assert [one for one in lines if one.startswith("holdfast_run_stage{")] == [
                f'holdfast_run_stage{{run="demo",stage="{stage}"}} 1.0']
            async with tcp.get("/api/v1/status") as answer:
                (run,) = (await answer.json())["runs"]
            assert run["stage"] == stage
            assert run["doing"].startswith("waiting for the cluster") == (stage == "waiting")
            assert [one for one in lines if one.startswith("holdfast_run_budget_left{")] == [
                'holdfast_run_budget_left{action="restart_ranks",fault="rank_killed",run="demo"} '
                f"{count - 1:.1f}"]

    browse(scenario, agent, tmp_path)


def test_the_text_is_rendered_once_a_snapshot(agent, tmp_path):
    from holdfast.agent.metrics.families import Exposition

    async def scenario():
        async with agent(agent__tick_s=5.0, agent__fast_s=5.0,
                         detect__suspect_floor_s=6.0, detect__lease_s=20.0) as (daemon, node):
            await until(lambda: daemon.state.steps)
            exposition = Exposition(daemon.state)
            assert exposition.text() is exposition.text()

    asyncio.run(scenario())


def test_the_page_loads_nothing_from_elsewhere():
    page, policy = load_page()
    text = page.decode()
    assert "src=" not in text and "@import" not in text
    assert "style=" not in text.split("<script>")[0]
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "'unsafe-inline'" not in policy and policy.count("sha256-") == 2


def test_tokens_file_is_checked(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text('"operator-token-0123" = "operator"\n')
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tokens(str(path))
    path.chmod(0o600)
    assert Tokens(str(path)).role("Bearer operator-token-0123") == "operator"
    assert Tokens(str(path)).role("Basic operator-token-0123") == ""
    path.write_text('"short" = "operator"\n')
    with pytest.raises(ConfigError, match="16 characters"):
        Tokens(str(path))


@pytest.mark.parametrize(("listens", "opens"), [
    ("0.0.0.0", socket.gethostname()), ("[::]", socket.gethostname()), ("127.0.0.1", "127.0.0.1"),
    ("gpu1", "gpu1")])
def test_the_pages_address_can_be_opened_elsewhere(agent, tmp_path, monkeypatch, listens, opens):
    """No port is opened: what is judged is what is told of it."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('"operator-token-0123" = "operator"\n')
    tokens.chmod(0o600)

    async def bound(*_: object) -> int:
        return 9855

    monkeypatch.setattr(WebServer, "_open", bound)

    async def scenario():
        async with agent(agent__listen=f"{listens}:9855", api__tokens_file=str(tokens)) as (one, _):
            await until(lambda: one.launchers.address == f"http://{opens}:9855")

    asyncio.run(scenario())


def test_two_agents_take_two_ports(agent, tmp_path):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            async with agent(private=True, run="demo",
                             agent__listen=f"127.0.0.1:{port}") as (daemon, node):
                await until(lambda: daemon.launchers.address)
                assert daemon.launchers.address != f"http://127.0.0.1:{port}"
            async with agent(agent__listen=f"127.0.0.1:{port}") as (daemon, node):
                await until(lambda: "web" in daemon.state.errors.counts)
                assert "agent.listen" in daemon.state.errors.latest["web"]
                async with aiohttp.ClientSession(
                    "http://agent",
                    connector=aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock")),
                ) as unix:
                    async with unix.get("/healthz") as answer:
                        assert answer.status == 200

    asyncio.run(scenario())


def test_a_taken_port_of_metrics_takes_nothing_else_away(agent, tmp_path):
    async def scenario():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            async with agent(agent__metrics_listen=address) as (daemon, _):
                await until(lambda: "web" in daemon.state.errors.counts)
                said = daemon.state.errors.latest["web"]
                assert said.startswith(f"agent.metrics_listen = '{address}': ")
                assert "already in use: set a free address" in said
                connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
                async with aiohttp.ClientSession("http://agent", connector=connector) as unix:
                    async with unix.get("/healthz") as answer:
                        assert answer.status == 200
                async with aiohttp.ClientSession(daemon.launchers.address) as tcp:
                    async with tcp.get("/metrics") as answer:
                        assert answer.status == 200
                assert daemon.state.errors.counts["web"] == 1, "the part does not begin again"

    asyncio.run(scenario())


def test_the_port_of_metrics_serves_the_runbooks_and_nothing_of_the_api(agent, tmp_path):
    """Prometheus' `instance` is this port, and an alert's link leads to the instance."""
    address = f"127.0.0.1:{free_port()}"

    async def scenario(daemon, node, launcher, tcp, unix):
        links = {rule["annotations"]["runbook_url"]
                 for group in yaml.safe_load(files.rules([], "/runbooks"))["groups"]
                 for rule in group["rules"] if "alert" in rule}
        links = {link for link in links if "{{" not in link}
        assert "/runbooks/fleet/agents_absent.md" in links
        # Whoever opens a link comes from another machine, under a name of this one.
        headers = {"Host": "node-a.example:9858"}
        async with aiohttp.ClientSession(f"http://{address}", headers=headers) as metrics:
            for path in ("/runbooks", "/runbooks/rank_hung.md", *sorted(links)):
                async with metrics.get(path) as answer:
                    text = await answer.text()
                    assert answer.status == 200 and answer.content_type == "text/plain", path
                    assert "## Meaning" in text or path == "/runbooks", path
            for path in ("/", "/api/v1/status", "/api/v1/incidents", "/api/v1/alerts"):
                async with metrics.get(path) as answer:
                    assert answer.status == 404, path

    browse(scenario, agent, tmp_path, agent__metrics_listen=address)


def test_the_documentation_names_every_metric():
    text = render_docs()
    assert all(f"`holdfast_{name}`" in text for name in NAMES)
    assert json.dumps(text)


def test_a_suspicion_is_said_with_all_that_is_known(agent, tmp_path):
    """Rank, time and limit from the verdict; line and what is waited for from the incident."""
    reason = "rank 0 (pid 7) on node-a holds the run up; waited 12.0 s, would act at 60.0 s"
    doubt = Verdict("rank_hung", "run/demo/rank/0", "warn", 0.8, reason, act=False, run="demo",
                    detector="hang")
    suspected = replace(
        INCIDENT, id="demo/2", fault="rank_hung", subject=doubt.subject, state="open", run="demo",
        evidence=(("step", "9"), ("where", "train.py:37 in read"), ("waits for", "/mnt/data/x")))

    async def scenario(daemon, node, launcher, tcp, unix):
        async def suspicion(holds):
            async def said():
                async with unix.get("/api/v1/status") as answer:
                    return (await answer.json())["runs"][0]["suspicion"]
            daemon.wake("test")
            await until(lambda: holds in str(daemon.state.snapshot.decision))
            return await said()

        node.extra = {"verdicts": (doubt,)}
        assert await suspicion("60.0 s") == reason
        node.incidents = (suspected,)
        known = "; at train.py:37 in read; waits for /mnt/data/x"
        assert await suspicion("train.py:37") == reason + known
        waits = "waits, and no restart is spent: dead"
        node.incidents = (replace(suspected, would_have=waits),)
        without = reason.replace(", would act at 60.0 s", "")
        assert await suspicion("is spent") == f"{without}{known}; {waits}"
        node.extra = {"verdicts": (replace(doubt, act=True),)}
        assert await suspicion("act=True") == ""

    browse(scenario, agent, tmp_path)


def test_people_review_incidents(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        node.incidents = (INCIDENT,)
        daemon.wake("test")
        await until(lambda: daemon.state.incident_log.incidents)

        async def post(verb, status=200, id="demo/1", **body):
            async with unix.post(f"/api/v1/incidents/{id}/{verb}", json=body) as answer:
                assert answer.status == status, await answer.text()

        async def review():
            async with unix.get("/api/v1/incidents/demo/1") as answer:
                return (await answer.json()).get("review", {})

        assert await review() == {}
        await post("ack", by="ann", reason="at it")
        who = f"ann (uid {os.getuid()})"
        assert (await review())["acked_by"] == who and (await review())["reason"] == "at it"
        for bad in ({}, {"label": "true"}, {"label": 1}):
            await post("label", 400, args=bad)
        await post("label", by="bob", args={"label": False})
        await post("label", by="bob", args={"label": False})
        await post("label", 409, args={"label": True})
        await post("ack", 404, id="demo/2")
        shown = await review()
        assert (shown["label"], shown["acked_by"], shown["reason"]) == ("false", who, "at it")
        async with tcp.get("/metrics") as answer:
            text = await answer.text()
        assert 'holdfast_incident_labels_total{detector="ended",label="false"} 1.0' in text
        async with tcp.post("/api/v1/incidents/demo/1/ack", json={}) as answer:
            assert answer.status == 403

    browse(scenario, agent, tmp_path)


def test_the_document_names_every_route_and_no_other(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        async with tcp.get("/api/v1/openapi.json") as answer:
            document = await answer.json()
        told = {(method.upper(), path) for path, methods in document["paths"].items()
                for method in methods if method != "parameters"}
        server = WebServer(daemon.state, daemon.operators, daemon.others, print)
        application = server._application(True, True)
        assert told == {(one.method, one.resource.canonical)
                        for one in application.router.routes()}
        for path, methods in document["paths"].items():
            named = {one["name"] for one in methods.get("parameters", ())}
            assert named == {one.strip("{}") for one in path.split("/") if one.startswith("{")}

    browse(scenario, agent, tmp_path)
