"""Agents that ask one another: real connections on loopback, orders of leaders, last words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from waiting import until

from holdfast.agent.core.model import (
    Documents,
    Effect,
    EffectOutcome,
    Incident,
    Lease,
    Now,
    Observed,
    Request,
    Stop,
    StoreView,
    TakeEvidence,
)
from holdfast.agent.daemon import other_nodes
from holdfast.agent.daemon.other_nodes import OtherNodes
from holdfast.agent.history.job_log import JobLog
from holdfast.agent.peers import beats
from holdfast.agent.peers.beats import Address, Peers
from holdfast.agent.web import fleet
from holdfast.agent.web.visibility import WITHHELD, Reader

EVIDENCE = Effect("1/run/r/rank/1/evidence/1", "evidence", "run/r/rank/1", "it stands still", 2.0,
                  TakeEvidence("r", 1, 1, 4711, "it stands still", node="b"))
INCIDENT = Incident(
    id="r-g1-hang-r1-1-b", fault="hang", subject="run/r/rank/1", severity="degraded", run="r",
    generation=1, opened_wall_s=1.0, opened_boot_s=1.0, reason="secret words", culprit="rank 1",
    evidence=(), timeline=(), state="open")


class Performer:
    """Carries everything out at once, and remembers what it was."""

    def __init__(self) -> None:
        self.elsewhere: Any = None
        self.obeyed: list[Effect] = []

    async def obey(self, effect: Effect) -> EffectOutcome:
        self.obeyed.append(effect)
        return EffectOutcome(effect.id, True, "", '{"where": "train.py:12"}')


class Operators:
    def __init__(self) -> None:
        self.taken: list[Request] = []

    def done(self, request: Request) -> None:
        raise AssertionError("nothing is started here")

    def request(self, request: Request) -> bool:
        self.taken.append(request)
        return True

    def answer(self, id: str) -> dict[str, str] | None:
        return {"id": id, "state": "done", "text": "generation 2"} if self.taken else None


class Agent:
    """One node: `a` leads run r, `b` has a launcher of it."""

    def __init__(self, name: str, incidents: tuple[Incident, ...] = ()) -> None:
        self.name = name
        store = StoreView(True, Documents(), (Lease("r", "a"),))
        log = SimpleNamespace(incidents={one.id: one for one in incidents}, reviews={},
                              owner=lambda id: 1000)
        self.state: Any = SimpleNamespace(
            name=name, incident_log=log, jobs=JobLog(),
            launchers=SimpleNamespace(session=lambda run: run == "r" and name == "b" or None),
            snapshot=SimpleNamespace(
                now=Now(5.0, 0.0), observed=Observed(store=store),
                decision=SimpleNamespace(ledger=(), run_ledger=())),
            config=SimpleNamespace(cost=SimpleNamespace(node_hour=0.0, currency="EUR")))
        self.peers = Peers(name, f"life of {name}", self, lambda: 10.0, self.on_error)
        self.peers.token = b"t" * 16
        self.performer, self.operators = Performer(), Operators()
        parts: Any = self.performer, self.operators
        self.others = OtherNodes(self.state, self.peers, *parts)
        self.errors: list[str] = []

    def beats_came(self, told: Any, is_news: bool) -> None:
        pass

    def nodes_lost(self, nodes: frozenset[str]) -> None:
        pass

    def on_error(self, _: str, error: BaseException | str) -> None:
        self.errors.append(str(error))

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return await self.others.asked(node, question)


@asynccontextmanager
async def agents(*made: Agent) -> AsyncIterator[None]:
    names = [one.name for one in made]
    try:
        places = {one.name: Address("127.0.0.1", await one.peers.listen("127.0.0.1", 0))
                  for one in made}
        for one in made:
            one.peers.know(places)
            one.state.snapshot.observed = msgspec.structs.replace(
                one.state.snapshot.observed,
                beats=tuple(_beat(name) for name in names))
        yield
    finally:
        for one in made:
            await one.peers.close()


def _beat(node: str) -> Any:
    from holdfast.agent.core.model import Beat

    return Beat(node, "", 0, 1.0)


def test_an_order_of_the_leader_is_carried_out_where_the_rank_is() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            outcome = await a.performer.elsewhere(EVIDENCE)
            assert (outcome.ok, outcome.id) == (True, EVIDENCE.id)
            assert outcome.detail == '{"where": "train.py:12"}'
            (done,) = b.performer.obeyed
            assert done.id == EVIDENCE.id + "@a"
            assert isinstance(done.body, TakeEvidence) and done.body.node == ""

    asyncio.run(body())


@pytest.mark.parametrize(("asker", "effect", "why"), [
    ("c", EVIDENCE, "c does not lead run r"),
    ("a", msgspec.structs.replace(EVIDENCE, kind="start"), "is no order for another node"),
    ("a", msgspec.structs.replace(EVIDENCE, kind="stop", body=Stop(
        "r", 1, (), 0.0, "end it", leave=True, node="b")), "or none that a leader gives"),
    ("a", msgspec.structs.replace(EVIDENCE, kind="stop", body=Stop(
        "r", 1, (), 0.0, "a step to come", park=True, after=7, node="b")),
     "or none that a leader gives"),
    ("a", msgspec.structs.replace(EVIDENCE, deadline_s=-1.0, body=TakeEvidence(
        "r", 1, 1, 4711, "it stands still", node="z")), "z: it is not known here"),
], ids=["no leader", "a start", "the run's end", "a step to come", "nobody"])
def test_what_no_leader_may_order_is_refused_with_its_reason(
    asker: str, effect: Effect, why: str
) -> None:
    async def body() -> None:
        one, b = Agent(asker), Agent("b")
        async with agents(one, b):
            outcome = await one.others.carry_out(effect)
            assert not outcome.ok and why in outcome.error
            assert not b.performer.obeyed

    asyncio.run(body())


@pytest.mark.parametrize("question", [
    None, [], "x", {}, {"what": "everything"}, {"what": []}, {"what": "do"},
    {"what": "do", "effect": {"id": 1}}, {"what": "request", "request": {}},
    {"what": "incident", "id": {"a": 1}}, {"what": "answered"},
])
def test_junk_is_answered_as_such_and_the_agent_goes_on(question: Any) -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        async with agents(a, b):
            try:
                assert (await a.peers.ask("b", question, 5.0))["answer"] is None
            except ConnectionError as refused:
                assert "not understood" in str(refused)
            assert (await a.peers.ask("b", {"what": "ledger"}, 5.0))["answer"]["wall_s"] == 0

    asyncio.run(body())


def test_the_last_word_of_a_node_stays_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_nodes, "FRESH_S", 0.0)

    async def body() -> None:
        a, b = Agent("a"), Agent("b", (INCIDENT,))
        async with agents(a, b):
            own, word = await a.others.words("incidents")
            assert (own.node, own.answer, own.age_s) == ("a", [], 0.0)
            assert (word.node, word.age_s, word.problem) == ("b", 0.0, "")
            assert word.answer[0]["id"] == INCIDENT.id and word.owners == {INCIDENT.id: 1000}
            asked = await a.others.incident(INCIDENT.id)
            assert asked is not None and (asked.node, asked.problem) == ("b", "")
            await b.peers.close()
            _, word = await a.others.words("incidents")
            assert word.answer[0]["id"] == INCIDENT.id
            assert word.problem and word.age_s is not None and word.age_s >= 0.0
            asked = await a.others.incident(INCIDENT.id)
            assert asked is not None and asked.problem == "it does not answer"
            assert await a.others.incident("nobody's") is None
            _, word = await a.others.words("ledger")  # which nobody asked for in time
            assert word.answer is None and word.age_s is None and word.problem

    asyncio.run(body())


def test_words_of_anothers_run_stay_with_its_owner() -> None:
    word = other_nodes.Word("b", 0.0, "", [msgspec.to_builtins(INCIDENT)], {INCIDENT.id: 1000})

    def read(uid: int, everything: bool = False) -> str:
        who = Reader(everything, uid, lambda run: None, lambda id: None)
        return str(fleet.row("incidents", word, who)["answer"][0]["reason"])

    assert read(1000) == read(0, everything=True) == "secret words"
    assert read(1001) == WITHHELD


def test_a_request_goes_to_the_node_that_leads_and_its_answer_comes_back() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        asked = Request("op-1", "restart_ranks", "run/r", reason="try", run="r", by="eva (uid 0)")
        async with agents(a, b):
            assert (a.others.leader("r"), b.others.leader("r"), b.others.leader("s")) == (
                "", "a", "")
            with pytest.raises(ConnectionError, match="no run 'r' on a"):
                await b.others.forward("a", asked)
            await a.others.forward("b", asked)
            (taken,) = b.operators.taken
            assert taken.by == "eva (uid 0) at a"
            assert (await a.others.request_state("op-1") or {})["state"] == "done"
            assert await a.others.request_state("op-2") is None

    asyncio.run(body())


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
@pytest.mark.parametrize("left_s", [600.0, 0.0])
def test_a_pause_that_was_asked_elsewhere_ends_by_the_clock_of_who_leads(
    monkeypatch: pytest.MonkeyPatch, off_s: float, left_s: float
) -> None:
    clock = SimpleNamespace(wall_s=1e9 + off_s)
    monkeypatch.setattr(other_nodes, "time", SimpleNamespace(
        time=lambda: clock.wall_s, monotonic=time.monotonic))

    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        answer = b.others.asked

        async def by_its_own_clock(node: str, question: Any) -> dict[str, Any]:
            clock.wall_s = 1e9
            return await answer(node, question)

        b.asked = by_its_own_clock  # type: ignore[method-assign]
        asked = Request("op-1", "pause", "run/r", reason="try", run="r",
                        until_wall_s=clock.wall_s + left_s)
        async with agents(a, b):
            await a.others.forward("b", asked)
            assert b.operators.taken[0].until_wall_s == 1e9 + left_s
            # Without an end it gets none.
            await a.others.forward("b", msgspec.structs.replace(asked, until_wall_s=0.0))
            assert b.operators.taken[1].until_wall_s == 0.0
            # An older release sends no seconds.
            older = {"what": "request", "request": msgspec.to_builtins(asked)}
            await a.peers.ask("b", older, 2.0)
            assert b.operators.taken[2].until_wall_s == asked.until_wall_s
            for bad in (-1.0, "2h", True, [1.0]):
                with pytest.raises(ConnectionError):
                    await a.peers.ask("b", {**older, "for_s": bad}, 2.0)
            assert len(b.operators.taken) == 3

    asyncio.run(body())


def test_questions_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "ANSWERING_MAX", 1)

    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        held = asyncio.Event()

        async def slow(node: str, question: Any) -> dict[str, Any]:
            await held.wait()
            return {"answer": "late"}

        b.asked = slow  # type: ignore[method-assign]
        async with agents(a, b):
            first = asyncio.ensure_future(a.peers.ask("b", {"what": "status"}, 30.0))
            await until(lambda: b.peers._answering == 1)
            with pytest.raises(ConnectionError, match="ask again"):
                await a.peers.ask("b", {"what": "status"}, 30.0)
            held.set()
            assert (await first)["answer"] == "late"
            held.clear()
            with pytest.raises(ConnectionError, match="did not answer within 0.2 s"):
                await a.peers.ask("b", {"what": "status"}, 0.2)
            held.set()

    asyncio.run(body())


def test_many_who_look_ask_once() -> None:
    async def body() -> None:
        a, b = Agent("a"), Agent("b")
        count = 0
        answer = b.others.asked

        async def counted(node: str, question: Any) -> dict[str, Any]:
            nonlocal count
            count += 1
            return await answer(node, question)

        b.asked = counted  # type: ignore[method-assign]
        async with agents(a, b):
            await asyncio.gather(*(a.others.words("ledger") for _ in range(20)))
            assert count == 1

    asyncio.run(body())
