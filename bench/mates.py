"""What the size of a run costs each of its agents in words to the others, 4 to 2,048 nodes.

    python -m bench.mates [--nodes 256 2048] [--seconds 20]

One agent's real connections over loopback, and what it keeps of what the others say, each of 8
ranks.  The others are real as well, all in one process on the other processor; each knows this
agent alone, and speaks to it as often as it would among them all.  No store, core or launcher takes
part.  A row has the seconds of the processor that this agent's process used in a second, and the
age of the oldest beat that it held: one older than three fifths of a lease would be stale.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from holdfast.agent.core.run.members import STALE_LEASES
from holdfast.agent.daemon.parts.peers import is_broken
from holdfast.agent.peers.beats import Address, Peers
from holdfast.agent.peers.choice import near
from holdfast.agent.peers.conversation import PING_S, Told
from holdfast.agent.system.clocks import boot_s

from . import memory
from .common import BENCH, Results
from .plan_scale import beat_of, name

SIZES = (4, 16, 64, 256, 1024, 2048)
LEASE_S = 10.0
STEP_S = 1.0  # between two of the agent's steps, each of which tells a new beat
JOIN_LIMIT_S = 120.0
DESCRIPTORS = 6  # of one other: two connections, both ends of each, and its listener
HOST, TOKEN = "127.0.0.1", b"bench"


class Listener:
    """What the agent's part does with each word."""

    def __init__(self) -> None:
        self.words, self.lost = 0, 0

    def beats_came(self, told: Told, is_news: bool) -> None:
        self.words += 1
        for beat in told.beats:
            is_broken(beat)

    def nodes_lost(self, nodes: frozenset[str]) -> None:
        self.lost += len(nodes)

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return {}


class Agent(Peers):
    """Peers that count what they say."""

    said = 0

    def word_for(self, name: str, now_s: float) -> Any:
        self.said += 1
        return super().word_for(name, now_s)


class Other(Peers):
    """One of the others: it knows the agent alone, and speaks as if it knew all."""

    def __init__(self, number: int, nodes: int) -> None:
        super().__init__(name(number), f"{number:016x}", Listener(), lambda: LEASE_S, ignored)
        others = [name(one) for one in range(nodes) if one != number]
        self.lines = dict.fromkeys(others)  # type: ignore[arg-type]
        self.pace = 1 if name(0) in near(self.name, others) else self.far_every()
        self.lines = {}
        self.token, self.told = TOKEN, Told((beat_of(number),))

    def every(self, name: str) -> int:
        return self.pace


def ignored(part: str, error: BaseException | str) -> None:
    """Nothing goes wrong here that the rows do not say."""


async def crowd(nodes: int, way: Connection) -> None:
    others = [Other(number, nodes) for number in range(1, nodes)]
    way.send([await one.listen(HOST, 0) for one in others])
    port = await asyncio.to_thread(way.recv)
    for one in others:
        one.know({name(0): Address(HOST, port)})
    await asyncio.to_thread(way.recv)
    await asyncio.gather(*(one.close() for one in others))


def begin_crowd(nodes: int, way: Connection) -> None:
    asyncio.run(crowd(nodes, way))


async def ticking(agent: Peers) -> None:
    while True:
        agent.tick()
        await asyncio.sleep(PING_S)


async def stepping(agent: Peers, oldest: list[float]) -> None:
    while True:
        now_s = boot_s()
        oldest.append(max((now_s - one.boot_s for one in agent.heard()), default=0.0))
        agent.tell(Told((beat_of(0),)))
        await asyncio.sleep(STEP_S)


async def measured(nodes: int, seconds: float, way: Connection) -> dict[str, Any]:
    listener, before_mb = Listener(), rss_mb()
    agent = Agent(name(0), "0" * 16, listener, lambda: LEASE_S, ignored)
    agent.token = TOKEN
    ports = await asyncio.to_thread(way.recv)
    way.send(await agent.listen(HOST, 0))
    agent.know({name(number): Address(HOST, port) for number, port in enumerate(ports, 1)})
    agent.know(agent.addresses, frozenset(agent.addresses))
    oldest: list[float] = []
    tasks = [asyncio.create_task(ticking(agent)), asyncio.create_task(stepping(agent, oldest))]
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(JOIN_LIMIT_S):
            while len(agent.heard()) < nodes - 1:
                await asyncio.sleep(0.1)
        joined_s = time.monotonic() - begun_s
        await asyncio.sleep(LEASE_S)  # until everybody speaks at its own time
        oldest.clear()
        said, words, used_s, begun_s = agent.said, listener.words, time.process_time(), \
            time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun_s
        used_s = time.process_time() - used_s
        return {"joined_s": round(joined_s, 2), "core": round(used_s / took_s, 4),
                "words_out_s": round((agent.said - said) / took_s, 1),
                "told_in_s": round((listener.words - words) / took_s, 1),
                "oldest_beat_s": round(max(oldest), 2), "stale_s": STALE_LEASES * LEASE_S,
                "called_lost": listener.lost, "memory_mb": round(rss_mb() - before_mb, 1)}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await agent.close()


def rss_mb() -> float:
    return memory.rollup(os.getpid())["Rss"]


def row(nodes: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"case": "mates", "nodes": nodes, "ok": False, "why": ""}
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=begin_crowd, args=(nodes, theirs), daemon=True)
    other.start()
    try:
        found |= asyncio.run(measured(nodes, seconds, mine))
        found["ok"] = found["oldest_beat_s"] <= found["stale_s"] and not found["called_lost"]
    except TimeoutError:
        found["why"] = f"not all were heard of within {JOIN_LIMIT_S:g} s"
    finally:
        with contextlib.suppress(OSError):
            mine.send("")
        other.join(20.0)
        other.kill()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.mates", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(most, DESCRIPTORS * max(options.nodes) + 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    results, good = Results("mates", options.out), True
    for nodes in options.nodes:
        # Each in a process of its own: one's memory is not the next one's.
        found = in_process(nodes, options.seconds)
        results.add(found)
        print("  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
        good = good and bool(found["ok"])
    print(f"rows: {results.path}")
    return 0 if good else 1


def in_process(nodes: int, seconds: float) -> dict[str, Any]:
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=said_back, args=(nodes, seconds, theirs))
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = mine.recv()
    finally:
        child.join()
    return found


def said_back(nodes: int, seconds: float, way: Connection) -> None:
    way.send(row(nodes, seconds))


if __name__ == "__main__":
    sys.exit(main())
