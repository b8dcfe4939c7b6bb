"""Renews the permits of a script's ranks, from the store or from all other nodes of the run.

Owns how long a script may compute here without a word from elsewhere.  Its checkpoint is not ours
to void, so a generation elsewhere starts when the permits of the old one have run out: each is
counted from before the question that renewed it was sent.  One node's have no end.

With the store away, or slow, as in an election of its own, or restored to before this generation
(failsafe), a permit is renewed while every member and spare of the plan answers and knows no higher
generation, and so does every other node that told of a launcher of the run, for it may have been
named since: who answers has heard of this node, and so does not hold it lost before the permit
ends.  Its clock is handed in: the simulator runs this file too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from ...core.model import Beat, Doc, Plan, run_subject
from ...core.run import fences
from ...core.run.members import is_anothers, read_plan
from ...store.base import StoreError
from ...system import clocks

RENEW_LEASES = 0.2  # of a lease between two renewals
# Of a lease that the store's answer is waited for: where the others' word would do as well, which
# may be 0.4 of a lease old and one of them late; and where it would not.
SOON_LEASES, STORE_LEASES = 0.1, 0.3
WORD_LEASES = 0.5  # how old their word may be for that


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

    def heard(self) -> tuple[Beat, ...]: ...


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
        doc = await self._read(run, lease_s)
        read = read_plan(doc) if doc is not None else None
        told = read is not None and read.generation >= generation
        plan = read if told else self._plan(run)
        # Of an older generation that still runs here the launcher hears nothing any more.
        if plan is None or plan.generation < generation:
            return
        if not fences.may_renew(plan, self._node):
            return
        # Whom an older plan names may lead by it, and is asked too.
        named = (*read.members, *read.spares) if read is not None else ()
        since_s = sent_s if told else self.failsafe_s(plan, named)
        if since_s:
            self._launchers.order(run, {
                "t": "permit", "generation": plan.generation,
                "until_ns": int((since_s + lease_s) * 1e9)})

    async def _read(self, run: str, lease_s: float) -> Doc | None:
        """The run's document; None where the store does not say it in time."""
        reading = asyncio.create_task(self._store.read(run_subject(run)))
        since_s = self._boot_s() - WORD_LEASES * lease_s
        try:
            await asyncio.wait({reading}, timeout=SOON_LEASES * lease_s)
            plan = self._plan(run)
            if not reading.done() and (plan is None or self.failsafe_s(plan) < since_s):
                await asyncio.wait({reading}, timeout=(STORE_LEASES - SOON_LEASES) * lease_s)
            return reading.result() if reading.done() else None
        except (StoreError, TimeoutError):
            return None
        finally:
            reading.cancel()

    def failsafe_s(self, plan: Plan, more: Iterable[str] = ()) -> float:
        """Since when everybody of the plan, and who could be by now, is known to have heard of this
        node and to know of no higher generation; 0.0 where somebody is not.  `more`: who else."""
        if plan.finished >= 0:
            return 0.0
        told = {beat.node for beat in self._peers.heard()
                if beat.run == plan.run and not is_anothers(beat.uid, plan.owner)}
        others = {*plan.members, *plan.spares, *told, *more} - {self._node}
        heard = [self._peers.answered_s(node, plan.run, plan.generation) for node in others]
        return min(heard, default=self._boot_s())

    def _plan(self, run: str) -> Plan | None:
        return next((plan for plan in self._plans() if plan.run == run), None)
