"""One run over hundreds of nodes in the simulator: how long its agents need, and what they cost.

    python -m bench.virtual_run [--nodes 16 64 256] [--words 1024] [--fleet 16384] [--runs 3]

Every agent is whole (core, performer, permits, what it says to the others); only clock, network,
store and ranks are virtual, so that hundreds fit into one process.  A world begins, trains for a
while, and loses one node for good.  Seconds are virtual: they count what the agents wait for, and
nothing of what their processors need, which stands beside them in seconds of this machine's.

With --words only what agents say to one another is there, without cores, launchers and ranks: that
fits for as many nodes as a run may have, and tells how soon all know of a lost one.  With --fleet
no run is there either: each speaks to its neighbours by name.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.agent.core.model import TRAINER
from holdfast.agent.peers.choice import NEIGHBOURS_MAX
from holdfast.agent.peers.conversation import Told
from holdfast.agent.simulate.cluster import Cluster, Shape, build
from holdfast.agent.simulate.edge import Edge
from holdfast.agent.simulate.faults import node_gone
from holdfast.agent.simulate.job import Gang
from holdfast.agent.simulate.loop import InvariantBroken, Loop, Trace
from holdfast.agent.simulate.machine import Machine, Process
from holdfast.agent.simulate.outgoing import Network, Weather
from holdfast.agent.simulate.peers import VirtualPeers
from holdfast.agent.simulate.storms import MANY, shipped

from .common import BENCH, Results, percentile
from .plan_scale import beat_of, name

SIZES, WORDS, FLEET = (16, 64, 256), (256, 1024), (16384,)
WHOLE, TALK, NEIGHBOURS = "virtual_run", "virtual_words", "virtual_fleet"
NPROC = 8
SETTINGS = replace(MANY, lease_s=10.0, gather_s=30.0)  # a lease as it ships
LOOK_S = 0.01
WORDS_S = 3.0  # each has told each by then
TRAINS_S, START_LIMIT_S, BACK_LIMIT_S = 12.0, 60.0, 60.0
EVENTS_MAX = 10**10
FIRST, SECOND = 1, 2


class Meter:
    """Seconds of the processor that one agent used: its steps, and the words it took."""

    def __init__(self, edge: Edge) -> None:
        self.edge, self.used_s, self.longest_s, self.words = edge, 0.0, 0.0, 0
        edge.step = self._timed(edge.step)  # type: ignore[method-assign]
        take = edge.words.take
        edge.words.take = self._timed(take, counts=True)  # type: ignore[method-assign]

    def _timed(self, go: Callable[..., None], counts: bool = False) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            begun_s = time.process_time()
            go(*arguments)
            took_s = time.process_time() - begun_s
            self.used_s += took_s
            self.words += counts
            self.longest_s = max(self.longest_s, took_s)
        return timed

    def clear(self) -> None:
        self.used_s = self.longest_s = 0.0
        self.words = 0


def world(seed: int, nodes: int) -> Cluster:
    shape = Shape(members=nodes, nproc=NPROC, least=nodes // 2, spares=1)
    cluster = build(seed, shape, SETTINGS, shipped())
    for edge in cluster.edges.values():
        edge.on_step = lambda *_: None  # nothing is judged here: tests/sim does
    for job in cluster.jobs.values():
        job.grade, job.target, job.step_s = TRAINER, 10**9, 1.0
    return cluster


def until(cluster: Cluster, holds: Callable[[], bool], limit_s: float) -> float:
    """Virtual seconds until it holds.  InvariantBroken where it does not in time."""
    begun_s = cluster.loop.now_s
    while not holds():
        if cluster.loop.now_s - begun_s > limit_s:
            raise InvariantBroken("in_time", f"not within {limit_s:g} s")
        cluster.loop.run_until(cluster.loop.now_s + LOOK_S, most=EVENTS_MAX)
    return cluster.loop.now_s - begun_s


def trains(cluster: Cluster, generation: int) -> Gang | None:
    gang = next(iter(cluster.jobs.values())).gangs.get(generation)
    return gang if gang is not None and gang.formed else None


def measured(seed: int, nodes: int) -> dict[str, Any]:
    cluster = world(seed, nodes)
    run = next(iter(cluster.jobs))
    began_s = until(cluster, lambda: trains(cluster, FIRST) is not None, START_LIMIT_S)
    leader = cluster.edges[cluster.store.holder(run) or ""]
    members = [one for one in cluster.edges.values() if one is not leader]
    member, victim = members[0], members[nodes // 2]
    meters = [Meter(one) for one in (leader, member)]
    cluster.loop.run_until(cluster.loop.now_s + TRAINS_S, most=EVENTS_MAX)
    now_s = leader.machine.boot_s()
    found = {
        "began_s": round(began_s, 2),
        "leader_core": round(meters[0].used_s / TRAINS_S, 4),
        "member_core": round(meters[1].used_s / TRAINS_S, 4),
        "words_in_s": round(meters[1].words / TRAINS_S, 1),
        "oldest_beat_s": round(max(now_s - one.boot_s for one in leader.words.heard()), 2)}
    for meter in meters:
        meter.clear()
    fault_s = cluster.loop.now_s
    at = list(cluster.edges.values()).index(victim)
    node_gone(cluster, (at + 0.5) / len(cluster.edges), 0.0)
    if victim.machine.up:
        raise InvariantBroken("the_fault", "another node was hit")
    others = [one for one in cluster.edges.values() if one is not victim]
    known_s: dict[str, float] = {}
    false = set[str]()

    def look() -> bool:
        for one in others:
            if victim.machine.name in one.lost:
                known_s.setdefault(one.machine.name, cluster.loop.now_s - fault_s)
            false.update(one.lost - {victim.machine.name})
        return trains(cluster, SECOND) is not None and len(known_s) == len(others)

    until(cluster, look, BACK_LIMIT_S)
    gang = trains(cluster, SECOND)
    assert gang is not None
    back_s = cluster.loop.now_s - fault_s
    return {**found, "known_p50_s": round(percentile(list(known_s.values()), 0.5), 2),
            "known_last_s": round(max(known_s.values()), 2), "back_s": round(back_s, 2),
            "called_lost": len(false), "resume": gang.resume.kind, "world": gang.world,
            "leader_fault_s": round(meters[0].used_s, 3),
            "leader_longest_s": round(meters[0].longest_s, 3)}


class Speaker:
    """An agent that does nothing but speak."""

    life = 1

    def __init__(self, loop: Loop, network: Network, number: int, rng: random.Random) -> None:
        self.machine = Machine(loop, name(number), rng.uniform(-0.005, 0.005), 0.0)
        self.network, self.weather, self.rng = network, Weather(), rng
        self.process, self.alive = Process(self.machine), True
        self.words: VirtualPeers

    def delay_s(self, least_s: float) -> float:
        return least_s + self.rng.random() * 0.01

    def beats_came(self, told: Told, is_news: bool) -> None: ...
    def nodes_lost(self, nodes: frozenset[str]) -> None: ...

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return {}


def spoken(seed: int, nodes: int, is_run: bool) -> dict[str, Any]:
    """How soon all that keep in touch with one of so many know that it is lost."""
    loop, network, rng = Loop(Trace()), Network(), random.Random(seed)
    speakers = [Speaker(loop, network, number, rng) for number in range(nodes)]
    for number, one in enumerate(speakers):
        others = speakers[:number] + speakers[number + 1:]
        if not is_run and len(others) > NEIGHBOURS_MAX:
            half = NEIGHBOURS_MAX // 2
            others = [speakers[(number + step) % nodes] for step in range(-half, half + 1) if step]
        one.words = VirtualPeers(one, others, SETTINGS.lease_s)
        one.words.tell(Told((beat_of(number),) if is_run else ()))
    for one in speakers:
        one.words.begin()
    loop.run_until(WORDS_S, most=EVENTS_MAX)
    victim = speakers[rng.randrange(nodes)]
    victim.alive = False
    victim.machine.crash()
    victim.process.kill()
    others = [one for one in speakers if victim.machine.name in one.words.lines]
    fault_s, known_s = loop.now_s, dict[str, float]()
    oldest_s = max(one.machine.boot_s() - beat.boot_s for one in others[:: 1 + nodes // 32]
                   for beat in one.words.heard()) if is_run else 0.0
    false = set[str]()
    while len(known_s) < len(others) and loop.now_s - fault_s < BACK_LIMIT_S:
        loop.run_until(loop.now_s + LOOK_S, most=EVENTS_MAX)
        for one in others:
            if victim.machine.name in one.words.lost:
                known_s.setdefault(one.machine.name, loop.now_s - fault_s)
            false.update(one.words.lost - {victim.machine.name})
    if len(known_s) < len(others):
        raise InvariantBroken("in_time", f"not known to all within {BACK_LIMIT_S:g} s")
    return {"oldest_beat_s": round(oldest_s, 2), "called_lost": len(false),
            "known_p50_s": round(percentile(list(known_s.values()), 0.5), 2),
            "known_last_s": round(max(known_s.values()), 2)}


def row(seed: int, nodes: int, case: str) -> dict[str, Any]:
    found: dict[str, Any] = {"case": case, "nodes": nodes, "ranks": NPROC * nodes, "seed": seed,
                             "ok": False, "why": ""}
    whole = case == WHOLE
    begun_s = time.monotonic()
    try:
        found |= measured(seed, nodes) if whole else spoken(seed, nodes, case == TALK)
        found["ok"] = not found["called_lost"] and (not whole or found["world"] == NPROC * nodes)
    except InvariantBroken as broken:
        found["why"] = str(broken)
    return {**found, "wall_s": round(time.monotonic() - begun_s, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.virtual_run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--words", type=int, nargs="*", default=WORDS)
    parser.add_argument("--fleet", type=int, nargs="*", default=FLEET)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results, good = Results("virtual_run", options.out), True
    gc.freeze()
    gc.disable()  # millions of objects that all live on
    cases = [(case, nodes) for case, sizes in (
        (WHOLE, options.nodes), (TALK, options.words), (NEIGHBOURS, options.fleet))
        for nodes in sizes]
    for case, nodes in cases:
        for found in map(partial(row, nodes=nodes, case=case), range(1, options.runs + 1)):
            gc.collect()
            results.add(found)
            print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
            good = good and bool(found["ok"])
    print(f"rows: {results.path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
