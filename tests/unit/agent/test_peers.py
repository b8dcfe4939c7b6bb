"""Peers and their coordinator over loopback: tokens, junk, and who is late, double or gone.

What stands beside torch is a stand-in that answers at once: these tests are about who talks to
whom.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ports import free_port
from waiting import until

from holdfast.agent.checks import results
from holdfast.agent.config.load import load
from holdfast.agent.core.checks import baseline
from holdfast.agent.core.checks.judge import BROKEN, GOOD, UNKNOWN
from holdfast.agent.core.checks.preflight import Member, unlike
from holdfast.agent.core.checks.verdict import CRITICAL, OK, WARNING
from holdfast.agent.daemon.state import AgentState
from holdfast.agent.metrics.families import _Page
from holdfast.agent.peers import coordinator, kept, transport
from holdfast.agent.peers import member as members
from holdfast.agent.peers.coordinator import Coordinator, Plan, shortened
from holdfast.agent.peers.hosts import Peer
from holdfast.agent.peers.member import Heard, attend
from holdfast.agent.peers.transport import Refused

TOKEN = b"a token of these tests"
Told = Callable[[dict[str, Any]], Awaitable[None]]


class Quick:
    """A tester without torch: everything passes, once nothing holds it."""

    hold: asyncio.Event | None = None
    asked = 0

    def __init__(self, pythons: object) -> None:
        self.here = {"torch": "2", "python": "python", "models": ["cpu"]}
        self.problem = ""

    async def start(self) -> None:
        pass

    async def run(self, command: dict[str, Any], told: Told) -> dict[str, Any]:
        Quick.asked += 1
        if Quick.hold is not None:
            await Quick.hold.wait()
        if command["do"] == "exchange" and command["store"] is None:
            await told({"port": 1})
        return {"problem": "", "answer": {"wrong": [], "rate": 1e9, "table": [], "bytes": 4096,
                                          "rates": {"all_reduce": 2e9}}}

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "Tester", Quick)
    monkeypatch.setattr(Quick, "hold", None)
    monkeypatch.setattr(Quick, "asked", 0)


def plan(unused_port: int, count: int = 3, **more: Any) -> Plan:
    peers = [Peer(f"n{number}", f"127.0.0.{number + 1}") for number in range(count)]
    return Plan(peers, TOKEN, unused_port, more.pop("join_s", 5.0), 5.0)._replace(**more)


@pytest.fixture
def port() -> int:
    return free_port()


def coming(given: Plan, own: int, error: str = "") -> Awaitable[Heard]:
    return attend(given, own, Member(given.peers[own].name, error=error), [], lambda words: None)


async def connected(port: int, name: str) -> transport.Channel:
    """Once the coordinator listens."""
    while True:
        try:
            return await transport.connect("127.0.0.1", port, TOKEN, name)
        except OSError:
            await asyncio.sleep(0.01)


def states(heard: Heard) -> dict[str, str]:
    assert heard.report is not None, heard.problem
    return {row.node: row.state for row in heard.report.rows}


def test_all_that_come_hear_the_same_report(port: int) -> None:
    async def scenario() -> list[Heard]:
        return list(await asyncio.gather(*(coming(plan(port), own) for own in range(3))))

    heard = asyncio.run(scenario())
    assert len({str(one.report) for one in heard}) == 1
    assert states(heard[2]) == {"n0": GOOD, "n1": GOOD, "n2": GOOD}


def test_a_node_that_makes_no_test_says_why_and_the_others_go_on(port: int) -> None:
    async def scenario() -> list[Heard]:
        given = plan(port)
        return list(await asyncio.gather(
            coming(given, 0), coming(given, 1, "m5 trains here"), coming(given, 2)))

    heard = asyncio.run(scenario())[0]
    assert states(heard) == {"n0": GOOD, "n1": UNKNOWN, "n2": GOOD}
    assert heard.report is not None and heard.report.rows[1].reason == "m5 trains here"


def test_a_late_one_and_a_second_one_of_a_name_are_told_so(port: int) -> None:
    async def scenario() -> None:
        given = plan(port, join_s=3.0)  # the first three come within it
        Quick.hold = asyncio.Event()
        first = asyncio.ensure_future(coming(given, 0))
        one = await connected(port, "n1")
        double = await coming(given, 1)
        assert double.report is None and "started twice" in double.problem
        one.close()
        second = asyncio.ensure_future(coming(given, 1))
        await until(lambda: Quick.asked)
        late = await coming(given, 2)
        assert late.report is None and "too late: the tests began without n2" in late.problem
        Quick.hold.set()
        heard = await first
        assert states(heard) == states(await second) == {"n0": GOOD, "n1": GOOD, "n2": UNKNOWN}
        reason = heard.report.rows[2].reason  # type: ignore[union-attr]
        assert "did not come within 3 s" in reason

    asyncio.run(scenario())


def test_another_token_is_refused_and_the_others_go_on(port: int) -> None:
    async def scenario() -> list[Any]:
        given = plan(port, 4, join_s=3.0)
        other = given._replace(token=b"another one, as long")
        return list(await asyncio.gather(
            *(coming(given, own) for own in (0, 1, 2)), coming(other, 3), return_exceptions=True))

    first, _, _, refused = asyncio.run(scenario())
    assert isinstance(refused, Refused) and "another token" in str(refused)
    assert states(first)["n3"] == UNKNOWN and states(first)["n2"] == GOOD


def test_junk_from_anybody_costs_its_connection_alone(port: int) -> None:
    async def scenario() -> list[Heard]:
        given = plan(port)
        going = [asyncio.ensure_future(coming(given, own)) for own in (0, 1)]

        async def poured(words: bytes) -> None:
            reader, writer = await until_open()
            await reader.readline()
            writer.write(words)
            await writer.drain()
            await asyncio.wait_for(reader.read(), 60.0)
            writer.close()

        async def until_open() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            while True:
                try:
                    return await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.01)

        for words in (b"\0" * 100 + b"\n", b"[]\n", b"{}\n", b"[" * 9000 + b"\n", b"GET / HTTP/1\n",
                      b"x" * 9000 + b"\n",
                      json.dumps({"node": 1, "mac": "\udcff", "nonce": None}).encode() + b"\n"):
            await poured(words)
        return list(await asyncio.gather(*going, coming(given, 2)))

    assert set(states(asyncio.run(scenario())[0]).values()) == {GOOD}


def test_a_changed_or_repeated_message_is_refused(port: int) -> None:
    async def scenario() -> None:
        taken: asyncio.Queue[transport.Channel] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.put_nowait(await transport.accept(reader, writer, TOKEN))

        server = await asyncio.start_server(serve, "127.0.0.1", port)
        async with server:
            client = await transport.connect("127.0.0.1", port, TOKEN, "n1")
            there = await taken.get()
            assert there.peer == "n1"
            large = {"a": "x" * 300_000}
            await client.send(large)
            assert await there.take() == large
            client._sent = 0  # the first one again
            await client.send({"a": 1})
            with pytest.raises(ValueError, match="wrong signature"):
                await there.take()
            client.close()
            there.close()

    asyncio.run(scenario())


def test_who_goes_away_in_the_middle_is_named(port: int) -> None:
    async def scenario() -> Heard:
        given = plan(port, 4)
        going = [asyncio.ensure_future(coming(given, own)) for own in (0, 1, 2)]
        channel = await connected(port, "n3")
        await channel.send({"member": {"name": "n3"}})
        await channel.take()  # its first test
        channel.close()
        return (await asyncio.gather(*going))[0]

    heard = asyncio.run(scenario())
    assert states(heard) == {"n0": GOOD, "n1": GOOD, "n2": GOOD, "n3": UNKNOWN}
    assert heard.report is not None and "n3 left in the middle" in heard.report.rows[3].reason


def test_who_stands_still_is_named_within_a_deadline_of_its_own(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came, kept its connection, and says nothing: before its first test, or in the middle."""
    monkeypatch.setattr(transport, "STILL_S", 2.0)  # nobody else stands still for so long
    monkeypatch.setattr(transport, "BEAT_S", 0.05)
    monkeypatch.setattr(coordinator, "START_S", 1e6)  # nobody waits for it: this would never end

    async def scenario(given: Plan, first: bool) -> Heard:
        going = [asyncio.ensure_future(coming(given, own)) for own in (0, 1, 2)]
        channel = await connected(port, "n3")
        if not first:
            await channel.send({"member": {"name": "n3"}})
            await channel.take()
        heard = (await asyncio.gather(*going))[0]
        channel.close()
        return heard

    for first in (True, False):
        heard = asyncio.run(scenario(plan(port, 4), first))
        assert states(heard) == {"n0": GOOD, "n1": GOOD, "n2": GOOD, "n3": BROKEN}
        assert heard.report is not None and "n3 came, and stands still" in (
            heard.report.rows[3].reason)


def test_a_coordinator_that_stands_still_is_said(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "STILL_S", 1.0)

    async def scenario() -> Heard:
        ended = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await transport.accept(reader, writer, TOKEN)
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(silent, "127.0.0.1", port, limit=transport.PART_MAX)
        async with server:
            heard = await coming(plan(port), 2)
            await ended.wait()
            return heard

    heard = asyncio.run(scenario())
    assert heard.report is None and "n0, which coordinates, went away" in heard.problem
    assert "says nothing for 1 s" in heard.problem


def test_each_node_keeps_its_own_verdict_and_learns_from_what_passed(
    port: int, tmp_path: Path
) -> None:
    report = asyncio.run(_together(plan(port)))[0].report
    assert report is not None
    for _ in range(baseline.PASSES_MIN):
        assert kept.usual(tmp_path, "1 x cpu", 0) == 0.0
        made = kept.verdict(report, "n1", OK, 2.0)
        assert kept.keep(tmp_path, "boot", made, "1 x cpu", 0) == ""
    found = results.load(tmp_path).verdicts["peers"]
    assert found.status == OK and found.value == 1e9 and found.limit == 0.85e9
    assert {(one.name, one.subject) for one in found.measures} == {
        ("all_reduce", "4096 bytes, pair"), ("all_reduce", "4096 bytes, whole")}
    assert kept.usual(tmp_path, "1 x cpu", 0) == pytest.approx(0.95e9 / 0.85)
    assert kept.usual(tmp_path, "8 x H100", 0) == kept.usual(tmp_path, "1 x cpu", 1 << 20) == 0.0
    assert not made.proven and kept.verdict(report, "n1", CRITICAL, 2.0).proven
    # What is slow teaches nothing.
    slow = msgspec.structs.replace(made, status=WARNING)
    kept.keep(tmp_path, "boot", slow, "1 x cpu", 0)
    assert len(next(iter(results.load(tmp_path).baseline.values()))) == baseline.PASSES_MIN
    state = AgentState(load(None), is_private=False)
    state.checks = (made,)
    rows = {one.labels["scope"]: one for family in _Page(state, time.monotonic)._checks()
            for one in family.samples if "op" in one.labels}
    assert rows.keys() == {"pair", "whole"} and rows["whole"].value == 2e9
    assert rows["pair"].labels == {
        "op": "all_reduce", "size": "4096", "scope": "pair", "run": ""}


async def _together(given: Plan) -> list[Heard]:
    return await asyncio.gather(*(coming(given, own) for own in range(len(given.peers))))


def test_a_version_that_one_node_has_alone_is_said(port: int) -> None:
    async def scenario() -> list[Heard]:
        return await asyncio.gather(*(
            attend(plan(port), own, Member(f"n{own}"), [], lambda words: None)
            for own in range(3)))

    heard = asyncio.run(scenario())[0]
    assert heard.report is not None and not heard.report.drift
    here = {f"n{number}": Member(f"n{number}", versions=(
        ("nvidia", "550" if number == 2 else "580"), ("torch", "2.9"))) for number in range(4)}
    (found,) = unlike(here)
    assert (found.what, found.most, found.nodes) == ("nvidia", "580", (("n2", "550"),))
    del here["n0"], here["n1"]
    (found,) = unlike(here)
    assert found.most == "" and len(found.nodes) == 2


def test_a_coordinator_that_is_gone_is_said(port: int) -> None:
    async def scenario() -> Heard:
        given = plan(port, join_s=0.3)
        running = asyncio.ensure_future(Coordinator(given, "127.0.0.1", lambda words: None).run())
        waiting = asyncio.ensure_future(coming(given._replace(join_s=3.0), 2))
        await until(lambda: running.done() or waiting.done())
        return await waiting

    heard = asyncio.run(scenario())
    assert heard.report is not None or "went away" in heard.problem


@pytest.mark.parametrize(("problem", "words"), [
    ("DistStoreError: wait timeout after 3000ms, keys: /0", "no answer from the other side within"),
    ("RuntimeError: [/p/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:3", "closed"),
    ("RuntimeError: [/a/b.cc:12] strange things", "RuntimeError: strange things"),
])
def test_a_backend_s_words_are_those_of_people(problem: str, words: str) -> None:
    assert words in shortened(problem, 3.0)
