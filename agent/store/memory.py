"""A store in memory that fails as an etcd does, by a seed: for tests and virtual clusters.

Owns the server's side (versions, the lease clock, being away) and a client for each node, whose
network loses requests, loses answers and is slow.  Knows no real clock: whoever makes it gives one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from ..core.model import Doc, Documents, Lease, StoreView, StoreWrite, subject_of
from ..core.model.subject import LEASE
from .base import Conflict, StoreError

ANSWER_S = 2.0  # a client waits so long for an answer
Answer = TypeVar("Answer")
AWAY = "store: no member answers: start it again"


class MemoryServer:
    """One linearizable store.  `clock_s` is its own: nobody else's, and not exactly true."""

    def __init__(self, clock_s: Callable[[], float], lease_s: float) -> None:
        self.clock_s, self.lease_s = clock_s, lease_s
        self.available = True
        self.docs: dict[str, Doc] = {}
        self.leases: dict[str, tuple[str, float]] = {}  # run -> (holder, end on the store's clock)
        self.watchers: list[Callable[[], None]] = []
        # Sees each write that is about to take effect (of leases those that change the holder), and
        # the document before.
        self.on_accept: Callable[[str, StoreWrite, Doc | None], None] = lambda *_: None

    def holder(self, run: str) -> str:
        """Who holds the run's lease now, "" for nobody."""
        held = self.leases.get(run)
        return held[0] if held is not None and held[1] > self.clock_s() else ""

    def holders(self) -> dict[str, str]:
        return {run: who for run in sorted(self.leases) if (who := self.holder(run))}

    def put(self, node: str, write: StoreWrite) -> int:
        """One transaction, all or nothing.  Conflict, or StoreError while it is away."""
        if not self.available:
            raise StoreError(AWAY)
        kind, run, _ = subject_of(write.key)
        if kind == LEASE:
            return self._grant(node, run, write)
        self._compare(write.key, write.expect_version)
        self._check_lease(node, write.lease)
        old = self.docs.get(write.key)
        self.on_accept(node, write, old)
        version = (old.version if old is not None else 0) + 1
        self.docs[write.key] = Doc(write.key, version, write.body)
        self._changed()
        return version

    def delete(self, key: str, expect_version: int) -> None:
        if not self.available:
            raise StoreError(AWAY)
        if not expect_version or key not in self.docs:
            raise Conflict(f"{key} is absent")
        self._compare(key, expect_version)
        del self.docs[key]
        self._changed()

    def _compare(self, key: str, expect_version: int) -> None:
        old = self.docs.get(key)
        version = old.version if old is not None else 0
        if version != expect_version:
            raise Conflict(f"conflict: version {version}, expected {expect_version}")

    def _check_lease(self, node: str, run: str) -> None:
        if run and self.holder(run) != node:
            raise Conflict(f"lease: {self.holder(run) or 'nobody'} holds that of {run}")

    def _grant(self, node: str, run: str, write: StoreWrite) -> int:
        holder = self.holder(run)
        wanted = write.body.decode("utf-8", "replace")
        if wanted != node or holder not in ("", node, write.over):
            raise Conflict(f"lease: {holder or 'nobody'} holds that of {run}")
        if holder != node:
            self.on_accept(node, write, None)
        self.leases[run] = node, self.clock_s() + self.lease_s
        if holder != node:
            self._changed()
        return 0

    def _changed(self) -> None:
        for watcher in list(self.watchers):
            watcher()


@dataclass
class Network:
    """Between one node and the store.  Chances are of each call."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    slow_s: float = 0.0  # each way takes up to this
    cut: bool = False


class MemoryStore:
    """One node's client, see base.Store.  `boot_s` is the node's CLOCK_BOOTTIME."""

    def __init__(
        self, server: MemoryServer, node: str, boot_s: Callable[[], float],
        network: Network | None = None, seed: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.server, self.node, self.network = server, node, network or Network()
        self.problem, self.traffic = "", None
        self.living: Callable[[], Collection[str]] = tuple
        self._boot_s, self._sleep, self._random = boot_s, sleep, random.Random(seed)
        self._until_boot_s: dict[str, float] = {}
        self._view = StoreView(up=False, problem=AWAY)

    def view(self) -> StoreView:
        return self._view

    def present(self) -> frozenset[str]:
        return frozenset()

    async def put(self, write: StoreWrite) -> int:
        sent_boot_s = self._boot_s()
        try:
            version = await self._call(lambda: self.server.put(self.node, write))
        except Conflict:
            self._look()
            raise
        kind, run, _ = subject_of(write.key)
        if kind == LEASE:
            self._until_boot_s[run] = sent_boot_s + self.server.lease_s
        self._look()
        return version

    async def delete(self, key: str, expect_version: int) -> None:
        await self._call(lambda: self.server.delete(key, expect_version))
        self._look()

    async def read(self, key: str) -> Doc:
        def look() -> Doc:
            if not self.server.available:
                raise StoreError(AWAY)
            return self.server.docs.get(key, Doc(key, 0))

        return await self._call(look)

    async def refresh(self) -> None:
        try:
            await self._call(self._look)
        except (StoreError, TimeoutError) as error:
            self._view = StoreView(False, self._view.docs, self._view.leases, str(error))

    async def watch(self, changed: Callable[[str], None]) -> None:
        news = asyncio.Event()
        news.set()
        self.server.watchers.append(news.set)
        try:
            while True:
                await news.wait()
                news.clear()
                await self.refresh()
                changed("the store changed")
                if not self._view.up:
                    await self._sleep(ANSWER_S)
                    news.set()
        finally:
            self.server.watchers.remove(news.set)

    def avoid(self, hosts: frozenset[str]) -> None:
        """It has one server."""

    def close(self) -> None:
        pass

    async def _call(self, what: Callable[[], Answer]) -> Answer:
        """There and back over the network."""
        await self._sleep(self._random.random() * self.network.slow_s)
        if self.network.cut or self._random.random() < self.network.lost_request:
            await self._sleep(ANSWER_S)
            raise TimeoutError("no answer in time")
        answer = what()
        await self._sleep(self._random.random() * self.network.slow_s)
        if self.network.cut or self._random.random() < self.network.lost_answer:
            await self._sleep(ANSWER_S)
            raise TimeoutError("no answer in time")
        return answer

    def _look(self) -> None:
        """At the whole of one moment; an agent that starts anew does not know its lease's end."""
        if not self.server.available:
            raise StoreError(AWAY)
        docs = sorted(self.server.docs.values(), key=lambda doc: doc.key)
        leases = tuple(
            Lease(run, who, self._until_boot_s.get(run, 0.0) if who == self.node else 0.0)
            for run, who in self.server.holders().items())
        self._view = StoreView(True, Documents(docs), leases)
