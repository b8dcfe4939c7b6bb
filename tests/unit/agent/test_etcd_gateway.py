"""Which member of etcd is asked, without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from aiohttp import web
from waiting import until

from holdfast.agent.store import etcd_gateway
from holdfast.agent.store.etcd_gateway import TRY_S, Gateway

HOSTS = ("10.9.0.1", "10.9.0.2", "10.9.0.3")


def test_members_on_lost_hosts_are_passed_by_while_another_is_left() -> None:
    gateway, ended = Gateway(tuple(f"http://{host}:2379" for host in HOSTS)), []
    first, second, third = (one.split("/")[2].split(":")[0] for one in gateway.endpoints)

    def asked() -> str:
        return gateway.endpoints[gateway._first].split("/")[2].split(":")[0]

    streaming = SimpleNamespace(close=lambda: ended.append(first))
    gateway._streaming = gateway.endpoints[0], streaming  # type: ignore[assignment]
    gateway.avoid(frozenset({first, second}))
    assert asked() == third and ended == [first]
    gateway._next()
    assert asked() == third
    gateway.avoid(frozenset({first}))  # the second is back
    gateway._next()
    assert asked() == second
    gateway.avoid(frozenset(HOSTS))
    found = set()
    for _ in HOSTS:
        gateway._next()
        found.add(asked())
    assert found == set(HOSTS)  # better a lost one than nobody


READ, WRITE = "/v3/kv/range", "/v3/kv/txn"
ELECTION_S = 0.4  # longer than one short try
PATIENT_S = 3.0  # a try of the usual length, which a busy machine does not make of short ones


async def served(
    handle: Callable[[web.Request], Awaitable[web.Response]], host: str, path: str = READ,
) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    return runner, f"http://{host}:{runner.addresses[0][1]}"


def test_what_is_asked_of_a_host_that_is_lost_meanwhile_is_asked_of_the_next_at_once() -> None:
    """A machine without power ends no connection."""

    async def body() -> float:
        loop, came, over = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def silent(_: web.Request) -> web.Response:
            came.set()
            await over.wait()
            return web.json_response({})

        async def answers(_: web.Request) -> web.Response:
            return web.json_response({"header": {"revision": "7"}})

        dead, silent_url = await served(silent, "127.0.0.2")
        lives, good_url = await served(answers, "127.0.0.3")
        gateway = Gateway((silent_url, good_url))
        gateway._first = gateway.endpoints.index(silent_url)
        try:
            question = asyncio.create_task(gateway.ask("/v3/kv/range", {}, 60.0))
            await until(came.is_set)
            gateway._took_s["/v3/kv/range"] = 60.0  # so slow that nobody would give it up
            begun_s = loop.time()
            gateway.avoid(frozenset({"127.0.0.2", "127.0.0.3"}))
            assert not gateway._asked or not next(iter(gateway._asked))[1].expired()
            gateway.avoid(frozenset({"127.0.0.2"}))
            assert (await question).header.revision == 7
            assert not gateway._asked
            return loop.time() - begun_s
        finally:
            over.set()
            await gateway.close()
            await dead.cleanup()
            await lives.cleanup()

    assert asyncio.run(asyncio.wait_for(body(), 30.0)) < TRY_S


def test_a_proposal_that_went_to_the_lost_leader_is_made_again_as_soon_as_another_may_be_elected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member sends a proposal on to the leader that it knows; of a lost one nothing comes back,
    and etcd says nothing of it for seconds."""

    monkeypatch.setattr(etcd_gateway, "TRY_S", PATIENT_S)

    async def body(knows: bool) -> tuple[float, bool]:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        async def sends_on(_: web.Request) -> web.Response:
            if loop.time() < elected_s:
                await over.wait()
            return web.json_response({"header": {"revision": "7"}, "succeeded": True})

        runners, urls = [], ["http://127.0.0.4:9"]  # the host that is lost
        for host in ("127.0.0.2", "127.0.0.3"):
            runner, url = await served(sends_on, host, WRITE)
            runners.append(runner)
            urls.append(url)
        gateway = Gateway(tuple(urls))
        gateway._first = gateway.endpoints.index(urls[1])
        gateway.avoid(frozenset({"127.0.0.4"} if knows else ()))
        begun_s = loop.time()
        elected_s = begun_s + ELECTION_S
        try:
            written = await gateway.write(WRITE, {}, 10.0)
            return loop.time() - begun_s, written.is_repeated
        finally:
            over.set()
            await gateway.close()
            for runner in runners:
                await runner.cleanup()

    took_s, is_repeated = asyncio.run(asyncio.wait_for(body(True), 30.0))
    assert ELECTION_S <= took_s < PATIENT_S and is_repeated
    took_s, _ = asyncio.run(asyncio.wait_for(body(False), 30.0))
    assert took_s >= PATIENT_S, "a store that is only slow is not asked twice so soon"
