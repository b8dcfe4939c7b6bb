"""What stands before an order for the node: found by real files and sockets, never by waiting."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest
from fakes import Hung, until
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from root_unit import HEADER, INCIDENT, Unit, called, commands, empty_proc, options
from test_root_helper import core
from waiting import LIMIT_S

from holdfast.agent.actions import preconditions
from holdfast.agent.actions.evidence_store import write_incident
from holdfast.agent.core.nodes import repair
from holdfast.agent.daemon.parts import node_order_gate
from holdfast.agent.system import procfs

assert commands  # a fixture
ROW = "0000000000000000: 00000002 00000000 {flags} {kind} 01 1234 {path}\n"
OTHER = "/run/user/7/holdfast/x/agent.sock"


async def look(daemon):
    return await preconditions.look(daemon.state, daemon.evidence)


def table(proc: Path, *paths: str, flags: str = "00010000", kind: str = "0005") -> None:
    empty_proc(proc)
    rows = (ROW.format(flags=flags, kind=kind, path=path) for path in paths)
    (proc / "net/unix").write_text(HEADER + "".join(rows))


def process(proc: Path, pid: int, ppid: int, state: str = "S", uid: int = 7) -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (a b) c) {state} {ppid} " + "0 " * 40)
    (proc / str(pid) / "status").write_text(f"Name:\tUid: 0\nUid:\t{uid}\t0\t0\t0\n")


# ------------------------------------------------------------------------ other agents, own ranks


def test_an_agent_that_listens_is_found_in_the_kernels_own_table(tmp_path):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        assert str(path) not in preconditions.other_agents(Path("/proc"), "")
        other.listen()
        assert str(path) in preconditions.other_agents(Path("/proc"), "")
        assert str(path) not in preconditions.other_agents(Path("/proc"), str(path))
    assert path.exists() and str(path) not in preconditions.other_agents(Path("/proc"), "")


def test_only_what_listens_like_an_agent_is_one(tmp_path):
    for flags, kind, path in (("00000000", "0005", OTHER), ("00010000", "0001", OTHER),
                              ("00010000", "0005", "/run/api.sock"), ("zz", "0005", OTHER),
                              ("00010000", "0005", "@holdfast/agent.socks")):
        table(tmp_path, path, flags=flags, kind=kind)
        assert preconditions.other_agents(tmp_path, "") == ()
    table(tmp_path, *(f"/x{number}/agent.sock" for number in range(500)))
    assert len(preconditions.other_agents(tmp_path, "")) == preconditions.OTHERS_MAX


def test_of_a_long_path_the_first_two_hundred_characters_are_named(tmp_path):
    paths = [f"/{'x' * (length - 12)}/agent.sock" for length in (199, 200, 201, 900)]
    table(tmp_path, *paths)
    assert preconditions.other_agents(tmp_path, "") == tuple(sorted(one[:200] for one in paths))


def test_a_table_that_cannot_be_read_to_its_end_is_not_an_empty_one(agent, tmp_path, monkeypatch):
    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            (tmp_path / "proc/net/unix").unlink()
            assert "No such file" in (await look(daemon)).closed
            table(tmp_path / "proc", *(f"/x{number}" for number in range(99)), OTHER)
            assert (await look(daemon)).others == (OTHER,)
            monkeypatch.setattr(preconditions, "TABLE_MAX_BYTES", 4096)
            gate = await look(daemon)
            assert "net/unix is longer than" in gate.closed and gate.others == ()
            monkeypatch.setattr(preconditions, "TABLE_MAX_BYTES", 1 << 20)
            table(tmp_path / "proc", *(f"/x{number:0900}" for number in range(1300)))
            assert "net/unix is longer than 1 MiB" in (await look(daemon)).closed

    asyncio.run(scenario())


def test_where_proc_hides_processes_no_order_leaves_and_the_group_is_named(agent, tmp_path):
    table(tmp_path / "proc")
    (tmp_path / "proc/1/stat").unlink()

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            closed = (await look(daemon)).closed
            assert "hidepid" in closed and "SupplementaryGroups=" in closed

    asyncio.run(scenario())


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_table_breaks_the_look(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("proc")
    (folder / "net").mkdir()
    (folder / "net/unix").write_bytes(HEADER.encode() + b"\n".join(lines))
    assert isinstance(preconditions.other_agents(folder, ""), tuple)


def test_a_child_of_a_rank_is_ours_and_an_orphan_is_not(tmp_path):
    for pid, ppid in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20), (31, 32), (32, 31)):
        process(tmp_path, pid, ppid)
    pids = [10, 11, 12, 20, 21, 31, 99]
    assert preconditions._ours(tmp_path, pids, frozenset({10}), frozenset()) == (10, 11, 12)
    assert preconditions._ours(tmp_path, pids, frozenset(), frozenset()) == ()


def test_a_rank_is_ours_by_its_users_word_and_no_other_users(tmp_path):
    """It may outlive its launcher: then nothing but that word says whose it was."""
    for pid, uid in ((10, 7), (11, 8), (12, 0), (13, 8)):
        process(tmp_path, pid, 1, "D", uid)
    said = frozenset({(10, 7), (11, 7), (12, 7), (13, 0), (99, 7)})
    assert preconditions._ours(tmp_path, [10, 11, 12, 13, 99], frozenset(), said) == (10, 13)


def test_a_driver_that_hangs_leaves_what_it_said_last_while_that_lives(
    agent, tmp_path, monkeypatch
):
    table(tmp_path / "proc")
    for pid, ppid, state in ((10, 1, "S"), (11, 10, "D"), (12, 1, "Z"), (13, 1, "R")):
        process(tmp_path / "proc", pid, ppid, state)
    said = tuple(("accelerator_process", f"vendor=nvidia,device=0,pid={pid}", 1.0, 1.0)
                 for pid in (11, 12, 13, 14))

    class Runner:
        def last(self, name):
            return said if name == "nvidia" else ()

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            real, daemon.state.runner = daemon.state.runner, Runner()
            gate = await look(daemon)
            # In a container the numbers that a driver lists are the host's.
            monkeypatch.setattr(procfs, "sees_host", lambda proc: False)
            assert (await look(daemon)).gone == ()
            daemon.state.runner = real
            assert gate.seen == ((11, "nvidia device 0"), (13, "nvidia device 0"))
            assert gate.ours == () and gate.others == () and gate.gone == (12, 14)

    asyncio.run(scenario())


# ------------------------------------------------------------------------ whether it could leave


def test_what_an_order_needs_is_missed_before_anything_is_ended(agent, tmp_path):
    table(tmp_path / "proc")
    path, kept = tmp_path / "n.sock", tmp_path / "kept"

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            async def closed() -> str:
                return (await look(daemon)).closed

            assert (await closed()).endswith("is holdfast-node.socket enabled?")
            path.write_text("")
            assert "is no socket" in await closed()
            path.unlink()
            with socket.socket(socket.AF_UNIX) as unit:
                unit.bind(str(path))
                kept.write_text("a file where the folder should be")
                assert (await closed()).startswith("evidence.store: ")
                kept.unlink()
                assert await closed() == "" and list(kept.iterdir()) == []

    asyncio.run(scenario())


def test_a_store_that_hangs_closes_the_gate_and_opens_it_again(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(preconditions, "ANSWER_S", 0.05)
    table(tmp_path / "proc")
    hung = Hung(tmp_path / "hung")
    real = preconditions.write_probe

    def through_it(folder, node):
        if hung.path.exists():
            hung.path.write_bytes(b"x")
        real(folder, node)

    monkeypatch.setattr(preconditions, "write_probe", through_it)

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            with socket.socket(socket.AF_UNIX) as unit:
                unit.bind(str(tmp_path / "n.sock"))
                for _ in range(3):
                    assert (await look(daemon)).closed.endswith("does not answer")
                hung.answer()
                await until(lambda: not daemon.evidence.side_thread.busy_s)
                monkeypatch.setattr(preconditions, "ANSWER_S", LIMIT_S)
                assert (await look(daemon)).closed == ""

    asyncio.run(scenario())


def test_a_store_that_the_sandbox_keeps_read_only_says_which_key_opens_it(
    agent, tmp_path, monkeypatch
):
    def refused(folder, node):
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(preconditions, "write_probe", refused)
    table(tmp_path / "proc")

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            with socket.socket(socket.AF_UNIX) as unit:
                unit.bind(str(tmp_path / "n.sock"))
                closed = (await look(daemon)).closed
                assert "Read-only file system" in closed
                assert closed.endswith("ReadWritePaths= of holdfast.service (docs/node-orders.md)")

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [OSError("no"), ValueError("no"), RuntimeError("no")])
def test_a_store_that_cannot_be_tried_keeps_every_order_here(agent, tmp_path, monkeypatch, error):
    """The agent that ends has no thread for it any more."""
    table(tmp_path / "proc")

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            async def do(what, function):
                raise error

            monkeypatch.setattr(daemon.evidence.side_thread, "do", do)
            with socket.socket(socket.AF_UNIX) as unit:
                unit.bind(str(tmp_path / "n.sock"))
                assert (await look(daemon)).closed == "evidence.store: no"

    asyncio.run(scenario())


def test_nothing_is_written_through_a_link_that_somebody_put_into_the_store(tmp_path):
    journal, store = tmp_path / "journal.db", tmp_path / "store"
    journal.write_text("precious")
    store.mkdir()
    for name in (".node-a.probe", ".i1.json.new"):
        (store / name).symlink_to(journal)
    preconditions.write_probe(store, "node-a")
    write_incident(store, INCIDENT)
    assert journal.read_text() == "precious"
    assert sorted(one.name for one in store.iterdir()) == [".node-a.probe", "i1.json"]
    assert not (store / "i1.json").is_symlink()


def test_nobody_looks_while_nothing_asks_for_an_order(agent, tmp_path, monkeypatch):
    monkeypatch.setattr(node_order_gate, "IDLE_S", 0.01)
    monkeypatch.setattr(node_order_gate, "LOOK_S", 0.01)

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, node):
            await until(lambda: node.steps)
            part = daemon.node_order_gate
            assert not preconditions.wanted(daemon.state) and part.gate is preconditions.UNSEEN
            for allowed in (True, False):
                node.incidents = (replace(INCIDENT, closed_wall_s=0.0 if allowed else 2.0),)
                daemon.wake("test")
                await until(lambda: (part.gate is preconditions.UNSEEN) != allowed)  # noqa: B023

    asyncio.run(scenario())


def test_an_end_that_comes_with_the_stores_answer_is_not_lost(agent, tmp_path, monkeypatch):
    """An agent whose part goes on ends by its unit's time limit alone."""
    table(tmp_path / "proc")

    async def scenario():
        async with agent(**options(tmp_path)) as (daemon, _):
            answer = asyncio.get_running_loop().create_future()
            monkeypatch.setattr(daemon.evidence.side_thread, "do", lambda *_: answer)
            looking = asyncio.create_task(look(daemon))
            with socket.socket(socket.AF_UNIX) as unit:
                unit.bind(str(tmp_path / "n.sock"))
                await until(lambda: answer._callbacks)
                answer.set_result(None)
                looking.cancel()
                await asyncio.wait([looking])
            assert looking.cancelled()

    asyncio.run(scenario())


# ------------------------------------------------------------------------ the whole way


def test_a_run_of_another_agent_is_waited_for_and_then_the_node_goes(
    agent, commands, tmp_path, monkeypatch
):
    monkeypatch.setattr(repair, "SETTLE_S", 0.1)
    monkeypatch.setattr(node_order_gate, "LOOK_S", 0.02)
    table(tmp_path / "proc", OTHER, str(tmp_path / "run/agent.sock"))
    line = b"NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus."
    (tmp_path / "kmsg").write_bytes(b"3,5,1,-;" + line + b"\n")
    waits = f"reboot_node: allowed, waits while the run of the agent at {OTHER} goes on"

    async def scenario():
        async with agent(node=core(tmp_path), collectors__kmsg=str(tmp_path / "kmsg"),
                         agent__tick_s=0.05, **options(tmp_path)) as (daemon, _):
            await until(lambda: any(
                one.would_have.startswith(waits) for one in daemon.incident_log.incidents.values()
            ))
            assert called(tmp_path) == []
            table(tmp_path / "proc", str(tmp_path / "run/agent.sock"))
            await until(lambda: called(tmp_path))

    unit = Unit(tmp_path)
    try:
        asyncio.run(scenario())
    finally:
        unit.close()
    assert called(tmp_path) == ["reboot node-a gpu_fell_off_bus"]
