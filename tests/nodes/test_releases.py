"""Nodes of different releases in one run: neighbours train together, a distant one is refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from .harness import Nodes
from .worlds import LEASE_S, ROOT, World, output

PACKAGES = ("agent", "collectors", "dashboards", "runbooks", "trainer", "worker")
# Their agents did not say which protocol they speak.
BEFORE = "b1f728b14339e84447138c210d7c9b921d644c31"
STEPS = 10_000  # more than the hurts take
LOOPING = str(Path(__file__).with_name("looping.py"))
SAID = re.compile(r"^PROTOCOL = (\d+)", re.M)


class Mixed(World):
    """Some nodes have another release: agent, launcher and all."""

    def __init__(self, nodes: Nodes, trees: Mapping[int, Path]) -> None:
        super().__init__(nodes)
        self.trees = trees
        self.settings = "gather_s = 4.0\n"

    def environ(self, number: int) -> dict[str, str]:
        tree = self.trees.get(number, ROOT)
        return super().environ(number) | {"PYTHONPATH": str(tree / ".types")}

    def transport(self, number: int) -> Path:
        """The file that this node's agent speaks by."""
        asked = "import holdfast.agent.peers.transport as found; print(found.__file__)"
        return Path(self.nodes[number].run(
            [sys.executable, "-P", "-c", asked], self.environ(number)).stdout.strip())


def linked(tree: Path) -> Path:
    """As the checkout's own .types."""
    (tree / ".types/holdfast").mkdir(parents=True)
    for package in PACKAGES:
        (tree / ".types/holdfast" / package).symlink_to(tree / package)
    return tree


def of_revision(revision: str, tree: Path) -> Path:
    tree.mkdir(parents=True)
    told = subprocess.run(["git", "-C", str(ROOT), "archive", revision, *PACKAGES],
                          capture_output=True, check=False)
    if told.returncode:
        pytest.skip(f"revision {revision} is not in this checkout's history")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=told.stdout, check=True)
    return linked(tree)


def changed(tree: Path, protocol: int) -> Path:
    """This release, but for the protocol that it says."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package,
                        ignore=shutil.ignore_patterns("__pycache__"))
    file = tree / "agent/peers/transport.py"
    file.write_text(SAID.sub(f"PROTOCOL = {protocol}", file.read_text()))
    return linked(tree)


@pytest.fixture()
def nodes() -> Iterator[Nodes]:
    with Nodes(4, weight=16) as made:
        yield made


def own_protocol() -> int:
    found = SAID.search((ROOT / "agent/peers/transport.py").read_text())
    assert found
    return int(found[1])


def test_a_run_over_two_neighbouring_releases_goes_on_whoever_of_them_leads(nodes: Nodes) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    world = Mixed(nodes, {1: of_revision(BEFORE, nodes.home / "before")})
    assert "PROTOCOL" not in world.transport(1).read_text()
    assert world.transport(0).samefile(ROOT / "agent/peers/transport.py")
    world.labels = {0: {"rack": "r7"}}  # of which the other's agent tells its ranks nothing
    world.start_store()
    world.train(range(2), 2, STEPS)
    world.wait(lambda: min(world.step(number) for number in range(2)) >= 3)
    led = []
    for generation in (2, 3):
        leader = world.led_by()
        led.append(leader)
        places = {number: rank for rank, number in world.all_places(generation - 1, 2).items()}
        victim = world.all_ranks(1 - leader)[places[1 - leader]]["pid"]
        os.kill(victim, signal.SIGKILL)
        world.wait(lambda g=generation: [world.generation(n) for n in range(2)] == [g, g])
        step = world.step(leader)
        world.wait(lambda s=step: min(world.step(n) for n in range(2)) > s + 2)
        told = "".join(output(world.nodes[number]) for number in range(2))
        assert f"planned generation {generation} from the survivors' memory" in told, world.said()
        assert "labels of" not in told, told
        if generation == 2:  # and now the other release leads
            agent = world.agent_pid(leader)
            os.kill(agent, signal.SIGSTOP)
            world.wait(lambda was=leader: world.leader() == 1 - was, 30.0)
            os.kill(agent, signal.SIGCONT)
            world.wait(lambda: len(world.places(2)) == 2)
    assert sorted(led) == [0, 1], world.said()
    answer = world.answer(0, "/api/v1/status")
    assert "protocol" not in world.said() and answer["refused_nodes"] == {}


def test_a_release_that_is_no_neighbour_is_refused_by_name_and_nothing_is_done(
    nodes: Nodes,
) -> None:
    own = own_protocol()
    world = Mixed(nodes, {2: changed(nodes.home / "far", own + 2)})
    world.start_store()
    flags = ("run", "--nnodes", "2:3", "--nproc-per-node", "1", "--preload", "none", LOOPING,
             str(world.shared))
    for number in range(2):
        world.launch(number, *flags)
    world.wait(lambda: len(world.places(1)) == 2, 60.0)
    pids = {rank: world.all_ranks(number)[rank]["pid"]
            for rank, number in world.all_places(1, 2).items()}
    documents = world.documents()

    world.launch(2, *flags)
    sentence = f"speaks protocol {own + 2} of agents, and this node {own}: install the same release"
    for number in range(2):
        world.wait(lambda number=number: f"n2 {sentence}" in " ".join(
            world.ask(number, "status").stdout.split()), 60.0)
        log = next((nodes[number].home / "state").rglob("agent.log")).read_text()
        assert f"n2 {sentence}" in log and "Traceback" not in log, log
    far = f"speaks protocol {own} of agents, and this node {own + 2}: install the same release"
    word = world.wait(lambda: (world.get(2, "/api/v1/status") or {}).get("refused_nodes"))
    assert all(f"{name} {far}" in word[name] for name in word) and set(word) <= {"n0", "n1"}, word
    # Nobody did anything to anybody: the same ranks, the same plan, nothing said of the node.
    begun_s = time.monotonic()
    world.wait(lambda: time.monotonic() - begun_s > 3 * LEASE_S)  # what would be done is done then
    assert {rank: world.all_ranks(number)[rank]["pid"]
            for rank, number in world.all_places(1, 2).items()} == pids
    assert world.documents() == documents
    assert not [one for number in range(2) for one in world.own_incidents(number)], world.said()
    (world.shared / "end").write_text("")
    assert [world.processes[number].wait(60) for number in range(3)] == [0, 0, 0], world.said()
    assert all(f"n2 {sentence}" in output(nodes[number]) for number in range(2)), world.said()
    assert far in output(nodes[2]), world.said()
    logs = [list((nodes[number].home / "state").rglob("stdout.log")) for number in range(3)]
    assert logs[0] and logs[1] and not logs[2], logs  # no rank ever began there
