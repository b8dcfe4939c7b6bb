"""Runs that are started on this node from another one: who may, and what is never started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.agent.core.model import Doc, Lease, Plan, Request, Resume, StoreView
from holdfast.agent.daemon import starts as module
from holdfast.agent.daemon.attempts import (
    GOES_ON,
    HERE,
    OVER,
    UNKNOWN,
    KnownAttempt,
    Local,
    Still,
    judged,
)
from holdfast.agent.daemon.starts import (
    ALL,
    END,
    LOOK,
    START,
    STARTS,
    Accepting,
    Asked,
    Launched,
    Order,
    Refusal,
    Runs,
    Starts,
    Waiting,
)
from holdfast.agent.web import starts as web_starts
from holdfast.agent.web.body import BAD_BODY
from holdfast.worker.peers import user_name

ALICE, BOB = 54101, 54102


class Wire:
    """Agents that reach each other; what one asks goes through JSON, as on the line."""

    def __init__(self, *names: str) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.journal: list[Request] = []
        self.requests: list[Request] = []
        self.refused: list[tuple[int, str, str, str]] = []
        self.owners: dict[str, int] = {}  # of launchers that nobody here started
        self.served: set[str] = set()
        self.store = StoreView(up=True)
        self.agents = {name: Starts(name, Line(self, name), self.runs()) for name in names}

    def runs(self) -> Runs:
        return Runs(self.owners.get, self.served.__contains__, lambda: self.store,
                    self.request, self.journal.append,
                    lambda *said: self.refused.append(said))

    def request(self, one: Request) -> bool:
        self.requests.append(one)
        return True

    async def ask(self, asker: str, name: str, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((name, question))
        sent = msgspec.json.decode(msgspec.json.encode(question))
        return dict(msgspec.json.decode(msgspec.json.encode(
            await self.agents[name].asked(asker, sent))))


class Line:
    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name

    def others(self) -> tuple[str, ...]:
        return tuple(one for one in self._wire.agents if one != self._name)

    async def ask(self, name: str, question: Any, limit_s: float) -> dict[str, Any]:
        if name not in self._wire.agents:
            raise ConnectionError("it is not known here")
        return await self._wire.ask(self._name, name, question)


class Accept:
    """What `holdfast accept` does, without its processes."""

    def __init__(self, starts: Starts, uid: int, life: str = "life-of-one") -> None:
        self.starts, self.uid, self.life, self.count = starts, uid, life, 0
        self.got: list[dict[str, Any]] = []
        self.runs: list[Launched] = []

    async def ask(self, wait_s: float, gone: bool = False) -> list[dict[str, Any]]:
        self.count += 1
        said = Waiting(self.life, self.count, wait_s, list(self.runs))
        return await self.starts.orders(self.uid, said, lambda: gone)

    async def loop(self) -> None:
        while True:
            for order in await self.ask(5.0):
                self.got.append(order)
                if order["do"] == START:
                    self.runs.append(Launched(order["id"], order["run"], "running"))
            await self.ask(0.0)


def order(run: str = "m5", **more: Any) -> Order:
    return Order(run, "run", ["--run", run, "train.py"], "/home/alice", **more)


def play(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30.0))


async def started(wire: Wire, uid: int, nodes: list[str], run: str = "m5"
                  ) -> dict[str, dict[str, Any]]:
    """As the command does: what is queued is looked after."""
    rows = await wire.agents["a"].everywhere(START, uid, Asked(nodes, run, order(run)))
    while waited := [node for node, row in rows.items() if row["state"] == "queued"]:
        await asyncio.sleep(0.01)
        rows |= await wire.agents["a"].everywhere(LOOK, uid, Asked(waited, run))
    return rows


def test_an_order_reaches_the_same_users_accept_and_no_other() -> None:
    async def body() -> None:
        wire = Wire("a", "b", "c")
        alice, bob = (Accept(wire.agents["b"], uid) for uid in (ALICE, BOB))
        loops = [asyncio.create_task(one.loop()) for one in (alice, bob)]
        await asyncio.sleep(0)
        rows = await started(wire, ALICE, ["b", "c", "a", "nowhere"])
        assert rows["b"] == {"state": "running", "code": 0, "text": ""}
        assert rows["c"]["state"] == "refused" and "nobody accepts" in rows["c"]["text"]
        assert rows["nowhere"]["state"] == "" and "not known" in rows["nowhere"]["text"]
        assert "a" not in rows, "its launcher is the command's own"
        (got,) = alice.got
        assert (got["run"], got["command"], got["folder"]) == ("m5", "run", "/home/alice")
        assert got["arguments"] == ["--run", "m5", "train.py"] and got["by"].endswith("at a")
        assert not bob.got
        (kept,) = wire.journal
        assert (kept.action, kept.run) == (START, "m5") and "train.py" not in kept.reason
        # Whose it is not neither sees nor ends it.
        for verb in (LOOK, END):
            theirs = await wire.agents["a"].everywhere(verb, BOB, Asked(["b"], "m5"))
            assert theirs["b"]["state"] == "refused"
        assert not [one for one in alice.got if one["do"] == END]
        for one in loops:
            one.cancel()

    play(body)


def test_end_reaches_every_node() -> None:
    async def body() -> None:
        wire = Wire("a", "b", "c")
        there = [Accept(wire.agents[name], ALICE) for name in ("b", "c")]
        loops = [asyncio.create_task(one.loop()) for one in there]
        await asyncio.sleep(0)
        await started(wire, ALICE, [ALL])
        rows = await wire.agents["c"].everywhere(END, ALICE, Asked([ALL], "m5"))
        assert {node: row["state"] for node, row in rows.items()} == {
            "a": "refused", "b": "running", "c": "running"}
        assert not wire.requests, "who started them ends them"
        assert not wire.refused
        await wire.agents["c"].everywhere(END, BOB, Asked(["b"], "m5"))
        assert wire.refused == [(BOB, "end a run", "another user's run", "m5")]
        while not all(len(one.got) == 2 for one in there):
            await asyncio.sleep(0)
        assert all(one.got[1] == {"do": END, "id": one.runs[0].id} for one in there)
        assert [one.action for one in wire.journal].count(END) == 2
        for task in loops:
            task.cancel()

    play(body)


def test_end_asks_the_core_where_a_launcher_was_started_otherwise() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        wire.owners["m5"] = ALICE
        theirs = await wire.agents["a"].everywhere(END, BOB, Asked(["b"], "m5"))
        assert theirs["b"]["state"] == "refused" and not wire.requests
        assert wire.refused == [(BOB, "end a run", "another user's run", "m5")]
        await wire.agents["a"].everywhere(END, BOB, Asked(["b"], "nobodys"))
        assert len(wire.refused) == 1, "a name that nobody has is no run of another's"
        rows = await wire.agents["a"].everywhere(END, ALICE, Asked(["b"], "m5"))
        assert rows["b"]["state"] == "running"
        (asked,) = wire.requests
        assert (asked.action, asked.run) == ("drain", "m5") and f"uid {ALICE}" in asked.by

    play(body)


def test_a_run_that_goes_on_is_not_started_beside_itself() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        loop = asyncio.create_task(accept.loop())
        await asyncio.sleep(0)
        await started(wire, ALICE, ["b"])
        again = (await started(wire, ALICE, ["b"]))["b"]
        assert again["state"] == "refused" and "goes on here already" in again["text"]
        assert len(accept.got) == 1
        loop.cancel()

    play(body)


def test_what_nobody_fetched_never_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEGINS_S", 0.05)

    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        await accept.ask(0.0)  # it was here a moment ago, and fetches nothing
        row = (await started(wire, ALICE, ["b"]))["b"]
        assert row["state"] == "refused" and "did not begin it within" in row["text"]
        assert await accept.ask(0.01) == [] and not wire.journal

    play(body)


def test_what_begins_when_nobody_expects_it_any_more_is_ended(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was fetched, and the folder's server did not answer for a while."""
    monkeypatch.setattr(module, "BEGINS_S", 0.1)

    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        await accept.ask(0.0)
        wait = asyncio.create_task(started(wire, ALICE, ["b"]))
        (fetched,) = await accept.ask(5.0)
        assert (await wait)["b"]["state"] == "refused"
        accept.runs.append(Launched(fetched["id"], "m5", "running"))
        assert await accept.ask(5.0) == [{"do": END, "id": fetched["id"]}]

    play(body)


def test_an_order_whose_answer_was_lost_is_given_again_and_an_end_as_well(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)

    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        await accept.ask(0.0)
        await wire.agents["a"].everywhere(START, ALICE, Asked(["b"], "m5", order()))
        (first,), (again,) = await accept.ask(1.0), await accept.ask(1.0)
        assert first["id"] == again["id"]
        accept.runs.append(Launched(first["id"], "m5", "running"))
        await accept.ask(0.0)
        await wire.agents["a"].everywhere(END, ALICE, Asked(["b"], "m5"))
        assert await accept.ask(1.0) == await accept.ask(1.0) == [{"do": END, "id": first["id"]}]
        accept.runs[0].state = "ended"
        assert await accept.ask(0.01) == []

    play(body)


def test_words_that_overtake_one_another_leave_the_newest_standing() -> None:
    async def body() -> None:
        starts = Wire("a", "b").agents["b"]
        new = Waiting("life-of-one", 2, 0.0, [Launched("i", "m5", "running")])
        await starts.orders(ALICE, new)
        await starts.orders(ALICE, Waiting("life-of-one", 1, 0.0, []))
        assert starts._look(ALICE, "m5").state == "running"

    play(body)


def test_one_accept_of_a_user_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        starts = Wire("a", "b").agents["b"]
        first = Accept(starts, ALICE, "first-life")
        await first.ask(0.0)
        with pytest.raises(Refusal, match="another `holdfast accept`"):
            await Accept(starts, ALICE, "second-life").ask(0.0)
        await Accept(starts, BOB, "second-life").ask(0.0)
        monkeypatch.setattr(module, "AWAY_S", 0.0)  # the first one has gone since
        await Accept(starts, ALICE, "second-life").ask(0.0)

    play(body)


def test_one_question_waits_for_each_user_and_a_dead_one_locks_nobody_out() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        starts = wire.agents["b"]
        accept = Accept(starts, ALICE, "first-life")
        older = asyncio.create_task(accept.ask(30.0))
        await asyncio.sleep(0)
        newer = asyncio.create_task(accept.ask(30.0))
        assert await asyncio.wait_for(older, 5.0) == []
        dead = asyncio.create_task(Accept(starts, BOB, "first-life").ask(30.0, gone=True))
        await asyncio.sleep(0)
        assert (await started(wire, BOB, ["b"]))["b"]["state"] == "refused"
        await Accept(starts, BOB, "second-life").ask(0.0)
        for task in (newer, dead):
            task.cancel()

    play(body)


def test_one_users_orders_are_few_and_a_run_that_is_here_is_not_started() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        await Accept(wire.agents["b"], ALICE).ask(0.0)
        rows = []
        for number in range(6):
            asked = Asked(["b"], f"m{number}", order(f"m{number}"))
            rows.append((await wire.agents["a"].everywhere(START, ALICE, asked))["b"]["state"])
        assert rows == ["queued"] * 4 + ["refused"] * 2
        wire.owners["by-ssh"] = ALICE
        asked = Asked(["b"], "by-ssh", order("by-ssh"))
        row = (await wire.agents["a"].everywhere(START, ALICE, asked))["b"]
        assert row["state"] == "refused" and "goes on here already" in row["text"]

    play(body)


def test_users_that_two_nodes_do_not_share_start_nothing() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        loop = asyncio.create_task(accept.loop())
        await asyncio.sleep(0)
        sent = {"what": STARTS, "verb": START, "uid": ALICE, "user": "mallory", "run": "m5",
                "order": msgspec.to_builtins(order())}
        said = await wire.agents["b"].asked("a", sent)
        assert said["answer"]["state"] == "refused"
        assert f"uid {ALICE} is mallory on a" in said["answer"]["text"]
        assert not accept.got
        loop.cancel()

    play(body)


GOOD: dict[str, Any] = {"what": STARTS, "verb": LOOK, "uid": ALICE, "user": user_name(ALICE),
                        "run": "m5"}


@pytest.mark.parametrize("change", [
    {"uid": "0"}, {"uid": None}, {"run": "../x"}, {"run": ""}, {"run": "a" * 49},
    {"verb": "exec"}, {"verb": START}, {"order": {}}, {"verb": START, "order": {"run": "m5"}},
    {"order": msgspec.to_builtins(order())},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "command": "sh"}},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "folder": "home"}},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "environment": {"A=B": "c"}}},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "arguments": ["a\0b"]}},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "arguments": ["x" * 20_000] * 4}},
    {"verb": START, "order": {**msgspec.to_builtins(order()), "uid": 0}},
])
def test_what_is_no_question_is_refused(change: dict[str, Any]) -> None:
    async def body() -> None:
        starts = Wire("a", "b").agents["b"]
        assert (await starts.asked("a", GOOD))["answer"]["state"] == "refused"
        with pytest.raises((LookupError, TypeError, ValueError)):
            await starts.asked("a", GOOD | change)

    play(body)


def test_over_the_network_nobody_starts_anything() -> None:
    """Not with an operator's token either: there the kernel does not say who asks."""
    async def body() -> None:
        starts = Wire("a", "b").agents["a"]
        for verb in web_starts.VERBS:
            request: Any = SimpleNamespace(match_info={"verb": verb}, transport=None)
            assert (await web_starts.answer(request, starts)).status == 403

    play(body)


def test_an_agent_without_others_says_what_to_set() -> None:
    async def body() -> None:
        alone = Starts("a", None, Wire().runs())
        with pytest.raises(Refusal, match=r"set \[store\]"):
            await alone.everywhere(START, os.getuid(), Asked(["b"], "m5", order()))
        assert list(await alone.everywhere(END, os.getuid(), Asked([ALL], "m5"))) == ["a"]

    play(body)


def test_an_order_that_accept_keeps_is_shown_ended_and_gives_way() -> None:
    """It waits there since its launcher was lost; nothing of it runs."""
    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        accept.runs = [Launched("start-1", "m5", "queued", text="waits")]
        await accept.ask(0.0)
        asked = Asked(["b"], "m5")
        row = (await wire.agents["a"].everywhere(LOOK, ALICE, asked))["b"]
        assert (row["state"], row["text"]) == ("queued", "waits")
        await wire.agents["a"].everywhere(END, ALICE, asked)
        assert await accept.ask(5.0) == [{"do": END, "id": "start-1"}]
        await wire.agents["a"].everywhere(START, ALICE, Asked(["b"], "m5", order()))
        (given,) = await accept.ask(5.0)
        assert given["do"] == START and given["id"] != "start-1"

    play(body)


def test_an_order_that_waits_is_found_behind_one_that_was_withdrawn() -> None:
    accepting = Accepting("life-of-it")
    accepting.late["start-2"] = "m5"
    for state in ("queued", "running"):
        accepting.launched = {"start-1": Launched("start-1", "m5", state)}
        found = accepting.of("m5")
        assert found is not None and (found.id, found.state) == ("start-1", state)


def test_what_begins_again_is_in_the_journal_once() -> None:
    async def body() -> None:
        wire = Wire("a", "b")
        accept = Accept(wire.agents["b"], ALICE)
        for state in ("queued", "running", "running"):
            accept.runs = [Launched("start-1", "m5", state)]  # type: ignore[arg-type]
            await accept.ask(0.0)
        (kept,) = wire.journal
        assert (kept.id, kept.action, kept.run) == ("start-1", START, "m5")
        assert "kept the order" in kept.by

    play(body)


def document(**changes: Any) -> Doc:
    plan = Plan("m5", 9, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "", spares=("c",),
                owner=ALICE, attempt=7)
    return Doc("run/m5", 3, msgspec.json.encode(msgspec.structs.replace(plan, **changes)))


def lease(node: str) -> tuple[Lease, ...]:
    return (Lease("other", "a", 0.0), Lease("m5", node, 0.0))


@pytest.mark.parametrize(("store", "served", "asked", "state", "told"), [
    (StoreView(True, (document(),), lease("a")), False, 7, GOES_ON, 7),
    (StoreView(True, (document(),), lease("b")), False, 7, UNKNOWN, 7),  # of its own last life
    (StoreView(True, (document(),), ()), False, 7, UNKNOWN, 7),  # nobody is left, or not yet
    (StoreView(True, (document(),), lease("a")), False, 6, OVER, 7),
    (StoreView(True, (document(attempt=0),), lease("a")), False, 7, OVER, 0),
    (StoreView(True, (document(finished=0),), lease("a")), False, 7, OVER, 7),
    (StoreView(True, (document(owner=BOB),), lease("a")), False, 7, OVER, 0),
    (StoreView(True, (document(owner=-1),), lease("a")), False, 7, OVER, 0),
    (StoreView(True, (), lease("a")), False, 7, UNKNOWN, 0),
    (StoreView(True, (Doc("run/m5", 1, b"{"),), lease("a")), False, 7, UNKNOWN, 0),
    (StoreView(False, (document(finished=0),), lease("a"), "no member"), False, 7, UNKNOWN, 0),
    (StoreView(True, (document(),), lease("a")), True, 0, HERE, 7),
    (StoreView(True, (document(members=("a",)),), lease("a")), True, 0, HERE, 0),
    (StoreView(True, (document(members=("a",), spares=("b",)),), lease("a")), True, 0, HERE, 7),
])
def test_whether_an_attempt_goes_on_is_known_or_is_not(
    store: StoreView, served: bool, asked: int, state: str, told: int
) -> None:
    found = judged(KnownAttempt("m5", asked), ALICE, store, Local("b", served))
    assert (found.state, found.attempt) == (state, told) and found.text
    assert found.witness == ("a" if state == GOES_ON else "")


def test_a_node_is_no_witness_of_its_own() -> None:
    store = StoreView(True, (document(),), lease("b"))  # type: ignore[arg-type]
    assert judged(KnownAttempt("m5", 7), ALICE, store, Local("a", False)).witness == "b"
    alone = document(ranks=((0, "a"), (1, "a")))
    store = StoreView(True, (alone,), lease("b"))  # type: ignore[arg-type]
    assert judged(KnownAttempt("m5", 7), ALICE, store, Local("a", False)).state == UNKNOWN


def status(**changes: Any) -> dict[str, Any]:
    """What an agent says of itself."""
    row = {"run": "m5", "generation": 9, "connected": True, **changes}
    return {"answer": {"runs": [row]}, "owners": {"m5": changes.get("uid", ALICE)}}


@pytest.mark.parametrize(("said", "state"), [
    (status(), GOES_ON), (status(generation=7), GOES_ON), (status(generation=10), GOES_ON),
    # Started under this name again, by the same user: nothing is planned for it yet.
    (status(generation=0), UNKNOWN), (status(generation=6), UNKNOWN),
    (status(connected=False), UNKNOWN), (status(uid=BOB), UNKNOWN), (status(run="m6"), UNKNOWN),
    (None, UNKNOWN), ({}, UNKNOWN), ({"answer": None, "owners": {}}, UNKNOWN),
    ({"answer": {"runs": [5]}, "owners": {}}, UNKNOWN), (status(generation="x"), UNKNOWN),
    (status() | {"owners": None}, UNKNOWN),
])
def test_a_run_goes_on_where_a_launcher_of_its_plan_says_so(
    said: dict[str, Any] | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        wire, asked = Wire("a", "b"), list[tuple[str, Any]]()

        async def ask(self: Line, name: str, question: Any, limit_s: float) -> Any:
            asked.append((name, question))
            if said is None:
                raise ConnectionError("it is lost")
            return said

        monkeypatch.setattr(Line, "ask", ask)
        wire.store = StoreView(True, (document(),), lease("c"))  # type: ignore[arg-type]
        answer = await wire.agents["b"].still(ALICE, Still([KnownAttempt("m5", 7)]))
        assert answer["node"] == "b" and answer["runs"]["m5"]["state"] == state
        assert asked == [("a", {"what": "status"})]
        # What is known without it asks nobody.
        wire.store = StoreView(True, (document(finished=0),), lease("c"))  # type: ignore[arg-type]
        answer = await wire.agents["b"].still(ALICE, Still([KnownAttempt("m5", 7)]))
        assert answer["runs"]["m5"] == {
            "state": OVER, "attempt": 7, "text": "it has ended with 0"} and len(asked) == 1

    play(body)


@pytest.mark.parametrize("body", [
    b"", b"[]", b"{}", b'{"runs": 1}', b'{"runs": [{"run": "../x"}]}',
    b'{"runs": [{"run": "m5", "attempt": -1}]}', b'{"runs": [], "more": 1}', b"[" * 100_000,
    b'{"runs": [' + b", ".join([b'{"run": "m5"}'] * 65) + b"]}",
])
def test_a_question_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(BAD_BODY):
        msgspec.json.decode(body, type=Still)
