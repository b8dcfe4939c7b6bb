"""Which of a thousand nodes an agent is in touch with, and which addresses are taken away."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.agent.core.model import Beat, Doc, Documents, Lease, Plan, Resume, StoreView
from holdfast.agent.daemon.parts import peers as part
from holdfast.agent.peers import beats, conversation, remembered
from holdfast.agent.peers.beats import Address
from holdfast.agent.peers.choice import ALL_NEAR, LINES_MAX, NEAR, NEIGHBOURS_MAX, choice, near
from holdfast.agent.store import identity
from holdfast.agent.store.memory import MemoryServer, MemoryStore


def names(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 256, 257])
def test_in_a_small_cluster_everybody_is_in_touch_with_everybody(count: int) -> None:
    for own in names(count)[:: max(1, count // 5)]:
        found = choice(own, names(count), ())
        assert found == (frozenset(names(count)) - {own}, 0, 0)


@pytest.mark.parametrize("count", [258, 1000, 2000])
def test_in_a_large_one_each_is_its_neighbours_neighbour_and_nobody_is_alone(count: int) -> None:
    known = names(count)
    chosen = {own: choice(own, known, ()) for own in known}
    for own, found in chosen.items():
        assert len(found.wanted) == NEIGHBOURS_MAX and own not in found.wanted
        assert found.left_out == count - 1 - NEIGHBOURS_MAX and not found.missing
        assert all(own in chosen[other].wanted for other in found.wanted)
    # Whoever watches a node has many others who watch it too and whom it hears of.
    for own in known[::97]:
        watchers = [other for other in known if own in chosen[other].wanted]
        for other in watchers:
            assert len(chosen[other].wanted.intersection(watchers)) >= NEIGHBOURS_MAX // 2 - 1


@pytest.mark.parametrize("count", [1000, 2000])
def test_all_nodes_of_a_run_are_in_touch_however_late_their_names(count: int) -> None:
    known = names(count)
    run = frozenset(random.Random(count).sample(known, 300)) | {known[899], known[-1]}
    for own in run:
        found = choice(own, known, run)
        assert run - {own} <= found.wanted and not found.missing
        assert all(own in choice(other, known, run).wanted for other in list(run)[:5]
                   if other != own)


@pytest.mark.parametrize("count", [2, ALL_NEAR + 1, ALL_NEAR + 2, 300, 2000])
def test_near_are_all_of_few_and_of_many_those_who_are_near_one_another(count: int) -> None:
    """Whichever runs each of them shares with others."""
    known = names(count)

    def near_of(own: str, mates: list[str]) -> set[str]:
        return set(near(own, choice(own, known, mates).wanted))

    for at in range(0, count, 1 + count // 60):
        own = known[at]
        found = near_of(own, known[::3] if at % 2 else [])
        assert len(found) == (count - 1 if count <= ALL_NEAR + 1 else NEAR) and own not in found
        assert all(own in near_of(other, known[::7]) for other in found)


def test_a_run_of_too_many_nodes_is_told_how_many_are_missing() -> None:
    known = names(LINES_MAX + 500)
    found = choice(known[0], known, known)
    assert found.missing == 499 and found.left_out == 0
    assert len(found.wanted) == LINES_MAX


def place(port: int, *runs: str) -> bytes:
    return msgspec.json.encode(part.Place("10.0.0.1", port, "x", {
        run: part.Place("10.0.0.1", port + 1, "y") for run in runs}))


def test_who_shares_a_run_is_known_by_plan_leader_beats_and_private_agents() -> None:
    plan = Plan("r", 1, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "x", spares=("c",))
    docs = Documents([
        Doc("run/r", 1, msgspec.json.encode(plan)), Doc("run/s", 1, msgspec.json.encode(
            msgspec.structs.replace(plan, run="s", members=("z",), spares=()))),
        Doc("run/bad", 1, b"{"),
        Doc("address/d", 1, place(1, "r")), Doc("address/y", 1, place(2, "s")),
        Doc("address/bad", 1, b"{")])
    view = StoreView(True, docs, (Lease("r", "e"), Lease("s", "x")))
    heard = [("f", "r"), ("w", "s"), ("g", "")]
    assert part.mates({"r"}, view, heard) == set("abcdef")
    assert part.mates({"bad"}, view, heard) == part.mates((), view, heard) == frozenset()


# ----------------------------------------------------------------- a launcher far away


class Listener:
    def beats_came(self, told: object, is_news: bool) -> None: ...
    def nodes_lost(self, nodes: frozenset[str]) -> None: ...


class OfStore(MemoryStore):
    """With the names that agents hold."""

    names: frozenset[str] = frozenset()

    def present(self) -> frozenset[str]:
        return self.names


def agent_of(
    store: OfStore, name: str, *runs: str, folder: Path = Path("/nowhere")
) -> part.PeerPart:
    """Its part, with launchers of these runs, whose lines connect to nothing."""
    config: Any = SimpleNamespace(
        agent=SimpleNamespace(state_dir=str(folder)),
        detect=SimpleNamespace(lease_s=10.0),
        store=SimpleNamespace(url="etcd://127.0.0.1:2379", cluster="main"),
        cluster=SimpleNamespace(listen="127.0.0.1:0", token_file=""))
    state: Any = SimpleNamespace(name=name, config=config, is_private=False)
    launchers: Any = SimpleNamespace(runs=lambda: runs)
    return part.PeerPart(state, store, launchers, lambda _: None, errors.append)


errors: list[Any] = []


@pytest.fixture(autouse=True)
def _no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rests(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(beats.Line, "_run", rests)


async def store_of(count: int) -> tuple[OfStore, MemoryServer]:
    server = MemoryServer(lambda: 0.0, 10.0)
    server.docs |= {f"address/{name}": Doc(f"address/{name}", 1, place(port))
                         for port, name in enumerate(names(count), 1)}
    store = OfStore(server, "n0000", lambda: 0.0)
    await store.refresh()
    return store, server


def test_two_launchers_at_the_ends_of_a_thousand_names_find_each_other() -> None:
    """Neither is the other's neighbour.  One takes the lease; the other then speaks to it, and is
    answered from its first beat on."""
    async def body() -> None:
        store, server = await store_of(1000)
        one, other = agent_of(store, "n0100", "r"), agent_of(store, "n0899", "r")
        try:
            for agent in (one, other):
                agent._know(store.view())
                assert len(agent.peers.lines) == NEIGHBOURS_MAX
            server.leases["r"] = "n0100", 10.0
            await store.refresh()
            other._know(store.view())
            assert "n0100" in other.peers.lines and "n0899" not in one.peers.lines
            one.peers._keep("n0899", conversation.Told((Beat("n0899", "r", 0, 0.0),)))
            one._know(store.view())
            assert "n0899" in one.peers.lines
        finally:
            await one.peers.close()
            await other.peers.close()

    asyncio.run(body())


def test_addresses_of_nodes_that_are_long_gone_are_taken_away_and_no_others() -> None:
    """Of 300 host names of an autoscaling group 60 are gone: silent for ten minutes of this
    observer's ticks, and without a name in the store."""
    async def body() -> None:
        store, server = await store_of(300)
        agent = agent_of(store, "n0150")
        try:
            agent._know(store.view())
            gone = set(names(300)[124:149])
            cut_off = set(names(300)[120:124])  # these reach the store, and not this node
            store.names = frozenset(cut_off)
            ticks = int(conversation.GONE_S / conversation.PING_S)
            far = agent.peers.far_every()
            silent = gone | cut_off
            assert not agent.peers.near.isdisjoint(silent)
            for tick in range(ticks + far):
                agent.peers.detector.tick()
                for name in agent.peers.lines.keys() - silent if tick % far == 0 else ():
                    agent.peers.detector.heard(name, (), agent.peers.every(name))
                if tick == ticks // 2:
                    await agent._forget_gone()
                    assert len(server.docs) == 300
            server.available = False
            await store.refresh()
            await agent._forget_gone()
            assert len(server.docs) == 300
            server.available = True
            for _ in range(3):
                await store.refresh()
                agent._know(store.view())
                await agent._forget_gone()
            left = {key.partition("/")[2] for key in server.docs}
            assert left == set(names(300)) - gone
            assert not gone & agent.peers.addresses.keys() and not errors
        finally:
            await agent.peers.close()

    asyncio.run(body())


def test_a_store_that_was_seeded_anew_gets_the_token_again_and_the_first_one_holds(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an agent that starts then would be a stranger to all that run."""
    async def body() -> None:
        store, server = await store_of(2)
        other = OfStore(server, "n0001", lambda: 0.0)
        one, two = agent_of(store, "n0000"), agent_of(other, "n0001")
        one.peers.token, two.peers.token = b"old", b"made by one that has just begun"
        server.available = False
        await store.refresh()
        await one._keep_token()
        server.available = True
        assert part.TOKEN not in server.docs
        for agent, of in ((one, store), (two, other)):
            await of.refresh()
            await agent._keep_token()
        assert server.docs[part.TOKEN].body == two.peers.token == b"old"
        for where in ("", "another cluster"):  # as behind `store forget`
            del server.docs[part.TOKEN]
            await store.refresh()
            one._token_of = where
            monkeypatch.setattr(store, "view", lambda: msgspec.structs.replace(
                MemoryStore.view(store), cluster="c2"))
            await one._keep_token()
            assert part.TOKEN not in server.docs
            server.docs[part.TOKEN] = Doc(part.TOKEN, 1, b"old")
        monkeypatch.undo()
        one._token_of_file = "a file's"
        server.docs[part.TOKEN] = Doc(part.TOKEN, 2, b"other")
        await store.refresh()
        await one._keep_token()
        assert one.peers.token == b"old" and not errors

    asyncio.run(body())


def test_who_is_kept_in_touch_with_is_chosen_anew_only_when_something_changed(monkeypatch) -> None:
    """Of 16,384 nodes each choice takes tens of milliseconds, and most seconds bring no news."""
    chosen: list[frozenset[str]] = []
    real = part.mates

    def counted(*given: Any) -> frozenset[str]:
        chosen.append(real(*given))
        return chosen[-1]

    async def body() -> None:
        store, server = await store_of(4)
        agent = agent_of(store, "n0000", "r")
        try:
            for _ in range(3):
                agent._know(store.view())
            assert len(chosen) == 1
            server.leases["r"] = "n0001", 10.0
            await store.refresh()
            agent._know(store.view())
            agent.peers._keep("n0002", conversation.Told((Beat("n0002", "other", 0, 0.0),)))
            agent._know(store.view())
            assert chosen[1:] == [{"n0001"}]
            agent.peers._keep("n0003", conversation.Told((Beat("n0003", "r", 0, 0.0),)))
            agent._know(store.view())
            agent._launchers.runs = lambda: ()
            agent._know(store.view())
            assert chosen[2:] == [{"n0001", "n0003"}, frozenset()]
            server.docs["address/n0009"] = Doc("address/n0009", 1, place(9))
            await store.refresh()
            agent._know(store.view())
            assert "n0009" in agent.peers.lines and len(chosen) == 5
        finally:
            await agent.peers.close()

    monkeypatch.setattr(part, "mates", counted)
    asyncio.run(body())


def test_an_agent_that_starts_while_the_store_is_away_knows_where_the_others_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a script's permits, which need every node's word then, would run out."""
    monkeypatch.setattr(part, "AWAY_S", 0.0)
    identity.write_known(tmp_path / identity.FILE, identity.Known("n", "main", "c1"))

    def view(store: OfStore, cluster: str = "c1") -> StoreView:
        return msgspec.structs.replace(store.view(), cluster=cluster)

    async def body() -> None:
        store, server = await store_of(3)
        first = agent_of(store, "n0000", folder=tmp_path)
        first.peers.token = b"secret"
        first._know(view(store))
        first._remember(view(store, ""))
        assert not (tmp_path / "peers.json").exists(), "of which cluster it is was not known"
        first._remember(view(store))
        await first._side_thread.close(5.0)
        await first.peers.close()
        assert (tmp_path / "peers.json").stat().st_mode & 0o777 == 0o600
        server.available = False
        away = OfStore(server, "n0000", lambda: 0.0)
        await away.refresh()
        again = agent_of(away, "n0000", folder=tmp_path)
        again.peers.token = await asyncio.wait_for(again._token(), 5.0)
        again._know(away.view())
        again._launchers.runs = lambda: ("r",)
        again._know(away.view())  # a launcher comes: its mates are among those still
        assert again.peers.choice.wanted == {"n0001", "n0002"}
        assert again.peers.token == b"secret"
        assert again.peers.addresses == {name: Address("10.0.0.1", port) for port, name in
                                         ((2, "n0001"), (3, "n0002"))}
        server.available = True
        del server.docs["address/n0002"]
        await away.refresh()
        again._know(away.view())
        assert set(again.peers.addresses) == {"n0001"}, "the store's word holds once it answers"
        await again.peers.close()
        for known in (identity.Known("n", "main", "another"), identity.Known("n"),
                      identity.Known("n", "other", "c1")):
            identity.write_known(tmp_path / identity.FILE, known)
            assert agent_of(away, "n0000", folder=tmp_path)._remembered.token == ""
        assert remembered.read(tmp_path / "peers.json", "c1", "").token == "secret"
        assert remembered.read(tmp_path / "peers.json", "c1", "7 boot").token == ""

    asyncio.run(body())


@pytest.mark.parametrize("text", [
    "", "{", "[" * 100_000, '{"cluster": "c1", "places": {"a": 3}}', "\xff"])
def test_what_is_remembered_and_cannot_be_read_is_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_bytes(text.encode("latin-1"))
    assert remembered.read(tmp_path / "peers.json", "c1", "") == remembered.Remembered()


def test_a_part_that_crashed_begins_with_all_its_connections_again(monkeypatch) -> None:
    async def body() -> None:
        store, _ = await store_of(3)
        agent = agent_of(store, "n0000")
        monkeypatch.setattr(agent, "_publish", failing)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a bug of ours"):
                await agent._stay(part.Place("127.0.0.1", 1, "i"))
            assert set(agent.peers.lines) == {"n0001", "n0002"}
            await agent.peers.close()
            assert not agent.peers.lines

    async def failing(_: object) -> None:
        raise RuntimeError("a bug of ours")

    asyncio.run(body())


def test_a_choice_that_failed_is_made_again(monkeypatch) -> None:
    async def body() -> None:
        store, _ = await store_of(3)
        agent = agent_of(store, "n0000")
        with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
            broken.setattr(agent.peers, "know", lambda *_: 1 / 0)
            agent._know(store.view())
        agent._know(store.view())
        assert set(agent.peers.lines) == {"n0001", "n0002"}
        await agent.peers.close()

    asyncio.run(body())


def test_a_node_whose_line_goes_while_its_kernel_is_to_be_asked_can_be_asked_again() -> None:
    """Else whoever watched it never learned of its next death."""
    async def body() -> None:
        store, server = await store_of(3)
        agent = agent_of(store, "n0000")
        agent._know(store.view())
        before = server.docs.pop("address/n0001")
        agent.peers.ask_kernel("n0001")
        await store.refresh()
        agent._know(store.view())
        while agent.peers._probes:
            await asyncio.sleep(0.01)
        server.docs["address/n0001"] = before
        await store.refresh()
        agent._know(store.view())
        agent.peers.ask_kernel("n0001")
        (task,) = agent.peers._probes.values()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert not agent.peers._probes
        await agent.peers.close()

    asyncio.run(asyncio.wait_for(body(), 30.0))


def test_another_token_ends_what_was_proven_with_the_one_before() -> None:
    async def body() -> None:
        store, server = await store_of(3)
        agent = agent_of(store, "n0000")
        agent.peers.token = b"leaked"
        agent._know(store.view())
        before = {name: line.task for name, line in agent.peers.lines.items()}
        served = asyncio.ensure_future(asyncio.Event().wait())
        agent.peers._incoming.add(served)  # type: ignore[arg-type]
        server.docs[part.TOKEN] = Doc(part.TOKEN, 1, b"\xff new")
        await store.refresh()
        await agent._keep_token()
        await asyncio.gather(*before.values(), served, return_exceptions=True)
        assert served.cancelled() and all(one.cancelled() for one in before.values())
        agent._know(store.view())
        agent._remember(msgspec.structs.replace(store.view(), cluster="c1"))
        assert set(agent.peers.lines) == set(before) and agent.peers.token == b"\xff new"
        await agent.peers.close()

    asyncio.run(body())


def test_what_a_node_wrote_of_itself_goes_once_it_was_away_for_long(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster of which nodes come and go by ever new names; what excludes one stays."""
    monkeypatch.setattr(part, "AWAY_LONG_S", 0.0)

    async def body() -> None:
        store, server = await store_of(3)
        for kind in ("identity", "checks", "baseline", "tested", "node"):
            for name in ("n0001", "cut-off", "gone"):
                server.docs[f"{kind}/{name}"] = Doc(f"{kind}/{name}", 1, b"{}")
        store.names = frozenset(("cut-off",))
        await store.refresh()
        agent = agent_of(store, "n0000")
        try:
            await agent._forget_gone()
            await store.refresh()
            await agent._forget_gone()
        finally:
            await agent.peers.close()
        assert sorted(key for key in server.docs if key.endswith("/gone")) == ["node/gone"]
        assert len(server.docs) == 3 + 2 * 5 + 1 and not errors

    asyncio.run(body())
