"""When systemd is told that the agent is ready: not before both of its sockets answer."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fakes import until

from holdfast.agent.daemon.parts import readiness
from holdfast.agent.web.server import WebServer


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """What the manager was told so far."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        said: list[str] = []

        def told() -> list[str]:
            while True:
                try:
                    said.append(sock.recv(100).decode())
                except BlockingIOError:
                    return said

        yield told


async def answer_of(path) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


class Held:
    """The listeners of the web part, which open when the test wants it."""

    def __init__(self, monkeypatch) -> None:
        self.may = asyncio.Event()
        start = WebServer.start

        async def held(server: WebServer) -> None:
            await self.may.wait()
            await start(server)

        monkeypatch.setattr(WebServer, "start", held)


def test_ready_comes_after_both_sockets_answer(agent, tmp_path, monkeypatch, systemd):
    async def scenario():
        held = Held(monkeypatch)
        async with agent() as (daemon, node):
            await until(lambda: daemon.state.steps > 2)  # it works already
            assert systemd() == [] and not (tmp_path / "run/api.sock").exists()
            held.may.set()
            await until(systemd, readiness.READY_MAX_S / 3)
            assert systemd() == ["READY=1"]
            assert await answer_of(tmp_path / "run/api.sock") == b"HTTP/1.1 200 OK\r\n"
        assert systemd() == ["READY=1", "STOPPING=1"]

    asyncio.run(scenario())


def test_a_part_for_people_that_fails_does_not_keep_the_agent_from_being_ready(agent, systemd):
    async def scenario():
        # Refused: not loopback, and nobody has a token.
        async with agent(agent__listen="0.0.0.0:0") as (daemon, node):
            await until(systemd, readiness.READY_MAX_S / 3)
            assert systemd() == ["READY=1"] and daemon.state.errors.counts["web"] == 1

    asyncio.run(scenario())


def test_nor_does_one_that_never_answers(agent, monkeypatch, systemd):
    async def scenario():
        Held(monkeypatch)
        monkeypatch.setattr(readiness, "READY_MAX_S", 0.05)
        async with agent():
            await until(systemd)
            assert systemd() == ["READY=1"]

    asyncio.run(scenario())
