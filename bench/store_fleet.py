"""A store's clients by the thousand on one real etcd: what it carries, and what gives way first.

Sixteen of the agents are the store part of an agent as it ships: the lease on its name, its
document, its watch over the cluster, its look every two seconds.  The others ask the same at the
same times through the same gateway and read past what their watch says, for all of them are one
process beside etcd: what each decodes for itself on its own node would be thousandfold here.  For
each size: what etcd and this process cost while nothing changes, and from the write of a run's plan
(8 ranks a node) until the last agent has bytes of it.  A size at which an agent
cannot join within the limit, or loses its watch, is the end.  Needs etcd-server.

    python -m bench.store_fleet [--agents 64 256 1024 4096] [--seconds 20] [--plans 10]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from . import plan_scale
from .common import BENCH, ROOT, Results, percentile

sys.path.insert(0, str(ROOT / "tests"))

from etcd_servers import Etcd, etcd

from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store.base import Conflict, StoreError
from holdfast.agent.store.etcd import CALL_S, LOOK_S
from holdfast.agent.store.etcd_answers import after, b64, packed
from holdfast.agent.store.etcd_gateway import Gateway
from holdfast.agent.store.etcd_leases import NAME, NAME_S
from holdfast.agent.store.identity import CLUSTER

from .store import USUAL_TIMERS, ended, opened

WHOLE = 16  # of them, as they ship
AT_ONCE = 64  # join together
JOIN_LIMIT_S, QUIET_S, SPREAD_LIMIT_S = 300.0, 3.0, 30.0
DOCUMENT = b"x" * 300  # an agent's address, its labels and devices
RUN, LEASE = "fleet", "lease/fleet"
TICKS = os.sysconf("SC_CLK_TCK")


class Light:
    """What a store's client asks of etcd, and when a watch last said something."""

    def __init__(self, gateway: Gateway, prefix: str, name: str) -> None:
        self.gateway, self.prefix, self.name = gateway, prefix, name
        self.heard_s, self.up, self.unanswered = 0.0, False, 0
        self._lease = ""

    def _key(self, key: str) -> str:
        return b64((self.prefix + key).encode())

    async def join(self) -> None:
        lease = str(secrets.randbits(62) + 1)
        granted = {"TTL": str(int(NAME_S)), "ID": lease}
        await self.gateway.write("/v3/lease/grant", granted, CALL_S)
        for put in ({"key": self._key(f"lease/{NAME}{self.name}"), "value": b64(b"x" * 150),
                     "lease": lease},
                    {"key": self._key(f"node/{self.name}"), "value": b64(DOCUMENT)}):
            await self.gateway.write(
                "/v3/kv/txn", {"success": [{"request_put": put}]}, CALL_S)
        self._lease = lease

    async def watch(self) -> None:
        """Reads past what comes."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            begin, end = self.prefix.encode(), after(self.prefix.encode())
            create = {"create_request": {"key": b64(begin), "range_end": b64(end),
                                         "fragment": True}}
            url = f"{self.gateway.endpoints[0]}/v3/watch"
            async with session.post(url, json=create) as answer:
                async for _ in answer.content.iter_any():
                    self.heard_s, self.up = time.monotonic(), True
        self.up = False

    async def look(self) -> None:
        """As EtcdStore does it: the revision every two seconds, the name's lease in its time."""
        renewed_s = time.monotonic() - random.uniform(0.0, NAME_S / 3)
        while True:
            await asyncio.sleep(LOOK_S * random.uniform(0.9, 1.1))
            try:
                await self.gateway.ask("/v3/kv/range", {"key": self._key(CLUSTER)}, CALL_S)
                if time.monotonic() - renewed_s > NAME_S / 3:
                    await self.gateway.ask("/v3/lease/keepalive", {"ID": self._lease}, CALL_S)
                    renewed_s = time.monotonic()
            except StoreError:
                self.unanswered += 1


class Fleet:
    """The virtual agents."""

    def __init__(self, folder: Path, cluster: Etcd, agents: int) -> None:
        self.stores = [opened(folder, cluster, f"n{number}")
                       for number in range(min(agents, WHOLE))]
        self.heard_s = [0.0] * len(self.stores)
        self.rest = [Light(self.stores[0].gateway.only(self.stores[0].gateway.endpoints[0]),
                           self.stores[0].prefix, f"n{number}")
                     for number in range(len(self.stores), agents)]
        self.plan = plan_scale.Fleet(agents).docs.get("run/m5").body
        self.tasks: list[asyncio.Task[None]] = []
        self.lost: list[str] = []

    def _heard(self, at: int) -> None:
        self.heard_s[at] = time.monotonic()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.lost.append(repr(task.exception()))

    async def join(self) -> None:
        """Documents first, then watches: of agents that come one by one each hears of all behind
        it, which is the square of their number."""
        await self.stores[0].refresh()
        for at in range(0, len(self.rest), AT_ONCE):
            await asyncio.gather(*(one.join() for one in self.rest[at:at + AT_ONCE]))
        for at, store in enumerate(self.stores):
            self._begin(store.watch(lambda why, at=at: self._heard(at)))
        while not all(store.view().up for store in self.stores):
            await asyncio.sleep(0.05)
        for at in range(0, len(self.rest), AT_ONCE):
            some = self.rest[at:at + AT_ONCE]
            for one in some:
                self._begin(one.watch())
                self._begin(one.look())
            while not all(one.up for one in some):
                await asyncio.sleep(0.05)
        for store in self.stores:
            await store.put(StoreWrite(f"node/{store.node}", 0, DOCUMENT))
        while time.monotonic() - max([*self.heard_s, *self.times()]) < QUIET_S:
            await asyncio.sleep(0.1)  # until everybody has heard of them

    def times(self) -> list[float]:
        return [one.heard_s for one in self.rest]

    def gateways(self) -> list[Gateway]:
        return [one.gateway for one in (*self.stores, *self.rest)]

    def requests(self) -> int:
        return sum(sum(one.traffic.requests.values()) for one in self.gateways())

    def slowest_s(self) -> float:
        return max(one.traffic.slowest_s() for one in self.gateways())

    async def spread(self, version: int) -> tuple[float, float, int]:
        """Of one plan: seconds of the write, seconds until the last has it, who has it not."""
        store = self.stores[0]
        await store.put(StoreWrite(LEASE, 0, store.node.encode()))
        await asyncio.sleep(1.0)  # the lease's own news are read by then
        agents, body = len(self.stores) + len(self.rest), self.plan + b" " * version
        begun_s = time.monotonic()
        written = await store.put(StoreWrite(f"run/{RUN}", version, body, RUN))
        wrote_s = time.monotonic() - begun_s
        missing = agents
        while missing and time.monotonic() < begun_s + SPREAD_LIMIT_S:
            await asyncio.sleep(0.005)
            missing = sum(one._doc(f"run/{RUN}").version < written for one in self.stores)
            missing += sum(at_s < begun_s for at_s in self.times())
        return wrote_s, time.monotonic() - begun_s, missing

    async def end(self) -> None:
        for task in self.tasks:
            task.remove_done_callback(self._ended)
        await ended(self.tasks, self.stores)
        for one in self.rest:
            await one.gateway.close()


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def fleet(folder: Path, cluster: Etcd, agents: int, seconds: float,
                plans: int) -> dict[str, Any]:
    server = cluster.members[0].process
    assert server is not None
    row: dict[str, Any] = {"case": "store_fleet", "agents": agents, "ok": False, "why": ""}
    many = Fleet(folder, cluster, agents)
    try:
        begun_s = time.monotonic()
        async with asyncio.timeout(JOIN_LIMIT_S):
            await many.join()
        row["join_s"] = time.monotonic() - begun_s - QUIET_S
        etcd_s, self_s, asked = processor_s(server.pid), own_s(), many.requests()
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun_s
        row |= {"seconds": took_s,
                "etcd_cores": (processor_s(server.pid) - etcd_s) / took_s,
                "agents_cores": (own_s() - self_s) / took_s,
                "requests_s": (many.requests() - asked) / took_s / agents,
                "slowest_s": many.slowest_s()}
        found = [await many.spread(version) for version in range(plans)]
        row |= {"plans": plans, "plan_kb": len(many.plan) / 1000,
                "packed_kb": len(packed(many.plan)) / 1000,
                "write_p50_s": percentile([one[0] for one in found], 0.5),
                "spread_p50_s": percentile([one[1] for one in found], 0.5),
                "spread_most_s": max(one[1] for one in found),
                "not_reached": max(one[2] for one in found)}
        status = Path(f"/proc/{server.pid}/status").read_text()
        row |= {"unanswered": sum(one.unanswered for one in many.rest),
                "etcd_mb": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
                "lost": many.lost[:3], "up": sum(one.view().up for one in many.stores)}
        row["ok"] = not many.lost and not row["not_reached"] and row["up"] == len(many.stores)
    except (StoreError, TimeoutError, Conflict) as error:
        row |= {"why": f"{type(error).__name__}: {error}", "lost": many.lost[:3]}
    finally:
        await many.end()
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.store_fleet", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    results = Results("store", options.out)
    for agents in options.agents:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            with etcd(folder / "etcd", 1, USUAL_TIMERS) as cluster:
                row = asyncio.run(fleet(folder, cluster, agents, options.seconds, options.plans))
        results.add(row)
        print({key: round(value, 4) if isinstance(value, float) else value
               for key, value in row.items()}, flush=True)
        if not row["ok"]:
            break
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
