"""Whatever is sent to the agent's web server: 4xx, and a bounded number of lines in its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sqlite3

import pytest
from fakes import FakeLauncher, rank_level, until

from holdfast.agent.history.audit import KINDS_MAX, Audit
from holdfast.agent.history.journal import Refused
from holdfast.agent.web import auth, rate_limit
from holdfast.agent.web.connection_limit import LimitedConnection

HEAD = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


def post(body: bytes, more: str = "") -> bytes:
    more += f"Content-Length: {len(body)}\r\n\r\n"
    return f"POST /api/v1/runs/demo/pause {HEAD}{more}".encode() + body


BAD = {
    "token": f"GET /api/v1/status {HEAD}Authorization: Bearer ".encode() + b"\xff\r\n\r\n",
    "utf8": post(b'{"reason":"\xff"}'),
    "gzip": post(b"this is not packed", "Content-Encoding: gzip\r\n"),
    "deflate": post(b"this is not packed", "Content-Encoding: deflate\r\n"),
    "cut gzip": post(b"\x1f\x8b\x08\x00\x00", "Content-Encoding: gzip\r\n"),
    "json": post(b"{"),
    "deep": post(b'{"args":{"a":' + b"[" * 20_000),
    "number": post(b'{"rank": 1e400}'),
    "path": f"GET /api/v1/incidents/%ff%fe {HEAD}\r\n".encode(),
    "raw path": b"GET /api/v1/incidents/\xff " + HEAD.encode() + b"\r\n",
    "run": f"POST /api/v1/runs/%ff/pause {HEAD}Content-Length: 2\r\n\r\n".encode() + b"{}",
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon here\r\n\r\n",
    "length": f"POST /api/v1/runs/demo/pause {HEAD}Content-Length: x\r\n\r\n".encode(),
    "chunk": post(b"", "Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
             + b"zz\r\n",
    "version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "query": b"GET /api/v1/drift?run=\xff " + HEAD.encode() + b"\r\n",
}


async def answered(path: str, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def with_run(node, tmp_path) -> FakeLauncher:
    launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
    launcher.hello()
    launcher.levels(generation=1, state="running", ranks=[rank_level(0, os.getpid())])
    await until(lambda: node.seen and node.seen[-1].runs)
    return launcher


def refusals(tmp_path) -> list[tuple[int, str, str, str, int]]:
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "journal.db")) as database:
        return database.execute("SELECT uid, what, why, example, times FROM refusals").fetchall()


def test_what_another_user_may_not_is_in_the_journal_with_the_uid(
    agent, tmp_path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = await with_run(node, tmp_path)
            path = str(tmp_path / "run" / "api.sock")
            assert b" 202 " in (await answered(path, post(b'{"reason":"mine"}')))[:20]
            monkeypatch.setattr(auth, "peer", lambda sock: (1, 4711))
            for _ in range(200):
                assert b" 403 " in (await answered(path, post(b'{"reason":"yours"}')))[:20]
            await until(lambda: refusals(tmp_path))
            assert refusals(tmp_path)[0][4] == 1  # at once, and not 200 times
            asks = f"GET /api/v1/refusals {HEAD}\r\n".encode()
            assert b'"times": 200' in await answered(path, asks)
            monkeypatch.setattr(auth, "peer", lambda sock: (1, 4712))
            assert (await answered(path, asks)).endswith(b"[]")
            launcher.close()

    asyncio.run(run())
    ((uid, what, why, example, times),) = refusals(tmp_path)
    assert (uid, times, example) == (4711, 200, "/api/v1/runs/demo/pause")
    assert what == "POST /api/v1/runs/{run}/{verb}" and "uid 4711 may change its own runs" in why
    assert capfd.readouterr().err.count("uid 4711: POST") == 1

    async def again() -> None:
        async with agent() as (daemon, _):
            assert [one.times for one in daemon.state.audit.listed()] == [200]

    asyncio.run(again())


def test_a_users_loop_is_held_up_and_nobody_else(
    agent, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with agent() as (daemon, _):
            await until(lambda: daemon.launchers.address)
            path = str(tmp_path / "run" / "api.sock")
            asks = f"GET /api/v1/ledger {HEAD}\r\n".encode()
            monkeypatch.setattr(rate_limit, "RATES", {rate_limit.READ: rate_limit.Rate(0.001, 5)})
            monkeypatch.setattr(auth, "peer", lambda sock: (1, 4711))
            told = [await answered(path, asks) for _ in range(6)]
            assert [b" 200 " in one[:20] for one in told] == [True] * 5 + [False]
            assert b" 429 " in told[5][:20] and b"Retry-After: 1000" in told[5]
            for uid in (4712, 0):
                monkeypatch.setattr(auth, "peer", lambda sock, uid=uid: (1, uid))
                assert b" 200 " in (await answered(path, asks))[:20]

    asyncio.run(run())


def test_what_an_operator_says_is_kept_without_its_secrets(agent, tmp_path) -> None:
    async def run() -> None:
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = await with_run(node, tmp_path)
            body = b'{"reason": "moved to s3://me:hunter2@host/x", "by": "token=abcdefgh"}'
            assert b" 202 " in await answered(str(tmp_path / "run" / "api.sock"), post(body))
            await until(lambda: any(seen.requests for seen in node.seen))
            request = next(seen.requests[0] for seen in node.seen if seen.requests)
            assert "hunter2" not in request.reason and "s3://***@host" in request.reason
            assert "abcdefgh" not in request.by
            launcher.close()

    asyncio.run(run())


def test_who_asks_in_a_thousand_ways_fills_nothing() -> None:
    recorded: list[Refused] = []
    said: list[str] = []
    audit = Audit(recorded.append, said.append)
    for number in range(10_000):
        audit.refused(number % 5000, "POST /x", "no", "/x")
    assert len(recorded) == KINDS_MAX == len(said)
    audit.settle(0.0, all_of_it=True)
    assert len(recorded) == 2 * KINDS_MAX and {one.times for one in recorded} == {1}


def test_bad_requests_are_4xx_and_hardly_a_line(
    agent, tmp_path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    statuses: dict[str, bytes] = {}

    async def run() -> None:
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = await with_run(node, tmp_path)
            path = str(tmp_path / "run" / "api.sock")
            host, port = daemon.launchers.address.removeprefix("http://").split(":")
            before = capfd.readouterr()
            assert "Traceback" not in before.err
            for _ in range(5):
                for name, data in BAD.items():
                    statuses[name] = (await answered(path, data))[:12]
            with socket.create_connection((host, int(port)), 5) as tcp:
                tcp.sendall(BAD["token"])
                reply = await asyncio.to_thread(tcp.recv, 12)
                assert reply.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), reply
            launcher.close()

    asyncio.run(run())
    said = capfd.readouterr().err + caplog.text
    for name, status in statuses.items():
        good = (b"HTTP/1.1 4", b"HTTP/1.1 2") if name in ("token", "query") else (b"HTTP/1.1 4",)
        assert status.startswith(good) or status.startswith(b"HTTP/1.0 4"), (name, status, said)
    assert "Traceback" not in said, said
    assert len(said.splitlines()) <= 10, said


def test_who_leaves_before_the_request_is_whole_is_no_trouble_of_the_agent(
    agent, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[LimitedConnection] = []
    begin = LimitedConnection.begin
    monkeypatch.setattr(LimitedConnection, "begin",
                        lambda connection: (begun.append(connection), begin(connection)))

    async def run() -> None:
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = await with_run(node, tmp_path)
            _, writer = await asyncio.open_unix_connection(str(tmp_path / "run" / "api.sock"))
            head = f"POST /api/v1/runs/demo/pause {HEAD}Content-Length: 9\r\n\r\n"
            writer.write(head.encode() + b"{")
            await until(lambda: begun and begun[0].serving)
            writer.transport.abort()
            await until(lambda: not begun[0].serving)
            assert "web" not in daemon.state.errors.latest
            launcher.close()

    asyncio.run(run())
