"""A store's clients by the thousand on one real etcd: what it carries, and what gives way first.

Sixteen of the agents are the store part of an agent as it ships: the lease on its name, its
document, its watch over the cluster, its look every two seconds.  The others ask the same at the
same times through the same gateway and count what their watch says (store_crowd.py), for all of
them are one process beside etcd: what each decodes on its own node would be thousandfold here.  For
each size: what etcd and this process cost while nothing changes, and from the write of a run's plan
(8 ranks a node, 2,048 nodes at most) until the last agent has it whole.  A size at which an agent
cannot join within the limit, or loses its watch, is the end.  Needs etcd-server.

    python -m bench.store_fleet [--agents 256 2048 16384] [--seconds 20] [--plans 10]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from . import plan_scale
from .common import BENCH, ROOT, Results, percentile

sys.path.insert(0, str(ROOT / "tests"))

from etcd_servers import Etcd, etcd

from holdfast.agent.core.model import StoreWrite
from holdfast.agent.launchers.protocol import NNODES_MAX
from holdfast.agent.store.base import Conflict, StoreError
from holdfast.agent.store.etcd_answers import b64, packed

from .store import USUAL_TIMERS, ended, opened
from .store_crowd import AT_ONCE, Beside, Said

WHOLE = 16  # of them, as they ship
RUN_NODES = NNODES_MAX
JOIN_LIMIT_S, QUIET_S, SPREAD_LIMIT_S = 900.0, 3.0, 120.0
CONNECTIONS, OTHERS = 2, 1000  # descriptors of an agent, in the crowd's process and in etcd's
DOCUMENT = b"x" * 300  # an agent's address, its labels and devices
RUN, LEASE = "fleet", "lease/fleet"
TICKS = os.sysconf("SC_CLK_TCK")


class Fleet:
    """The virtual agents."""

    def __init__(self, folder: Path, cluster: Etcd, agents: int) -> None:
        self.stores = [opened(folder, cluster, f"n{number}")
                       for number in range(min(agents, WHOLE))]
        self.heard_s = [0.0] * len(self.stores)
        host, _, port = cluster.members[0].address.rpartition(":")
        self.numbers = range(len(self.stores), agents)
        self.rest = Beside(host, int(port), self.stores[0].prefix, self.numbers)
        self.plan = plan_scale.Fleet(min(agents, RUN_NODES)).docs.get("run/m5").body
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

    async def ask(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.rest.ask, name, *arguments)

    async def said(self, wanted: int = 0) -> Said:
        said: Said = await self.ask("said", wanted)
        if said.lost:
            raise StoreError(f"etcd ended {said.lost} connections")
        return said

    async def join(self) -> None:
        """Documents first, then watches: of agents that come one by one each hears of all behind
        it, which is the square of their number."""
        await self.stores[0].refresh()
        await self.ask("join", DOCUMENT)
        for at, store in enumerate(self.stores):
            self._begin(store.watch(lambda why, at=at: self._heard(at)))
        while not all(store.view().up for store in self.stores):
            await asyncio.sleep(0.05)
        for at in range(0, len(self.numbers), AT_ONCE):
            await self.ask("watch", at, AT_ONCE)
            while (await self.said()).up < min(at + AT_ONCE, len(self.numbers)):
                await asyncio.sleep(0.01)
        for store in self.stores:
            await store.put(StoreWrite(f"node/{store.node}", 0, DOCUMENT))
        while time.monotonic() - max(*self.heard_s, (await self.said()).heard_s) < QUIET_S:
            await asyncio.sleep(0.1)  # until everybody has heard of them

    async def requests(self) -> int:
        return (await self.said()).asked + sum(
            sum(store.gateway.traffic.requests.values()) for store in self.stores)

    async def slowest_s(self) -> float:
        return max((await self.said()).slowest_s,
                   *(store.gateway.traffic.slowest_s() for store in self.stores))

    async def spread(self, version: int) -> tuple[float, float, int]:
        """Of one plan: seconds of the write, seconds until the last has it, who has it not."""
        store = self.stores[0]
        await self.ask("mark")
        await store.put(StoreWrite(LEASE, 0, store.node.encode()))
        end_s = time.monotonic() + SPREAD_LIMIT_S
        while not version and (await self.said(1)).missing and time.monotonic() < end_s:
            await asyncio.sleep(0.02)  # the lease's own news are read by then; later ones renew it
        await asyncio.sleep(1.0)
        await store.put(StoreWrite(LEASE, 0, store.node.encode()))
        body = self.plan + b" " * version
        await self.ask("mark")
        begun_s = time.monotonic()
        written = await store.put(StoreWrite(f"run/{RUN}", version, body, RUN))
        wrote_s = had_s = time.monotonic()
        wanted, missing = len(b64(packed(body))), len(self.stores)
        while missing and time.monotonic() < begun_s + SPREAD_LIMIT_S:
            await asyncio.sleep(0.05)  # the crowd tells when its last byte came
            said = await self.said(wanted)
            whole = sum(one._doc(f"run/{RUN}").version < written for one in self.stores)
            missing, had_s = whole + said.missing, said.heard_s if not whole else time.monotonic()
        return wrote_s - begun_s, had_s - begun_s, missing

    async def end(self) -> None:
        for task in self.tasks:
            task.remove_done_callback(self._ended)
        self.rest.end()
        await ended(self.tasks, self.stores)


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_s(many: Fleet) -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert many.rest.pid is not None
    return used.ru_utime + used.ru_stime + processor_s(many.rest.pid)


async def fleet(folder: Path, cluster: Etcd, agents: int, seconds: float,
                plans: int) -> dict[str, Any]:
    server = cluster.members[0].process
    assert server is not None
    row: dict[str, Any] = {"case": "store_fleet", "agents": agents, "ok": False, "why": ""}
    many = Fleet(folder, cluster, agents)
    try:
        begun_s, before_s = time.monotonic(), processor_s(server.pid)
        async with asyncio.timeout(JOIN_LIMIT_S):
            await many.join()
        row["join_s"] = time.monotonic() - begun_s - QUIET_S
        row["join_etcd_s"] = processor_s(server.pid) - before_s  # of the processor
        etcd_s, self_s, asked = processor_s(server.pid), own_s(many), await many.requests()
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun_s
        row |= {"seconds": took_s,
                "etcd_cores": (processor_s(server.pid) - etcd_s) / took_s,
                "agents_cores": (own_s(many) - self_s) / took_s,
                "requests_s": (await many.requests() - asked) / took_s / agents,
                "slowest_s": await many.slowest_s()}
        etcd_s = processor_s(server.pid)
        found = [await many.spread(version) for version in range(plans)]
        row |= {"plans": plans, "spread_etcd_s": (processor_s(server.pid) - etcd_s) / plans,
                "plan_kb": len(many.plan) / 1000,
                "packed_kb": len(packed(many.plan)) / 1000,
                "write_p50_s": percentile([one[0] for one in found], 0.5),
                "spread_p50_s": percentile([one[1] for one in found], 0.5),
                "spread_most_s": max(one[1] for one in found),
                "not_reached": max(one[2] for one in found)}
        status = Path(f"/proc/{server.pid}/status").read_text()
        row |= {"etcd_mb": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
                "lost": many.lost[:3], "up": sum(one.view().up for one in many.stores)}
        row["ok"] = not many.lost and not row["not_reached"] and row["up"] == len(many.stores)
    except (StoreError, TimeoutError, Conflict, EOFError) as error:
        row |= {"why": f"{type(error).__name__}: {error}", "lost": many.lost[:3]}
    finally:
        await many.end()
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.store_fleet", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[256, 2048, 16384])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    wanted = CONNECTIONS * max(options.agents) + OTHERS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, wanted), max(most, wanted)))
    except ValueError:
        parser.error(f"{max(options.agents)} agents need {wanted} open files of one process, and "
                     f"this machine lets it have {most}: ulimit -Hn")
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
