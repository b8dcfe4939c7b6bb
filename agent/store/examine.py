"""Looks at a store from outside: each member, its space and alarms, and whose cluster it holds.

Owns what `holdfast store` and `holdfast doctor` say, and the two changes that a person may make: to
seed an empty store, and to have this node forget which cluster it knew.  No agent need run.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

from ..config import settings
from .base import Conflict, StoreError
from .etcd import EtcdStore, open_etcd
from .etcd_gateway import Gateway, NoAnswer
from .identity import FILE, Known, read_known, write_known

LIMIT_S = 3.0  # of each member
SLOW_S = 0.1  # a lease of 10 s stands a hundred of it; etcd itself warns at 100 ms
FULL = 0.9  # of the space that etcd allows itself
QUOTA_BYTES = 2 << 30  # etcd's own default; it tells nobody what was set


class Member(NamedTuple):
    address: str
    version: str = ""
    is_leader: bool = False
    db_bytes: int = 0
    answer_s: float = 0.0
    error: str = ""


class Report(NamedTuple):
    """`problem` is what stands in the way of an agent here, "" for nothing."""

    url: str
    cluster: str
    members: tuple[Member, ...] = ()
    alarms: tuple[str, ...] = ()
    known_id: str = ""  # of the cluster that this node belongs to
    documents: int = 0
    document_bytes: int = 0
    leases: int = 0
    problem: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What works, and not well."""
        found = [f"{one.address} takes {one.answer_s:.2f} s to answer: give etcd a disk of its own"
                  for one in self.members if one.answer_s > SLOW_S]
        found += [f"{one.address} holds {one.db_bytes >> 20} MB, and etcd stops at 2048 unless "
                  "--quota-backend-bytes says more: compact and defrag it"
                  for one in self.members if one.db_bytes > FULL * QUOTA_BYTES]
        found += [f"alarm {alarm}: docs/cluster.md says what to do" for alarm in self.alarms]
        if len(self.members) in (1, 2) and not self.problem:
            found.append(f"{'one member' if len(self.members) == 1 else 'two members'}: the first "
                         "that dies stops every plan; three outlive one")
        return tuple(found)


def look(store: settings.Store, node: str, directory: Path) -> Report:
    """Everything at once; bounded by LIMIT_S for each member and the store's own limits."""
    return asyncio.run(_look(store, node, directory))


async def _look(store: settings.Store, node: str, directory: Path) -> Report:
    report = Report(store.url, store.cluster)
    try:
        opened = open_etcd(store, node, directory, lambda: 10.0, writes=False)
    except StoreError as error:
        return report._replace(problem=str(error))
    try:
        members = await asyncio.gather(*(
            _member(opened.gateway, endpoint) for endpoint in sorted(opened.gateway.endpoints)))
        await opened.refresh()
        view = opened.view()
        return report._replace(
            members=tuple(members), alarms=await _alarms(opened.gateway),
            known_id=opened.known.cluster_id if opened.known.cluster == store.cluster else "",
            documents=len(view.docs), leases=len(view.leases),
            document_bytes=sum(len(doc.body) for doc in view.docs), problem=view.problem)
    finally:
        await opened.close()


async def _member(gateway: Gateway, endpoint: str) -> Member:
    address = endpoint.partition("://")[2]
    alone = gateway.only(endpoint)
    try:
        _, version = await alone.version(LIMIT_S)
        begun_s = time.monotonic()
        said = await alone.ask("/v3/maintenance/status", {}, LIMIT_S)
        answer_s = time.monotonic() - begun_s
    except NoAnswer as error:
        return Member(address, error="; ".join(error.why.values()))
    except (StoreError, TimeoutError, aiohttp.ClientError) as error:
        return Member(address, error=str(error).removeprefix("store: "))
    finally:
        await alone.close()
    leads = 0 < said.leader == said.header.member_id
    why = "" if said.leader else "it has no leader: a majority of the members must run"
    return Member(address, version, leads, said.dbSize, answer_s, why)


async def _alarms(gateway: Gateway) -> tuple[str, ...]:
    """None where the user may not ask: root alone may, on some versions."""
    try:
        answer = await gateway.ask("/v3/maintenance/alarm", {"action": "GET"}, LIMIT_S)
    except (StoreError, TimeoutError):
        return ()
    return tuple(sorted({one.alarm for one in answer.alarms}))


def seed(store: settings.Store, node: str, directory: Path) -> str:
    """Makes an empty store this node's cluster again, with the id that every node knows.  Returns
    the id.  StoreError where the store is not empty, or does not answer."""
    return asyncio.run(_seed(store, node, directory))


async def _seed(store: settings.Store, node: str, directory: Path) -> str:
    opened: EtcdStore = open_etcd(store, node, directory, lambda: 10.0)
    try:
        return await opened.seed()
    except (Conflict, TimeoutError) as error:
        raise StoreError(f"store: not known whether it was seeded ({error}): ask again") from error
    finally:
        await opened.close()


def forget(directory: Path) -> str:
    """This node joins whatever cluster store.url leads to next.  Returns the id that it knew."""
    path = directory / FILE
    known = read_known(path)
    if known.cluster_id:
        write_known(path, Known(known.node_id))
    return known.cluster_id
