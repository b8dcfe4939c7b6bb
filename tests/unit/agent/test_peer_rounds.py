"""Tests between nodes as agents arrange them: real children over loopback, none with torch."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.agent.core.checks.node_tests import Found, read_found
from holdfast.agent.core.model import (
    Documents,
    Effect,
    Lease,
    NodeTests,
    Observed,
    RankView,
    RunView,
    StoreView,
)
from holdfast.agent.daemon import peer_rounds
from holdfast.agent.daemon.peer_rounds import PeerRounds
from holdfast.agent.daemon.state import AgentState
from holdfast.agent.peers.beats import Address, Peers

LEADER, OTHER, THIRD = "a", "b", "c"
LIMIT_S = 25.0


class Agent:
    """What of an agent takes part; `a` leads run r, and launchers of it are on all."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self.name, self.host = name, f"127.0.0.{ord(name) - ord('a') + 1}"
        store = StoreView(True, Documents(), (Lease("r", LEADER), Lease("s", LEADER)))
        self.errors: list[str] = []
        self.launchers = {"r", "s"}
        self.state: Any = SimpleNamespace(
            name=name, boot_id="boot", is_private=False, errors=self.on_error,
            launchers=SimpleNamespace(
                sessions=lambda: (), session=lambda run: run if run in self.launchers else None),
            snapshot=SimpleNamespace(observed=Observed(store=store)),
            config=SimpleNamespace(checks=SimpleNamespace(python=python)))
        for known in ("training", "job_pythons"):
            setattr(self.state, known, partial(getattr(AgentState, known), self.state))
        self.peers = Peers(name, f"life of {name}", self, lambda: 10.0, self.on_error)
        self.peers.token = b"t" * 16
        part: Any = self
        self.rounds = PeerRounds(self.state, part, folder / name)

    def beats_came(self, told: Any, is_news: bool) -> None: ...

    def nodes_lost(self, nodes: frozenset[str]) -> None: ...

    def on_error(self, _: str, error: BaseException | str) -> None:
        self.errors.append(str(error))

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return self.rounds.attend(node, question)


@asynccontextmanager
async def agents(folder: Path, names: str = "abc", python: str = "") -> AsyncIterator[list[Agent]]:
    empty = folder / "python"
    empty.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S \"$@\"\n")
    empty.chmod(0o755)
    made = [Agent(name, folder, python or str(empty)) for name in names]
    try:
        places = {one.name: Address(one.host, await one.peers.listen(one.host, 0)) for one in made}
        for one in made:
            one.peers.know(places)
        yield made
    finally:
        for one in made:
            await one.rounds.close()
            await one.peers.close()


def effect(names: str = "abc", run: str = "r", limit_s: float = LIMIT_S) -> Effect:
    return Effect(f"1/{run}/1", "run_check", f"run/{run}/peers", "x", limit_s,
                  NodeTests(run, tuple(names)))


async def arranged(one: Agent, asked: Effect) -> tuple[Found | None, str]:
    assert isinstance(asked.body, NodeTests)
    outcome = await one.rounds.arrange(asked, asked.body)
    return read_found(outcome.detail), outcome.error


def test_each_node_comes_and_says_why_it_makes_no_test(tmp_path: Path) -> None:
    async def body() -> None:
        async with agents(tmp_path) as made:
            made[1].state.snapshot.observed = msgspec.structs.replace(
                made[1].state.snapshot.observed, runs=(RunView("m", "b", "script", 1, ranks=(
                    RankView(0, "b", 1, 1, "running"),)),))
            found, error = await arranged(made[0], effect())
            assert found is not None, error
            why = dict(found.unknown)
            assert why.keys() == set("abc") and why["b"] == "m trains here, and would be disturbed"
            assert "no Python has torch" in why["a"] and "no Python has torch" in why["c"]
            assert not found.hurt and not found.problem
            assert (tmp_path / "b/results.json").exists()  # its own verdict, kept there

    asyncio.run(body())


def test_who_takes_no_part_is_unknown_with_his_reason_and_the_others_go_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with agents(tmp_path) as made:
            made[1].launchers.clear()
            found, error = await arranged(made[0], effect("abcz"))
            assert found is not None, error
            assert dict(found.unknown).items() >= {
                "b": "no launcher of run r is on b", "z": "it is not known here"}.items()
            made[2].launchers.clear()
            assert (await arranged(made[0], effect()))[1] == (
                "b: no launcher of run r is on b; c: no launcher of run r is on c")

    asyncio.run(body())


def test_a_node_whose_address_or_word_of_the_lease_comes_late_takes_part(tmp_path: Path) -> None:
    async def body() -> None:
        async with agents(tmp_path) as made:
            places, observed = made[0].peers.addresses, made[2].state.snapshot.observed
            made[0].peers.know({name: one for name, one in places.items() if name != "b"})
            made[2].state.snapshot.observed = Observed()

            def arrive() -> None:
                made[0].peers.know(places)
                made[2].state.snapshot.observed = observed

            asyncio.get_running_loop().call_later(1.5 * peer_rounds.AGAIN_S, arrive)
            found, error = await arranged(made[0], effect())
            assert found is not None, error
            assert all("no Python has torch" in why for _, why in found.unknown), found

    asyncio.run(body())


def test_a_child_that_never_answers_is_ended_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        hangs = tmp_path / "hangs"
        hangs.write_text("#!/bin/sh\nexec sleep 60\n")
        hangs.chmod(0o755)
        async with agents(tmp_path, "ab", str(hangs)) as made:
            begin_s = time.monotonic()
            found, error = await arranged(made[0], effect("ab", limit_s=7.0))
            assert time.monotonic() - begin_s < 7.0
            # Its own limits end first, and say who was not ready.
            assert error or found is not None and {why for _, why in found.unknown} == {
                "it came, and was not ready in time"}, (found, error)

    asyncio.run(body())


@pytest.mark.parametrize(("change", "why"), [
    ({"run": "x"}, "a does not lead run x"), ({"leader": ["c", "127.0.0.3"]}, "c does not lead"),
    ({"leader": "a"}, "not understood"), ({"port": "no"}, "not understood"),
    ({"limit_s": None}, "not understood"), ({"id": {}, "leader": [1, 2]}, "not understood")])
def test_only_who_leads_a_run_may_ask_and_junk_is_refused(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    async def body() -> None:
        async with agents(tmp_path, "ab") as made:
            question = {"what": peer_rounds.ATTEND, "run": "r", "id": "1", "limit_s": 5.0,
                        "leader": ["a", "127.0.0.1"], "port": 1}
            with pytest.raises(ConnectionError, match="lead|understood"):
                await made[0].peers.ask("b", question | change, 5.0)
            assert made[1].rounds._task is None

    asyncio.run(body())


def test_a_node_is_tested_for_one_run_at_a_time_and_anew_for_a_new_leader(tmp_path: Path) -> None:
    async def body() -> None:
        async with agents(tmp_path, "ab") as made:
            question = {"what": peer_rounds.ATTEND, "run": "r", "id": "1", "limit_s": 5.0,
                        "leader": ["a", "127.0.0.1"], "port": 1}  # where nobody listens
            await made[0].peers.ask("b", question, 5.0)
            while made[1].rounds._task is None:
                await asyncio.sleep(0.01)
            with pytest.raises(ConnectionError, match="b is tested for run r: ask again"):
                await made[0].peers.ask("b", question | {"run": "s"}, 5.0)
            first = made[1].rounds._task
            await made[0].peers.ask("b", question | {"id": "2"}, 5.0)
            while made[1].rounds._task is first:
                await asyncio.sleep(0.01)
            assert first.cancelled()

    asyncio.run(body())
