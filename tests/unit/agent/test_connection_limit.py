"""Nobody stops the agent through its web server, and nobody who asks is refused for others."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from fakes import until

from holdfast.agent.web import connection_limit

ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def knock(scenario, agent, tmp_path, **settings):
    async def run():
        async with agent(**settings) as (daemon, node):
            await until(lambda: daemon.launchers.address)
            port = int(daemon.launchers.address.rsplit(":", 1)[1])

            def dial(kind: str, size: int = 0) -> socket.socket:
                family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
                sock = socket.socket(family)
                sock.setblocking(False)
                if size:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
                unix = str(tmp_path / "run" / "api.sock")
                sock.connect_ex(unix if kind == "unix" else ("127.0.0.1", port))
                opened.append(sock)
                return sock

            opened: list[socket.socket] = []
            try:
                await scenario(daemon, dial)
            finally:
                for sock in opened:
                    sock.close()

    asyncio.run(run())


async def ended(sock: socket.socket) -> bool:
    """Whether the agent has ended this connection; it waits until that is so."""
    loop = asyncio.get_running_loop()
    try:
        while await asyncio.wait_for(loop.sock_recv(sock, 65536), 30.0):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_whoever_is_quiet_longest_makes_room_and_whoever_asks_is_answered(
    agent, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(connection_limit, "CONNECTIONS_MAX", 4)

    async def scenario(daemon, dial):
        loop = asyncio.get_running_loop()
        regular = dial(kind)
        idle = [dial(kind) for _ in range(3)]
        for _ in range(5):  # one that asks again and again stays, whoever else comes
            await loop.sock_sendall(regular, ASK)
            assert b"200 OK" in await asyncio.wait_for(loop.sock_recv(regular, 4096), 30.0)
            crowd = [dial(kind) for _ in range(2)]
            assert await ended(idle.pop(0)) and await ended(idle.pop(0))
            idle += crowd
        await until(lambda: daemon.state.errors.counts.get("web connections", 0) >= 10)
        connector = aiohttp.UnixConnector(str(tmp_path / "run" / "api.sock"))
        async with aiohttp.ClientSession("http://agent", connector=connector) as unix, \
                aiohttp.ClientSession(daemon.launchers.address) as tcp:
            for client in (unix, tcp):
                async with client.get("/metrics") as answer:
                    assert answer.status == 200 and await answer.read()

    knock(scenario, agent, tmp_path)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_head_without_an_end_is_cut_off(agent, tmp_path, kind):
    async def scenario(daemon, dial):
        loop, sock = asyncio.get_running_loop(), dial(kind)
        await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(ConnectionError):  # far below the number of headers that aiohttp takes
            for number in range(100):
                await loop.sock_sendall(sock, b"X-%d: %s\r\n" % (number, b"x" * 4000))
                await asyncio.sleep(0)
        latest = daemon.state.errors.latest
        await until(lambda: "head is longer" in latest.get("web connections", ""))

    knock(scenario, agent, tmp_path)


def test_a_long_body_in_many_pieces_is_no_head(agent, tmp_path):
    async def scenario(daemon, dial):
        loop, sock = asyncio.get_running_loop(), dial("unix")
        body = b'{"reason": "' + b"x" * 60_000 + b'"}'
        await loop.sock_sendall(sock, b"POST /api/v1/nodes/node-a/pause HTTP/1.1\r\n"
                                      b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        for begin in range(0, len(body), 1000):
            await loop.sock_sendall(sock, body[begin : begin + 1000])
            await asyncio.sleep(0)
        assert b"202 Accepted" in await asyncio.wait_for(loop.sock_recv(sock, 100), 30.0)

    knock(scenario, agent, tmp_path)


def test_answers_that_nobody_reads_are_given_up(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(connection_limit, "UNSENT_MAX_BYTES", 100_000)

    async def scenario(daemon, dial):
        loop = asyncio.get_running_loop()
        for _ in range(20):
            sock = dial("unix", size=2048)
            await loop.sock_sendall(sock, GET * 60)
        await until(lambda: "not read" in daemon.state.errors.latest.get("web connections", ""))

    knock(scenario, agent, tmp_path)
