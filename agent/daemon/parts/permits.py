"""Renews the permits of a script's ranks, from the store or from all other nodes of the run.

Owns how long a script may compute here without a word from elsewhere.  Its checkpoint is not ours
to void, so a generation elsewhere starts when the permits of the old one have run out: each is
counted from before the question that renewed it was sent.  One node's have no end.

With the store away (failsafe) a permit is renewed while every member and spare of the plan answers
and knows no higher generation: who answers has heard of this node, and so does not hold it lost
before the permit ends.
"""

from __future__ import annotations

import asyncio
import time

from ...core.model import TRAINER, Doc, Plan, run_subject
from ...core.run import fences
from ...core.run.members import read_plan
from ...launchers.run_session import RunSession
from ...launchers.server import LauncherServer
from ...store.base import Store, StoreError
from ..state import AgentState
from .peers import PeerPart

RENEW_LEASES = 0.2  # of a lease between two renewals


class Permits:
    """The part that asks and tells."""

    name = "permits"

    def __init__(
        self, state: AgentState, store: Store, launchers: LauncherServer, peers: PeerPart
    ) -> None:
        self._state, self._store, self._launchers = state, store, launchers
        self._peers = peers

    async def run(self) -> None:
        while True:
            lease_s = self._state.config.detect.lease_s
            # At once: each question to a store that is away takes seconds, and a few in a row would
            # outlast the permits of the last runs.
            await asyncio.gather(*(
                self.renew(session, lease_s) for session in self._launchers.sessions()
                if session.hello.grade != TRAINER))
            await asyncio.sleep(RENEW_LEASES * lease_s)

    async def renew(self, session: RunSession, lease_s: float) -> None:
        """By the store's word where it answers, else by all others' together."""
        run = session.hello.run
        sent_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            doc: Doc | None = await self._store.read(run_subject(run))
        except (StoreError, TimeoutError):
            doc = None
        # Of an older generation that still runs here the launcher hears nothing any more.
        plan = read_plan(doc) if doc is not None else self._plan(run)
        if plan is None or plan.generation < session.levels.generation:
            return
        if not fences.may_renew(plan, self._state.name):
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
        others = {*plan.members, *plan.spares} - {self._state.name}
        heard = [self._peers.answered_s(node, plan.run, plan.generation) for node in others]
        return min(heard, default=time.clock_gettime(time.CLOCK_BOOTTIME))

    def _plan(self, run: str) -> Plan | None:
        plans = self._state.snapshot.decision.plans
        return next((plan for plan in plans if plan.run == run), None)
