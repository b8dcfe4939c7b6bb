"""Each hurt of the nodes does what it says, measured from within them, and nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_for

from .harness import Nodes, left, needed, sweep

PROBE = str(Path(__file__).with_name("probe.py"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(3, cable_mbit=400) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "nodes" in request.fixturenames:
        request.getfixturevalue("nodes").heal()


def asked(nodes: Nodes, node: int, *words: str) -> float:
    done = nodes[node].run([sys.executable, PROBE, *words], timeout_s=30.0)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout))


@contextmanager
def serving(nodes: Nodes, node: int, what: str) -> Iterator[None]:
    server = nodes[node].start([sys.executable, PROBE, what], output=f"{what}.out")
    wait_for(lambda: "ready" in nodes[node].said(f"{what}.out"))
    try:
        yield
    finally:
        server.kill()
        server.wait(10.0)


def mbit(nodes: Nodes, source: int, target: int) -> float:
    """The most of up to eight streams: a shaper is a bound, and a busy machine only stays below it.
    Three that bring nothing more say so."""
    def once() -> float:
        with serving(nodes, target, "sink"):
            return asked(nodes, source, "send", nodes[target].address)

    found = [once() for _ in range(3)]
    while len(found) < 8 and max(found) in found[-2:]:
        found.append(once())
    return max(found)


def reached(nodes: Nodes, source: int, target: int, count: int = 1) -> float:
    """The share of small packets that are answered."""
    with serving(nodes, target, "echo"):
        return asked(nodes, source, "packets", nodes[target].address, str(count))


def test_a_node_has_its_own_name_address_and_directories(nodes: Nodes) -> None:
    done = nodes[1].run(["sh", "-c", "hostname; ip -o -4 addr show dev eth0; echo $TMPDIR"])
    name, address, folder = done.stdout.strip().split("\n")
    assert name == "n1" and nodes[1].address in address and folder == str(nodes[1].home)
    assert nodes.peers == "n0=10.99.0.1,n1=10.99.0.2,n2=10.99.0.3"


def test_a_rate_holds_a_cable_or_one_link_alone(nodes: Nodes) -> None:
    usual = mbit(nodes, 0, 1)
    assert usual == pytest.approx(390, rel=0.1)
    nodes.rate(0, 280)
    assert mbit(nodes, 0, 1) == pytest.approx(0.7 * usual, rel=0.1)
    nodes.rate(0, None)
    nodes.link_rate(0, 1, 100)
    assert mbit(nodes, 0, 1) == pytest.approx(98, rel=0.1)
    assert mbit(nodes, 1, 0) == pytest.approx(98, rel=0.1)
    assert mbit(nodes, 0, 2) == pytest.approx(usual, rel=0.1)


def test_loss_loses_that_share(nodes: Nodes) -> None:
    assert reached(nodes, 0, 1, 300) == 1.0
    nodes.loss(0, 30)
    assert reached(nodes, 0, 1, 300) == pytest.approx(0.7, abs=0.15)
    nodes.loss(0, 0)
    assert reached(nodes, 0, 1, 50) == 1.0


def test_a_black_hole_and_a_partition_cut_what_they_name(nodes: Nodes) -> None:
    nodes.blackhole(1)
    assert reached(nodes, 0, 1) == reached(nodes, 1, 2) == 0.0 and reached(nodes, 0, 2) == 1.0
    nodes.blackhole(1, False)
    nodes.partition(0, 1)
    assert reached(nodes, 0, 1) == 0.0 and reached(nodes, 1, 2) == 1.0
    nodes.partition(0, 1, False)
    nodes.partition(0, 1, one_way=True)
    assert reached(nodes, 1, 0) == 0.0
    assert "came" in nodes[0].said("echo.out")  # what n1 sends arrives, and no answer comes back
    nodes.heal()
    assert reached(nodes, 0, 1) == 1.0


def test_delay_makes_the_way_there_and_back_longer(nodes: Nodes) -> None:
    def round_trip_s() -> float:
        with serving(nodes, 1, "sink"):
            return asked(nodes, 0, "connect", nodes[1].address)

    nodes.delay(1, 20)
    assert round_trip_s() >= 0.04
    assert mbit(nodes, 0, 1) > 1  # whole streams pass the forwarder as well
    nodes.delay(1, 0)
    assert reached(nodes, 0, 1) == 1.0
    wait_for(lambda: round_trip_s() < 0.04)  # a busy machine needs a few goes


def test_a_frozen_node_stands_still_and_a_quota_takes_its_share(nodes: Nodes) -> None:
    clocks = [nodes[number].start([sys.executable, PROBE, "count"], output="count.out")
              for number in (0, 1)]
    frozen, other = (nodes[number].home / "count.out" for number in (0, 1))
    wait_for(lambda: frozen.stat().st_size and other.stat().st_size)
    nodes.freeze(0)
    size, lines = frozen.stat().st_size, other.read_text().count("\n")
    wait_for(lambda: other.read_text().count("\n") > lines + 20)  # one that is not goes on
    assert frozen.stat().st_size == size > 0
    nodes.freeze(0, False)
    wait_for(lambda: frozen.stat().st_size > size)
    for clock in clocks:
        clock.kill()
        clock.wait(10.0)
    nodes.cpu(0, 0.2)
    assert asked(nodes, 0, "cpu-share") <= 0.3
    assert (before := nodes[0].throttled()) > 0
    nodes.cpu(0, None)
    asked(nodes, 0, "cpu-share")
    assert nodes[0].throttled() == before


def test_the_power_of_one_node_goes_and_all_of_it_ends(nodes: Nodes) -> None:
    process = nodes[2].start(["sh", "-c", "sleep 300 & sleep 300"])
    wait_for(lambda: len(nodes[2].pids()) > 1)
    nodes[2].kill()
    assert process.poll() is not None and nodes[2].pids() == []


def test_nothing_is_left_and_what_a_dead_test_left_is_removed() -> None:
    """A test that is killed leaves all of it; the next one finds it by its name."""
    needed()
    with Nodes(1) as made:
        assert len(left(made.owner)) >= 4
    assert left(made.owner) == []
    script = ("import sys, os, signal; sys.path[:0] = sys.argv[1:]\n"
              "from nodes.harness import Nodes\n"
              "made = Nodes(1).__enter__(); made[0].start(['sleep', '300'])\n"
              "print(made.owner, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run([sys.executable, "-c", script, tests], capture_output=True, text=True,
                          timeout=60, check=False)
    owner = done.stdout.strip()
    assert done.returncode == -signal.SIGKILL and left(owner), done.stderr
    sweep()
    assert left(owner) == []
