"""A first run over nodes, with nothing set up: torchrun's command line, and an etcd of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from .harness import Node, Nodes
from .test_cluster_page import block
from .worlds import ANSWER_S, CLI, LEASE_S, ROOT, World, output

LOOPING = str(Path(__file__).with_name("looping.py"))
PORT = "29431"
PAGES_WORD = "/home/me/.holdfast-token"
C10D = ("--rdzv-backend", "c10d", "--rdzv-id", "job")


@pytest.fixture()
def world() -> Iterator[World]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is missing (Debian package etcd-server)")
    with Nodes(2) as nodes:
        yield World(nodes)


def launch(
    world: World, number: int, *flags: str, name: str = "job", endpoint: str = "",
    path: str = "", state: str = "",
    token: str = "", lease_s: float = 60.0, page: Sequence[str] = (),
) -> None:
    node = world.nodes[number]
    config = node.home / "agent.toml"
    word = node.home / "token"
    word.touch(mode=0o600)
    word.write_text(token)
    config.write_text(f'[agent]\nnode = "{node.name}"\nlisten = ""\n[checks]\ngate = []\n'
                      f'[detect]\nlease_s = {lease_s}\n'
                      + (block("token_file").replace(PAGES_WORD, str(word)) if token else ""))
    endpoint = endpoint or f"{world.nodes[0].address}:{PORT}"
    words = page or ("run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint,
                     *flags, "--preload", "none", LOOPING, str(world.shared))
    world.processes[number] = node.start(
        [*(("env", f"PATH={path}") if path else ()), *CLI, *words],
        {"HOLDFAST_CONFIG": str(config), "PYTHONPATH": str(ROOT / ".types"),
         "OMP_NUM_THREADS": "1", **({"HOLDFAST_STATE_DIR": state} if state else {})},
        output=f"{name}.out")


def of_the_page(world: World) -> list[str]:
    """The command of docs/cluster.md, with an address, a script and a number of ranks of here."""
    command = block("--rdzv-backend c10d").replace("\\\n", " ")
    for its, ours in (("10.0.0.1", world.nodes[0].address), ("-node 8", "-node 1"),
                      ("train.py", f"{LOOPING} {world.shared}")):
        assert its in command
        command = command.replace(its, ours)
    holdfast, *words = shlex.split(command)
    assert holdfast == "holdfast"
    return words


def etcds(node: Node) -> list[int]:
    found = []
    for pid in node.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"etcd"):
            found.append(pid)
    return found


def said(world: World) -> dict[int, dict[str, str]]:
    return {int(file.stem): json.loads(file.read_text()) for file in world.shared.glob("*.json")}


def pids(world: World) -> dict[int, str]:
    return {rank: seen["pid"] for rank, seen in said(world).items()}


def trains(world: World, before: dict[int, str]) -> Callable[[], bool]:
    """Two ranks, neither of them one of those before."""
    def found() -> bool:
        now = pids(world)
        return sorted(now) == [0, 1] and not set(now.values()) & set(before.values())
    return found


def ends(world: World) -> None:
    """Everywhere with 0, and nothing is left of the store."""
    (world.shared / "end").write_text("")
    assert [world.processes[number].wait(60) for number in range(2)] == [0, 0], world.said()
    assert not [pid for node in world.nodes for pid in etcds(node)]
    left = [path for path in world.nodes.home.rglob("*")
            if path.name in ("rendezvous", "store.json", "data", "peer:1", "rendezvous.password")]
    left += list(world.nodes.home.rglob("*.sock"))
    assert not left, (left, world.said())


def test_a_first_run_brings_its_own_store_and_takes_it_away(world: World) -> None:
    for number in range(2):
        launch(world, number, *C10D)
    world.wait(trains(world, {}))
    first = said(world)
    assert {one["WORLD_SIZE"] for one in first.values()} == {"2"}
    assert {one["TORCHELASTIC_RUN_ID"] for one in first.values()} == {"job"}
    (etcd,) = etcds(world.nodes[0])
    assert not etcds(world.nodes[1])

    # Nobody but its own user and the endpoint's port reaches it.
    heard = world.nodes[0].run(["ss", "-Hltn"]).stdout.split()
    assert [one for one in heard if one.endswith(":2380")] == []
    assert f"{world.nodes[0].address}:{PORT}" in heard and f"0.0.0.0:{PORT}" not in heard
    folder = Path(os.readlink(f"/proc/{etcd}/cwd"))
    assert folder.stat().st_mode & 0o077 == 0 and (folder / "peer:1").is_socket()

    # It dies, then its agent, and comes back with what it knew; the ranks hear nothing of it.
    for hurt in (lambda: etcd, lambda: world.agent_pid(0)):
        before = etcds(world.nodes[0])
        os.kill(hurt(), signal.SIGKILL)
        world.wait(lambda before=before: etcds(world.nodes[0]) not in ([], before))
    assert pids(world) == {rank: one["pid"] for rank, one in first.items()}
    assert all(Path(f"/proc/{pid}").exists() for pid in pids(world).values()), world.said()
    os.kill(int(first[1]["pid"]), signal.SIGKILL)
    world.wait(trains(world, pids(world)))
    assert {one["TORCHELASTIC_RESTART_COUNT"] for one in said(world).values()} == {"1"}
    ends(world)
    assert output(world.nodes[0]).count("single point of failure") == 1, world.said()
    assert "it is started again on the same data" in output(world.nodes[0])
    assert "single point" not in output(world.nodes[1])
    assert "Traceback" not in world.said()

    # The same name again is as free as the first was.
    for file in world.shared.iterdir():
        file.unlink()
    for number in range(2):
        launch(world, number, "--node-rank", str(number), "--run", "job")
    world.wait(trains(world, {}))
    ends(world)


def test_the_pages_command_trains_and_its_token_keeps_strangers_out(world: World) -> None:
    for number in range(2):
        launch(world, number, state=str(world.nodes.home / "home"), token="a word of all nodes",
               page=of_the_page(world))
    world.wait(trains(world, {}))
    assert said(world)[0]["TORCHELASTIC_RUN_ID"] == "nightly"
    command = ["etcdctl", "--endpoints", f"{world.nodes[0].address}:29400", "get", "--prefix", "/"]

    def refused() -> bool:
        stranger = world.nodes[1].run(command, {"ETCDCTL_API": "3"})
        assert not stranger.stdout, stranger
        return "user name is empty" in stranger.stderr  # and not that no answer came in time

    world.wait(refused, ANSWER_S)
    ends(world)


def test_another_run_at_the_same_port_is_refused_and_hurts_nobody(world: World) -> None:
    for number in range(2):
        launch(world, number, *C10D)
    world.wait(trains(world, {}))
    first, processes = pids(world), dict(world.processes)
    for number in range(2):
        launch(world, number, "--rdzv-id", "other", name="other")
    assert [world.processes[number].wait(60) for number in range(2)] == [78, 78]
    for node in world.nodes:
        told = output(node, "other")
        assert "the etcd of run job is there" in told and "another port" in told, told
        assert "Traceback" not in told
    world.processes = processes
    os.kill(int(first[0]), signal.SIGKILL)  # the first one is planned for as before
    world.wait(trains(world, first))
    ends(world)


def test_without_the_node_that_has_the_store_the_others_end_in_time(world: World) -> None:
    for number in range(2):
        launch(world, number, *C10D, "--gang-limit", "10", lease_s=LEASE_S)
    world.wait(trains(world, {}))
    world.power_off(0)
    assert world.processes[1].wait(60) == 75, world.said()
    told = output(world.nodes[1])
    assert f"kept by the node of --rdzv-endpoint {world.nodes[0].address}:{PORT}" in told, told


def test_an_endpoint_that_never_answers_is_not_waited_for_without_end(world: World) -> None:
    nobody = f"10.99.0.77:{PORT}"
    launch(world, 1, *C10D, "--gang-limit", "7", endpoint=nobody)
    assert world.processes[1].wait(60) == 75, world.said()
    told = output(world.nodes[1])
    assert f"waiting for the node of --rdzv-endpoint {nobody}" in told, told
    assert f"kept by the node of --rdzv-endpoint {nobody}" in told and "for 7 s" in told, told


def test_what_the_endpoints_node_lacks_is_said_at_once(world: World) -> None:
    empty = world.nodes.home / "empty"
    empty.mkdir()
    launch(world, 0, *C10D, path=str(empty))
    assert world.processes[0].wait(60) == 78, world.said()
    told = output(world.nodes[0])
    assert "apt-get install etcd-server" in told and "[store]" in told, told
    holder = world.nodes[0].start(
        [sys.executable, "-c", "import socket; s = socket.socket(); kept = []; "
         f"s.bind(('', {PORT})); s.listen(); print('on', flush=True)\n"
         "while True: kept.append(s.accept())"], output="holder.out")
    world.wait(lambda: "on" in output(world.nodes[0], "holder"))
    launch(world, 0, *C10D)
    assert world.processes[0].wait(60) == 78, world.said()
    told += output(world.nodes[0])
    assert f"--rdzv-endpoint {world.nodes[0].address}:{PORT}: Address already in use" in told, told
    assert holder.poll() is None
    launch(world, 0, *C10D, endpoint=f"localhost:{PORT}")
    assert world.processes[0].wait(60) == 78, world.said()
    told += output(world.nodes[0])
    assert "no other node reaches" in told and "Traceback" not in told, told
    assert not (world.nodes[0].home / "state" / "runs" / "job@n0" / "rendezvous").exists()
