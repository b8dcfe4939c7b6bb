"""The store of many nodes on a real etcd of three members: traffic, latency, a member's death.

Owns five cases.  `steady`: what agents' store parts ask of etcd while nothing changes, each leading
a run of its own, counted by themselves and by the kernel (TCP's own headers included).
`steady_run`: the same of whole agents, counted by the kernel, while their four nodes train.
`write`: plans of several sizes below a lease.  `leader_loss`: how long writes stop after the
leader's SIGKILL, with etcd's usual timers and with short ones.  `elections`: what short timers
cost while nothing dies: how often a living leader was given up, and how long writes stood still,
with as many processes beside as `--burners` says, which burn the processors that the members need.
Needs etcd-server and iproute2; `steady_run` root and nftables as well.

    python -m bench.store [--cases steady steady_run write leader_loss elections]
                          [--agents 4] [--seconds 60] [--burners 4]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from .common import BENCH, ROOT, Results, percentile
from .false_verdicts import burners

sys.path.insert(0, str(ROOT / "tests"))

from etcd_servers import Etcd, etcd
from nodes.harness import Nodes
from nodes.worlds import World

from holdfast.agent.config import settings
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store.base import Conflict, StoreError
from holdfast.agent.store.etcd import EtcdStore, open_etcd

LEASE_S = settings.Detect().lease_s
HEADERS_BYTES = 54  # Ethernet, IPv4 and TCP of one segment, without options
GOAL_BYTES_S = 1024
USUAL_TIMERS = ("--heartbeat-interval", "100", "--election-timeout", "1000")
# As docs/cluster.md sets them; all else is as `etcd_servers` starts a member.
TIMERS = {"usual": (*USUAL_TIMERS, "--pre-vote=false"), "short": ("--pre-vote=false",),
          "short, pre-vote": ("--pre-vote",)}
CASES = ("steady", "steady_run", "write", "leader_loss", "elections")
WRITE_EVERY_S, STOOD_S = 0.05, 0.5  # `elections`: how often, and what counts as standing still
RUN_NODES, STEPS, SETTLED_S = 4, 10_000_000, 30.0
KILOBYTES = (1, 40, 400)  # the last: a plan of 16,384 ranks


def opened(folder: Path, cluster: Etcd, node: str) -> EtcdStore:
    (folder / node).mkdir(exist_ok=True)
    return open_etcd(settings.Store(url=cluster.url), node, folder / node, lambda: LEASE_S)


def tcp_bytes(said: str) -> int:
    """Of connections as `ss -tni` tells of them, both ways, headers included."""
    total = 0
    for name, weight in (("bytes_acked", 1), ("bytes_received", 1), ("segs_out", HEADERS_BYTES),
                         ("segs_in", HEADERS_BYTES)):
        total += weight * sum(int(number) for number in re.findall(rf"{name}:(\d+)", said))
    return total


def own_bytes(cluster: Etcd) -> int:
    """Of this process's connections to the members: each member's gateway has others to the member
    itself."""
    ports = " or ".join(f"dport = :{member.client}" for member in cluster.members)
    said = subprocess.run(["ss", "-tnipOH", f"( {ports} )"], check=True, capture_output=True,
                          text=True).stdout
    return tcp_bytes("\n".join(line for line in said.splitlines() if f"pid={os.getpid()}," in line))


async def steady(folder: Path, cluster: Etcd, agents: int, seconds: float) -> list[dict[str, Any]]:
    stores = [opened(folder, cluster, f"n{number}") for number in range(agents)]
    tasks = [asyncio.create_task(store.watch(lambda why: None)) for store in stores]

    async def lead(number: int, store: EtcdStore) -> None:
        while True:
            await store.put(StoreWrite(f"lease/r{number}", 0, store.node.encode()))
            await asyncio.sleep(LEASE_S / 3)

    while not all(store.view().up for store in stores):
        await asyncio.sleep(0.05)
    for number, store in enumerate(stores):
        await store.put(StoreWrite(f"lease/r{number}", 0, store.node.encode()))
        await store.put(StoreWrite(f"run/r{number}", 0, b"x" * 40_000, f"r{number}"))
    tasks += [asyncio.create_task(lead(number, store)) for number, store in enumerate(stores)]
    await asyncio.sleep(3.0)
    before = [(one.gateway.traffic.sent_bytes + one.gateway.traffic.received_bytes,
               sum(one.gateway.traffic.requests.values())) for one in stores]
    tcp, begun_s = own_bytes(cluster), time.monotonic()
    await asyncio.sleep(seconds)
    took_s, tcp = time.monotonic() - begun_s, own_bytes(cluster) - tcp
    rows = []
    for store, (at_first, requests) in zip(stores, before, strict=True):
        traffic = store.gateway.traffic
        rows.append({
            "case": "store_steady", "agents": agents, "seconds": round(took_s, 2),
            "http_bytes_s": (traffic.sent_bytes + traffic.received_bytes - at_first) / took_s,
            "requests_s": (sum(traffic.requests.values()) - requests) / took_s,
            "tcp_bytes_s": tcp / took_s / agents, "goal_bytes_s": GOAL_BYTES_S,
            "was_up": store.view().up})
    await ended(tasks, stores)
    return rows


class Seen(NamedTuple):
    """One agent's connections to the store, as the kernel counts them."""

    connections: frozenset[str]
    sent_and_received: int


def seen(world: World, number: int) -> Seen:
    said = world.nodes[number].run(["ss", "-tnipOH", "dport = :2379"]).stdout
    own = [line for line in said.splitlines() if f"pid={world.agent_pid(number)}," in line]
    return Seen(frozenset(line.split()[3] for line in own), tcp_bytes("\n".join(own)))


def steady_run(seconds: float) -> list[dict[str, Any]]:
    """Four whole agents, three members of etcd, the product's lease, and the trainer on all."""
    with Nodes(RUN_NODES) as nodes:
        world = World(nodes, members=range(3), lease_s=LEASE_S)
        world.heartbeat_ms, world.election_ms = 100, 1000
        world.start_store()
        world.train(range(RUN_NODES), RUN_NODES, STEPS, f"micro_batches={RUN_NODES}")
        world.wait(lambda: all(world.step(number) > 10 for number in range(RUN_NODES)))
        time.sleep(SETTLED_S)  # what is said once, at a run's start, is over
        led_by, steps = world.led_by(), [world.step(number) for number in range(RUN_NODES)]
        before, begun_s = [seen(world, number) for number in range(RUN_NODES)], time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - begun_s
        after = [seen(world, number) for number in range(RUN_NODES)]
        return [{
            "case": "store_steady_run", "agents": RUN_NODES, "seconds": round(took_s, 2),
            "node": number, "leads": number == led_by == world.led_by(),
            "tcp_bytes_s": (new.sent_and_received - old.sent_and_received) / took_s,
            "goal_bytes_s": GOAL_BYTES_S,
            # Of a connection that ended meanwhile the kernel tells no more.
            "same_connections": new.connections == old.connections,
            "steps": world.step(number) - steps[number], "generation": world.generation(number)}
            for number, (old, new) in enumerate(zip(before, after, strict=True))]


async def write(folder: Path, cluster: Etcd, times: int) -> list[dict[str, Any]]:
    store = opened(folder, cluster, "writer")
    await store.refresh()
    await store.put(StoreWrite("lease/w", 0, b"writer"))
    rows = []
    for kilobytes in KILOBYTES:
        took_s, version = [], 0
        for _ in range(times):
            await store.put(StoreWrite("lease/w", 0, b"writer"))
            begun_s = time.monotonic()
            version = await store.put(StoreWrite(
                f"run/w{kilobytes}", version, b"x" * 1000 * kilobytes, "w"))
            took_s.append(time.monotonic() - begun_s)
        rows.append({"case": "store_write", "kilobytes": kilobytes, "times": times,
                     "p50_s": percentile(took_s, 0.5), "p99_s": percentile(took_s, 0.99)})
    await ended([], [store])
    return rows


async def leader_loss(folder: Path, cluster: Etcd, timers: str) -> dict[str, Any]:
    """From the last write before the kill to the first after it, one every 10 ms."""
    store = opened(folder, cluster, "writer")
    tasks = [asyncio.create_task(store.watch(lambda why: None))]
    while not store.view().up:
        await asyncio.sleep(0.05)
    leader = await asyncio.get_running_loop().run_in_executor(None, cluster.leader)
    key, lost = "run/w", 0
    version = await store.put(StoreWrite(key, store.view().docs.get(key).version, b"0"))
    leader.kill()
    killed_s = time.monotonic()
    while True:
        try:
            await store.put(StoreWrite(key, version, b"on"))
            break
        except (StoreError, TimeoutError):
            lost += 1
        except Conflict:
            version = store.view().docs.get(key).version
    row = {"case": "store_leader_loss", "timers": timers,
           "writes_stopped_s": time.monotonic() - killed_s, "unknown_or_refused": lost}
    await ended(tasks, [store])
    cluster.start(leader)
    cluster.wait()
    return row


def leader_changes(cluster: Etcd) -> list[int]:
    """What each member has seen since it began."""
    found = []
    for member in cluster.members:
        with urllib.request.urlopen(f"http://{member.address}/metrics", timeout=10.0) as answer:
            said = answer.read().decode()
        (count,) = re.findall(
            r"^etcd_server_leader_changes_seen_total (\S+)", said, re.MULTILINE)
        found.append(int(float(count)))
    return found


async def elections(
    folder: Path, cluster: Etcd, timers: str, seconds: float, count: int,
    together: asyncio.Barrier,
) -> dict[str, Any]:
    store = opened(folder, cluster, "writer")
    tasks = [asyncio.create_task(store.watch(lambda why: None))]
    while not store.view().up:
        await asyncio.sleep(0.05)
    version, refused, took_s = store.view().docs.get("run/w").version, 0, []
    # All wait for each other: a question to a busy member must cost no other cluster's write time.
    before = await asyncio.to_thread(leader_changes, cluster)
    await together.wait()
    begun_s = time.monotonic()
    while (at_s := time.monotonic()) < begun_s + seconds:
        while True:
            try:
                version = await store.put(StoreWrite("run/w", version, b"x"))
                break
            except (StoreError, TimeoutError):
                refused += 1
            except Conflict:  # the one before it was kept after all
                version = store.view().docs.get("run/w").version
        took_s.append(time.monotonic() - at_s)
        await asyncio.sleep(WRITE_EVERY_S)
    lasted_s = time.monotonic() - begun_s
    await together.wait()
    after = await asyncio.to_thread(leader_changes, cluster)
    row = {"case": "store_elections", "timers": timers, "burners": count,
           "seconds": round(lasted_s, 1), "etcd": etcd_version(),
           "leader_changes": max(new - old for new, old in zip(after, before, strict=True)),
           "writes": len(took_s),
           "refused": refused, "p50_s": percentile(took_s, 0.5), "p99_s": percentile(took_s, 0.99),
           "longest_s": max(took_s), "stood_still": sum(one > STOOD_S for one in took_s)}
    await ended(tasks, [store])
    return row


def etcd_version() -> str:
    said = subprocess.run(["etcd", "--version"], check=True, capture_output=True, text=True)
    return said.stdout.split()[2]


async def side_by_side(folder: Path, seconds: float, count: int) -> list[dict[str, Any]]:
    """All timers in the same minutes, since a machine differs from itself more than they do."""
    with ExitStack() as made:
        clusters = {name: made.enter_context(etcd(folder / f"etcd{number}", 3, timers))
                    for number, (name, timers) in enumerate(TIMERS.items())}
        made.enter_context(burners(count))
        for number in range(len(clusters)):
            (folder / str(number)).mkdir()
        together = asyncio.Barrier(len(clusters))
        return await asyncio.gather(*(
            elections(folder / str(number), cluster, name, seconds, count, together)
            for number, (name, cluster) in enumerate(clusters.items())))


async def ended(tasks: list[asyncio.Task[None]], stores: list[EtcdStore]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for store in stores:
        await store.close()


def measured(options: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if case == "steady_run":
        return steady_run(options.seconds)
    if case == "elections":
        with tempfile.TemporaryDirectory() as made:
            return asyncio.run(side_by_side(Path(made), options.seconds, options.burners))
    for name, timers in (("usual", USUAL_TIMERS), ("short", ())):
        if name == "short" and case != "leader_loss":
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            with etcd(folder / "etcd", 3, timers) as cluster:
                if case == "steady":
                    rows += asyncio.run(steady(folder, cluster, options.agents, options.seconds))
                elif case == "write":
                    rows += asyncio.run(write(folder, cluster, options.runs * 20))
                else:
                    rows += [asyncio.run(leader_loss(folder, cluster, name))
                             for _ in range(options.runs)]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("store", options.out)
    for case in options.cases:
        for row in measured(options, case):
            results.add(row)
            print({key: round(value, 4) if isinstance(value, float) else value
                   for key, value in row.items()}, flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
