"""A store's clients by the thousand on a real etcd: what it carries, and what gives way first.

A few of the agents are the store part of an agent as it ships: the lease on its name, its
document, its watch over the cluster, its look every two seconds.  The others ask the same at the
same times through the same gateway and count what their watch says (store_crowd.py), a process of
them for each member of etcd, for what each decodes on its own node would be thousandfold here.  For
each size: what etcd and the agents cost while nothing changes, from the write of a run's plan
(8 ranks a node, 2,048 nodes at most) until the last agent has it whole, and how long a run's leader
needs for its lease meanwhile.  A size at which an agent cannot join within the limit, or loses its
watch, is the end.  Needs etcd-server.

    python -m bench.store_fleet [--agents 256 2048 16384] [--members 3] [--seconds 20] [--plans 10]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from .store import LEASE_S, USUAL_TIMERS, ended, opened
from .store_crowd import AT_ONCE, Beside, Said, together

WHOLE, READ_MOST = 16, 65_536  # of them, as they ship: all are one process, and each reads all
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
                       for number in range(min(agents, WHOLE, max(4, READ_MOST // agents)))]
        self.heard_s = [0.0] * len(self.stores)
        each = range(len(cluster.members))
        self.shares = [range(len(self.stores) + at, agents, len(each)) for at in each]
        self.crowds = [Beside(member.address, self.stores[0].prefix, share, agents)
                       for member, share in zip(cluster.members, self.shares, strict=True)]
        self.plan = plan_scale.Fleet(min(agents, RUN_NODES)).docs.get("run/m5").body
        self.tasks: list[asyncio.Task[None]] = []
        self.lost: list[str] = []
        self.late = 0  # writes of the leader's that were not answered in time
        self.renewal_s = 0.0  # the longest that a renewal of the run's lease took

    def _heard(self, at: int) -> None:
        self.heard_s[at] = time.monotonic()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.lost.append(repr(task.exception()))

    async def ask(self, name: str, *arguments: Any) -> list[Any]:
        """What each crowd answers; they are asked at once."""
        return list(await asyncio.gather(*(
            asyncio.to_thread(crowd.ask, name, *arguments) for crowd in self.crowds)))

    async def said(self, wanted: int = 0) -> Said:
        said: Said = together(await self.ask("said", wanted))
        if said.lost:
            raise StoreError(f"etcd ended {said.lost} connections")
        return said

    async def join(self) -> None:
        """Documents first, then watches: of agents that come one by one each hears of all behind
        it, which is the square of their number."""
        await self.stores[0].refresh()
        await self.ask("join", DOCUMENT)
        for at, store in enumerate(self.stores):  # one by one: each reads what all have said
            self._begin(store.watch(lambda why, at=at: self._heard(at)))
            while not store.view().up:
                await asyncio.sleep(0.05)
        for at in range(0, max(map(len, self.shares)), AT_ONCE):
            await self.ask("watch", at, AT_ONCE)
            begun = sum(min(at + AT_ONCE, len(share)) for share in self.shares)
            while (await self.said()).up < begun:
                await asyncio.sleep(0.01)
        for store in self.stores:
            with contextlib.suppress(TimeoutError):  # it is there, and its answer was late
                await store.put(StoreWrite(f"node/{store.node}", 0, DOCUMENT))
        while time.monotonic() - max(*self.heard_s, (await self.said()).heard_s) < QUIET_S:
            await asyncio.sleep(0.1)  # until everybody has heard of them

    async def requests(self) -> int:
        return (await self.said()).asked + sum(
            sum(store.gateway.traffic.requests.values()) for store in self.stores)

    async def slowest_s(self) -> float:
        return max((await self.said()).slowest_s,
                   *(store.gateway.traffic.slowest_s() for store in self.stores))

    async def lead(self) -> None:
        """Takes the run's lease, and keeps it as its leader's agent does."""
        store = self.stores[0]
        await self.ask("mark")
        await self._put(StoreWrite(LEASE, 0, store.node.encode()))
        end_s = time.monotonic() + SPREAD_LIMIT_S
        while (await self.said(1)).missing and time.monotonic() < end_s:
            await asyncio.sleep(0.02)  # the lease's own news are read by then; later ones renew it
        self._begin(self._renew())

    async def _put(self, write: StoreWrite) -> int:
        """As an agent, which tries again what was not answered in time, and finds it written."""
        end_s, was_late = time.monotonic() + SPREAD_LIMIT_S, False
        while True:
            try:
                return await self.stores[0].put(write)
            except (StoreError, TimeoutError):
                self.late, was_late = self.late + 1, True
                if time.monotonic() > end_s:
                    raise
            except Conflict:
                if not was_late:
                    raise
                return write.expect_version + 1

    async def _renew(self) -> None:
        while True:
            begun_s = time.monotonic()
            await self._put(StoreWrite(LEASE, 0, self.stores[0].node.encode()))
            self.renewal_s = max(self.renewal_s, time.monotonic() - begun_s)
            await asyncio.sleep(LEASE_S / 3)

    async def spread(self, version: int) -> tuple[float, float, int]:
        """Of one plan: seconds of the write, seconds until the last has it, who has it not."""
        body = self.plan + b" " * version
        await self.ask("mark")
        begun_s = time.monotonic()
        written = await self._put(StoreWrite(f"run/{RUN}", version, body, RUN))
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
        for crowd in self.crowds:
            crowd.end()
        await ended(self.tasks, self.stores)


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def own_s(many: Fleet) -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(processor_s(crowd.pid) for crowd in many.crowds)


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def fleet(folder: Path, cluster: Etcd, agents: int, seconds: float,
                plans: int) -> dict[str, Any]:
    servers = [member.process.pid for member in cluster.members if member.process]
    row: dict[str, Any] = {"case": "store_fleet", "agents": agents, "members": len(servers),
                           "ok": False, "why": ""}
    many = Fleet(folder, cluster, agents)

    def etcd_s() -> float:
        return sum(map(processor_s, servers))

    try:
        begun_s, before_s = time.monotonic(), etcd_s()
        async with asyncio.timeout(JOIN_LIMIT_S):
            await many.join()
        row["join_s"] = time.monotonic() - begun_s - QUIET_S
        row["join_etcd_s"] = etcd_s() - before_s  # of the processor
        before_s, self_s, asked = etcd_s(), own_s(many), await many.requests()
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun_s
        row |= {"seconds": took_s,
                "etcd_cores": (etcd_s() - before_s) / took_s,
                "agents_cores": (own_s(many) - self_s) / took_s,
                "requests_s": (await many.requests() - asked) / took_s / agents,
                "slowest_s": await many.slowest_s()}
        await many.lead()
        before_s = etcd_s()
        found = [await many.spread(version) for version in range(plans)]
        row |= {"plans": plans, "spread_etcd_s": (etcd_s() - before_s) / plans,
                "plan_kb": len(many.plan) / 1000,
                "packed_kb": len(packed(many.plan)) / 1000,
                "write_p50_s": percentile([one[0] for one in found], 0.5),
                "spread_p50_s": percentile([one[1] for one in found], 0.5),
                "spread_most_s": max(one[1] for one in found),
                "not_reached": max(one[2] for one in found), "renewal_most_s": many.renewal_s,
                "late": many.late,
                "etcd_mb": sum(map(resident_mb, servers)),
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
    parser.add_argument("--members", type=int, default=3, help="of etcd")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    wanted = CONNECTIONS * max(options.agents) // options.members + OTHERS
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
            with etcd(folder / "etcd", options.members, USUAL_TIMERS) as cluster:
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
