"""Renews the permits of a script's ranks, from the store or from all other nodes of the run.

Owns how long a script may compute here without a word from elsewhere.  Its checkpoint is not ours
to void, so a generation elsewhere starts when the permits of the old one have run out: each is
counted from before the question that renewed it was sent.  One node's have no end.

With the store away, or slow, as in an election of its own (failsafe), a permit is renewed while
every member and spare of the plan answers and knows no higher generation: who answers has heard of
this node, and so does not hold it lost before the permit ends.  Its clock is handed in: the
simulator runs this file too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from ...core.model import Doc, Plan, run_subject
from ...core.run import fences
from ...core.run.members import read_plan
from ...store.base import StoreError
from ...system import clocks

RENEW_LEASES = 0.2  # of a lease between two renewals
STORE_LEASES = 0.3  # of a lease that its answer is waited for: in time for the others' word


class Launchers(Protocol):
    """What is needed of agent/launchers/server.py."""

    def scripts(self) -> Iterable[tuple[str, int]]:
        """(run, generation that runs) of each script here."""

    def order(self, run: str, fields: dict[str, object]) -> str: ...


class Reads(Protocol):
    """What is needed of a store."""

    async def read(self, key: str) -> Doc: ...


class Answers(Protocol):
    """What is needed of the others."""

    def answered_s(self, name: str, run: str, generation: int) -> float: ...


class Permits:
    """The part that asks and tells."""

    name = "permits"

    def __init__(
        self, node: str, lease_s: Callable[[], float], plans: Callable[[], Iterable[Plan]],
        store: Reads, launchers: Launchers, peers: Answers,
        boot_s: Callable[[], float] = clocks.boot_s,
    ) -> None:
        """`plans`: as this node read them last."""
        self._node, self._lease_s, self._plans = node, lease_s, plans
        self._store, self._launchers, self._peers = store, launchers, peers
        self._boot_s = boot_s

    async def run(self) -> None:
        while True:
            lease_s = self._lease_s()
            # At once: each question to a store that is away takes seconds, and a few in a row would
            # outlast the permits of the last runs.
            await asyncio.gather(*(
                self.renew(run, generation, lease_s)
                for run, generation in self._launchers.scripts()))
            await asyncio.sleep(RENEW_LEASES * lease_s)

    async def renew(self, run: str, generation: int, lease_s: float) -> None:
        """By the store's word where it answers, else by all others' together."""
        sent_s = self._boot_s()
        try:
            async with asyncio.timeout(STORE_LEASES * lease_s):
                doc: Doc | None = await self._store.read(run_subject(run))
        except (StoreError, TimeoutError):
            doc = None
        # Of an older generation that still runs here the launcher hears nothing any more.
        plan = read_plan(doc) if doc is not None else self._plan(run)
        if plan is None or plan.generation < generation:
            return
        if not fences.may_renew(plan, self._node):
            return
        since_s = sent_s if doc is not None else self.failsafe_s(plan)
        if since_s:
            self._launchers.order(run, {
                "t": "permit", "generation": plan.generation,
                "until_ns": int((since_s + lease_s) * 1e9)})

    def failsafe_s(self, plan: Plan) -> float:
        """Since when everybody of the plan is known to have heard of this node and to know of no
        higher generation; 0.0 where somebody is not."""
        if plan.finished >= 0:
            return 0.0
        others = {*plan.members, *plan.spares} - {self._node}
        heard = [self._peers.answered_s(node, plan.run, plan.generation) for node in others]
        return min(heard, default=self._boot_s())

    def _plan(self, run: str) -> Plan | None:
        return next((plan for plan in self._plans() if plan.run == run), None)
