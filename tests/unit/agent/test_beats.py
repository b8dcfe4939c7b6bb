"""Agents that talk: real connections on loopback, beats in, endpoints in, losses noticed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace
from ports import free_port
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.core.model import (
    Beat,
    Condition,
    Decision,
    Doc,
    Documents,
    Ended,
    Plan,
    RankView,
    Resume,
)
from holdfast.agent.daemon.parts import peers as part
from holdfast.agent.peers import conversation, kernel_questions, transport
from holdfast.agent.peers.beats import Address, Peers
from holdfast.agent.peers.conversation import PING_S, Endpoint, Told, news_of
from holdfast.agent.peers.failure_detector import SILENT_TICKS
from holdfast.agent.store.memory import MemoryServer, MemoryStore


class Heard:
    """What an agent's part is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Told, bool]] = []
        self.lost: list[frozenset[str]] = []
        self.errors: list[str] = []

    def beats_came(self, told: Told, is_news: bool) -> None:
        self.told.append((told, is_news))

    def nodes_lost(self, nodes: frozenset[str]) -> None:
        self.lost.append(nodes)

    def on_error(self, _: str, error: BaseException | str) -> None:
        self.errors.append(str(error))


class Agent:
    def __init__(self, name: str, token: bytes = b"t" * 16) -> None:
        self.heard = Heard()
        self.peers = Peers(name, f"life of {name}", self.heard, lambda: 10.0, self.heard.on_error)
        self.peers.token = token
        self.address = Address("127.0.0.1", 0)


@asynccontextmanager
async def agents(*made: Agent) -> AsyncIterator[None]:
    try:
        for one in made:
            one.address = Address("127.0.0.1", await one.peers.listen(*one.address))
        places = {one.peers.name: one.address for one in made}
        for one in made:
            one.peers.know(places)
        yield
    finally:
        for one in made:
            await one.peers.close()


def beat(node: str, generation: int = 1, run: str = "r", **more: object) -> Beat:
    return Beat(node, run, generation, 0.0, **more)  # type: ignore[arg-type]


def test_a_beat_arrives_at_once_and_with_the_receivers_time() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            await until(lambda: a.peers.lines["b"].is_up)
            a.peers.tell(Told((beat("a"), beat("z")), (Endpoint("r", 1, "10.0.0.1", 4711),)))
            (seen,) = await until(b.peers.heard)
            assert (seen.node, seen.generation) == ("a", 1)  # nobody speaks for another
            assert seen.boot_s > 0.0 and not seen.lost
            told, is_news = b.heard.told[-1]
            assert is_news and told.endpoints == (Endpoint("r", 1, "10.0.0.1", 4711),)
            a.peers.tell(Told((beat("a", 2),)))
            await until(lambda: b.peers.heard()[0].generation == 2)
            a.peers.tell(Told())
            await until(lambda: not b.peers.heard())
            await until(lambda: b.peers.lines["a"].acked_boot_s > 0.0)

    asyncio.run(body())


def test_an_agent_that_has_begun_anew_takes_back_no_beat_before_its_launchers_are_back() -> None:
    """Without one its node counts as never heard of, and so as lost at once."""
    def said(life: str, told: Told) -> tuple[Beat, ...]:
        hears.peers.instances["b"] = life
        hears.peers._keep("b", told)
        return hears.peers.heard()

    hears = Agent("a")
    (before,) = said("first life", Told((beat("b", 3),)))
    assert said("second life", Told()) == (before,)  # with its old time: it ages
    (after,) = said("second life", Told((beat("b", 3),)))
    assert after.boot_s > before.boot_s
    assert said("second life", Told()) == ()  # that launcher is gone
    said("second life", Told((beat("b", 3), beat("b", run="s"))))
    hears.peers.lease_s = lambda: 0.0
    assert said("third life", Told()) == ()  # nothing ages for ever


def test_steps_are_no_news_and_ranks_states_are() -> None:
    def told(**more: object) -> Told:
        return Told((beat("a", ranks=(RankView(0, "a", 7, 1, **more),)),))  # type: ignore[arg-type]

    first = news_of(told(state="running", step=1))
    assert first == news_of(told(state="running", step=2))
    assert first != news_of(told(state="parked", step=1))


def test_a_stop_is_news_of_a_rank_and_of_its_launcher() -> None:
    """The others act on it within a second."""
    ranks = RankView(0, "a", 7, 1, "running", proc_state="S")
    said = [Told((beat("a", ranks=(replace(ranks, proc_state=state),), suspended=stopped),))
            for state, stopped in (("S", False), ("T", False), ("T", True))]
    assert len({news_of(told) for told in said}) == 3
    assert news_of(Told((beat("a", ranks=(replace(ranks, proc_state="D"),)),))) == news_of(said[0])


class Older(msgspec.Struct):
    """What the release before reads of a beat."""

    node: str
    run: str
    generation: int
    boot_s: float
    node_rank: int = -1


class Ears(msgspec.Struct):
    beats: tuple[Older, ...] = ()


def test_a_release_that_knows_no_conditions_is_heard_and_hears() -> None:
    said = Told((beat("a", compiling="rank 0: neuronx-cc", suspended=True, conditions=(
        Condition("a", "mount_hung", "/data has not answered", "/data"),)),))
    text = msgspec.json.encode(said)
    assert msgspec.json.decode(text, type=Told) == said

    assert msgspec.json.decode(text, type=Ears) == Ears((Older("a", "r", 1, 0.0),))
    heard = msgspec.json.decode(msgspec.json.encode(Ears((Older("b", "r", 3, 0.0),))), type=Told)
    assert heard.beats == (beat("b", 3),)


def test_another_token_gets_nowhere_and_is_said() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b", b"another" * 4)
        async with agents(a, b):
            await until(lambda: a.heard.errors and b.heard.errors)
            assert "another token" in a.heard.errors[0]
            assert not a.peers.lines["b"].is_up and not b.peers.detector.lost()

    asyncio.run(body())


def test_both_sides_of_another_token_name_it_to_people_until_it_is_the_same() -> None:
    """It stood in the agent's log alone, and the run's terminal waited in silence."""
    async def body() -> None:
        a, b = Agent("a"), Agent("b", b"another" * 4)
        async with agents(a, b):
            for one, other in ((a, b), (b, a)):
                found = await until(one.peers.refused)
                (why,) = found.values()
                name, address = other.peers.name, other.address
                assert why.startswith(f"{name} (127.0.0.1:{address.port}) holds another cluster "
                                      "token than this node"), why
                assert "cluster.token_file" in why and why in one.heard.errors
            b.peers.token = a.peers.token
            await until(lambda: a.peers.lines["b"].is_up and b.peers.lines["a"].is_up)
            assert a.peers.refused() == b.peers.refused() == {}

    asyncio.run(body())


@asynccontextmanager
async def greeting(agent: Agent, **more: object) -> AsyncIterator[dict[str, object]]:
    """What an agent answers one of another release, which proves its token by hand."""
    reader, writer = await asyncio.open_connection(*agent.address)
    try:
        first = json.loads(await reader.readuntil(b"\n"))
        assert first["holdfast"] == 2 and first["protocol"] == transport.PROTOCOL
        said = [str(one).encode() for one in (first["nonce"], "mine", "b")]
        mac = transport._mac(agent.peers.token, b"client", *said).decode()
        reply = {"nonce": "mine", "node": "b", "mac": mac, **more}
        writer.write(json.dumps(reply).encode() + b"\n")
        yield json.loads(await reader.readuntil(b"\n"))
    finally:
        writer.close()


@pytest.mark.parametrize("protocol, welcome", [
    (None, True),  # one that does not say it speaks 1
    (1, True), (2, True), (3, True), (0, False), (4, False), (-1, False), ("2", False),
    (2e300, False), ([], False)])
def test_a_neighbouring_release_is_spoken_with_and_any_other_is_refused_by_name(
    protocol: object, welcome: bool,
) -> None:
    assert transport.PROTOCOL == 2  # or the table above is another

    async def body() -> None:
        a = Agent("a")
        async with agents(a):
            more = {} if protocol is None else {"protocol": protocol}
            async with greeting(a, **more) as answer:
                assert ("mac" in answer, "refused" in answer) == (welcome, not welcome)
            if not welcome:
                await until(lambda: a.heard.errors)
                (said,) = a.heard.errors
                assert said.startswith("b speaks protocol ") and "and this node 2: install" in said

    asyncio.run(body())


def test_whoever_calls_a_distant_release_names_it_and_forgets_that_once_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        theirs = [4]
        plain = transport._say

        async def say(writer: asyncio.StreamWriter, message: dict[str, object]) -> None:
            if "holdfast" in message:
                message["protocol"] = theirs[0]
            await plain(writer, message)

        monkeypatch.setattr(transport, "_say", say)
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            await until(lambda: a.peers.refused())
            assert a.peers.refused()["b"].startswith("b speaks protocol 4 of agents, and this node")
            a.peers.tell(Told((beat("a"),)))
            await asyncio.sleep(0)
            assert not b.peers.heard() and not a.peers.lines["b"].is_up
            theirs[0] = 2
            await until(b.peers.heard)
            assert a.peers.refused() == {}

    asyncio.run(body())


def test_rubbish_of_a_proven_peer_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "STILL_S", 1.0)  # the first one says nothing but that it lives

    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            for message in ({}, {"n": "x"}, {"n": 1, "ack": 0, "from": "", "to": "", "silent": 3},
                            {"n": 1, "ack": 0, "from": "", "to": "", "silent": [], "told": "{"}):
                channel = await transport.connect(*a.address, a.peers.token, "b")
                await channel.send(message)
                try:
                    while await channel.take():
                        pass
                except EOFError:
                    channel.close()
            a.peers.tell(Told((beat("a"),)))
            await until(b.peers.heard)

    asyncio.run(body())


def test_a_dead_agent_on_a_living_machine_is_silent_and_not_lost() -> None:
    async def body() -> None:
        a, b, c = Agent("a"), Agent("b"), Agent("c")
        async with agents(a, b, c):
            await until(lambda: all(line.is_up for line in a.peers.lines.values()))
            await c.peers.close()

            answers: dict[str, list[bool]] = {}
            for one in (a, b):
                found, probed = answers.setdefault(one.peers.name, []), one.peers.detector.probed

                def note(name: str, answer: bool, found=found, probed=probed) -> None:
                    found += [answer] if name == "c" else []
                    probed(name, answer)

                one.peers.detector.probed = note  # type: ignore[method-assign]

            def asked() -> bool:
                for one in (a, b):
                    one.peers.tick()
                return all(answers.values())

            await until(asked)
            assert set(answers["a"] + answers["b"]) == {True}  # its machine said that it lives
            assert a.peers.detector.peers["c"].missed >= SILENT_TICKS
            assert not a.heard.lost and not a.peers.detector.unreachable()

    asyncio.run(body())


def test_a_machine_that_does_not_answer_is_lost_to_both_and_comes_back(monkeypatch) -> None:
    async def body() -> None:
        a, b, c = Agent("a"), Agent("b"), Agent("c")
        c.address = Address("127.0.0.1", free_port())  # to listen there again
        async with agents(a, b, c):
            c.peers.tell(Told((beat("c"),)))
            await until(lambda: a.peers.heard() and b.peers.heard())
            port = c.address.port
            await c.peers.close()
            monkeypatch.setattr(kernel_questions, "answer", no_answer)

            async def ticks(condition) -> None:
                while not condition():
                    for one in (a, b):
                        one.peers.tick()
                    await asyncio.sleep(PING_S / 2)

            await asyncio.wait_for(ticks(lambda: a.heard.lost and b.heard.lost), 20.0)
            assert a.heard.lost[0] == {"c"} and a.peers.heard()[0].lost
            await c.peers.listen("127.0.0.1", port)
            c.peers.know({"a": a.address, "b": b.address})
            await asyncio.wait_for(ticks(lambda: not a.peers.heard()[0].lost), 20.0)

    async def no_answer(*_: object) -> kernel_questions.Answer:
        return kernel_questions.Answer.NONE

    asyncio.run(body())


# ----------------------------------------------------------------- what follows at once


def test_a_generation_is_broken_by_an_end_or_a_rank_that_left_it() -> None:
    def ranks(**more: object) -> tuple[RankView, ...]:
        return (RankView(0, "a", 7, 1, "running"),
                RankView(1, "a", 8, 1, "ended", **more))  # type: ignore[arg-type]

    assert part.is_broken(beat("a", ranks=ranks(ended=Ended(137, 9))))
    assert not part.is_broken(beat("a", ranks=ranks(ended=Ended(0))))
    assert not part.is_broken(beat("a", 2, ranks=ranks(ended=Ended(137, 9))))


def test_addresses_are_read_from_the_store_as_from_outside() -> None:
    good = msgspec.json.encode(part.Place("10.0.0.1", 9856, "x"))
    docs = Documents([Doc("address/a", 1, good), Doc("address/b", 1, b"{"), Doc("run/a", 1, good),
                      Doc("address/c", 1, b'{"host": 3}')])
    assert part.places(docs) == {"a": Address("10.0.0.1", 9856)}


def at(port: int, **runs: int) -> part.Place:
    return part.Place("10.0.0.1", port, str(port),
                      {name: part.Place("10.0.0.1", one, str(one)) for name, one in runs.items()})


def test_private_agents_of_one_node_keep_an_address_each_and_come_to_rest() -> None:
    known = part.published(None, at(1), "r")
    assert known == at(1, r=1)
    known = part.published(known, at(2), "s")
    assert known == at(2, r=1, s=2)
    assert part.published(known, at(1), "r") == part.published(known, at(2), "s") == known
    known = part.published(known, at(3), "")  # the node's own agent
    assert known == at(3, r=1, s=2) and part.published(known, at(1), "r") == known
    # Another agent of a run, and one that has a dead one's port.
    assert part.published(known, at(4), "r") == at(4, s=2, r=4)
    assert part.published(known, at(1), "t") == at(1, s=2, t=1)
    assert part.published(known, at(2), "") == at(2, r=1)
    assert part.published(at(7), at(1), "r") == at(1, r=1)  # over an older release's
    for port in range(100, 100 + 2 * part.RUNS_MAX):
        known = part.published(known, at(port), f"run{port}")
    assert len(known.runs) == part.RUNS_MAX and known.port == port


def test_a_private_agents_peers_are_those_of_its_run_and_agents_of_nodes() -> None:
    known = {"a": at(2, r=1, s=2), "b": at(5, s=5), "c": at(6), "d": at(8, s=7)}
    docs = Documents([Doc(f"address/{name}", 1, msgspec.json.encode(one))
                      for name, one in known.items()])

    def ports(run: str) -> dict[str, int]:
        return {name: address.port for name, address in part.places(docs, run).items()}

    assert ports("r") == {"a": 1, "c": 6, "d": 8}
    assert ports("s") == {"a": 2, "b": 5, "c": 6, "d": 7}
    assert ports("") == {"a": 2, "b": 5, "c": 6, "d": 8}

    class Before(msgspec.Struct):  # as an older release reads it
        host: str
        port: int
        instance: str

    body = docs.get("address/a").body
    assert msgspec.json.decode(body, type=Before) == Before("10.0.0.1", 2, "2")


def test_this_nodes_address_is_the_settings_or_the_one_that_routes_to_the_store() -> None:
    assert part.own_address("etcd://127.0.0.1:2379", "10.0.0.9:77") == Address("10.0.0.9", 77)
    assert part.own_address("etcd://127.0.0.1:2379", "") == Address("127.0.0.1", part.PEERS_PORT)


@pytest.mark.parametrize("private", [False, True])
def test_a_node_whose_port_is_taken_says_so_and_how_it_is_reached(private: bool) -> None:
    """A firewall lets the agreed port through; a run's private agent shares the node with others.
    """
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            overrides: dict[str, tuple[object, str]] = {
                "store.url": ("etcd://127.0.0.1:2379", ""),
                "cluster.listen": (f"127.0.0.1:{port}", "")}
            state = SimpleNamespace(
                name="a", is_private=private, config=load(None, overrides).config)
            clock = time.monotonic
            heard, store = Heard(), MemoryStore(MemoryServer(clock, 10.0), "a", clock)
            await store.refresh()
            launchers = SimpleNamespace(runs=tuple)
            peers = part.PeerPart(state, store, launchers, lambda why: None, heard.on_error)
            task = asyncio.create_task(peers.run())
            try:
                await until(lambda: store.view().docs.get("address/a").body)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            place = part.read_place(store.view().docs.get("address/a").body)
        assert place is not None and place.port not in (0, port)
        if private:
            assert heard.errors == []
        else:
            (error,) = heard.errors
            assert f"127.0.0.1:{port} is taken" in error and f"port {place.port}," in error
            assert "set cluster.listen" in error

    asyncio.run(body())


def test_who_knows_a_higher_generation_answers_for_no_permit() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            b.peers.tell(Told(known=(("r", 3),)))
            await until(lambda: a.peers.answered_s("b", "r", 3) > 0.0)
            assert a.peers.answered_s("b", "r", 2) == 0.0 == a.peers.answered_s("z", "r", 3)
            b.peers.tell(Told(known=(("r", 4),)))
            await until(lambda: a.peers.answered_s("b", "r", 3) == 0.0)

    asyncio.run(body())


def test_where_a_runs_store_is_holds_as_long_as_somebody_tells_it() -> None:
    """Of thousands of runs a day none stays, and a name may begin again."""
    orders: list[tuple[str, int]] = []
    hears = Agent("a")
    launchers = SimpleNamespace(
        session=lambda run: run in ("r", "s") or None, runs=lambda: ("r", "s"),
        order=lambda run, fields: orders.append((run, fields["generation"])) or "")
    here = SimpleNamespace(peers=hears.peers, _launchers=launchers, _endpoints={}, _left={},
                           _leave=None, _wake=lambda why: None)
    here._order_endpoint = lambda run: part.PeerPart._order_endpoint(here, run)

    def said(node: str, *endpoints: tuple[str, int]) -> None:
        told = Told(endpoints=tuple(Endpoint(run, n, "10.0.0.1", 4711) for run, n in endpoints))
        hears.peers._keep(node, told)
        part.PeerPart.beats_came(here, told, False)

    said("b", ("r", 50), ("another's", 1))
    said("b", ("r", 50))
    assert orders == [("r", 50)] and set(here._endpoints) == {"r"}
    said("c", ("r", 49))
    assert orders == [("r", 50)], "an older one of two that are told"
    said("b")
    said("c", ("r", 1))
    assert orders == [("r", 50), ("r", 1)]
    part.PeerPart.launcher_came(here, "r")
    assert orders[2:] == [("r", 1)], "another connection has heard nothing yet"
    said("c")
    part.PeerPart.launcher_came(here, "s")
    assert here._endpoints.keys() <= {"r"} and not hears.peers._endpoints


def test_who_is_about_to_plan_without_a_node_answers_for_no_permit() -> None:
    """The node may reach this one and not the store, where it is written that it renews none."""
    told: list[Told] = []
    here = SimpleNamespace(peers=SimpleNamespace(tell=told.append),
                           _launchers=SimpleNamespace(sessions=tuple))
    for unheard in ((), ("b",)):
        plan = Plan("r", 3, ("a", "b"), ((0, "a"), (1, "b")), Resume("own"), "x", unheard=unheard)
        part.PeerPart.tell(here, Decision(plans=(plan,)))  # type: ignore[arg-type]
    assert [one.known for one in told] == [(("r", 3),), (("r", 4),)]


def test_a_connection_speaks_as_seldom_as_it_says_unless_it_is_urged(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        monkeypatch.setattr(a.peers, "every", lambda name: 6)
        async with agents(a, b):
            seldom, often = a.peers.lines["b"], b.peers.lines["a"]
            await until(lambda: seldom.is_up and often.is_up and seldom.number)
            first, other = seldom.number, often.number
            await until(lambda: seldom.number >= first + 4)
            # Six of the other's for each of its own, if both had always had a processor.
            assert often.number - other >= 3 * (seldom.number - first)
            assert b.peers.detector.peers["a"].every == 6
            monkeypatch.setattr(a.peers, "every", lambda name: 6000)
            await until(lambda: b.peers.detector.peers["a"].every == conversation.EVERY_MAX)
            seldom.urge()  # it would wait for ten minutes
            now = seldom.number
            await until(lambda: seldom.number > now)

    asyncio.run(body())


def test_what_wakes_a_connection_as_it_ends_keeps_nobody_from_ending() -> None:
    async def body(turns: int) -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            line = (await until(lambda: a.peers.lines["b"].is_up and a.peers.lines))["b"]
            await until(lambda: not line.wake.is_set() and line.number > 1)
            line.wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5.0):
                await a.peers.close()

    for turns in range(6):
        asyncio.run(body(turns))
