"""Checks of this node, made for the agent: what is known of them, and a round when one is wanted.

Owns the look at results.json (read again when it is another file), what other nodes measured,
written down beside it for whoever makes checks here, and the one child that makes a round, off the
loop and with a deadline.  A check that disturbs nobody is kept young here, so that a start finds
its verdict.  Concludes nothing; what is of an earlier boot counts as not known.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec

from ...checks import results, table
from ...checks.facts import Fault
from ...checks.round import Round, pythons
from ...core.checks import baseline
from ...core.checks.verdict import CheckVerdict
from ...core.model import UNREADABLE, Documents, Effect, RunCheck
from ...core.nodes import fleet_baseline
from ...system.child_probe import Prober
from ..state import AgentState

LOOK_S = 15.0
YOUNG_SHARE = 0.7  # of checks.max_age_s: made again before a start would have to
FAILED_S = 30.0  # what failed may have passed by then
RETRY_S = 60.0  # after a round that made nothing
MARGIN_S = 2.0  # the child is ended before the effect's deadline, and says why
FAULTS_MAX = 64  # that a round is told of
BAD = "no round of checks: {}"


class Checks:
    name = "checks"

    def __init__(self, state: AgentState, wake: Callable[[str], None]) -> None:
        self._state, self._wake = state, wake
        agent = state.config.agent
        # What `holdfast check` of this user keeps, too: a private agent's own folder is its run's.
        self.folder = (results.directory(os.environ) if state.is_private
                        else Path(agent.state_dir) / "checks")
        self._seen: tuple[int, int, int] | None = None
        self._docs: Documents | None = None  # that fleet.json was written from
        self._fleet: results.Fleet = {}
        self._prober = Prober()
        self._one = asyncio.Lock()  # one round at a time: the next one finds what it made

    def begin(self) -> None:
        """Before launchers come: a start that finds no verdict would have all of them made anew."""
        found = self._changed()
        if found is not None and found.boot_id == self._state.boot_id:
            self._state.checks = known(found.verdicts.values())
            self._state.passes = passes(found)

    async def run(self) -> None:
        while True:
            await self.look()
            wait_s = LOOK_S
            old = self._old()
            if old:
                error = await self._round(old, 0.0, 0.0)
                wait_s = RETRY_S if error else LOOK_S
            await asyncio.sleep(wait_s)

    async def look(self) -> None:
        """Takes what is written there, whoever wrote it, and writes down what others measured."""
        await self._write_fleet()
        found = await asyncio.to_thread(self._changed)
        if found is not None:
            here = found.boot_id == self._state.boot_id
            self._state.passes = passes(found)
            self._show(found.verdicts.values() if here else ())

    async def perform(self, effect: Effect, body: RunCheck) -> str:
        """A round that the core asked for; why there was none, or "".  A check that fails is no
        failure of the round."""
        names = [one for one in body.checks if one in table.BY_NAME]
        if not names:
            return f"none of {', '.join(body.checks)} is a check"
        return await self._round(names, body.max_age_s, effect.deadline_s)

    # ------------------------------------------------------------ within

    async def _write_fleet(self) -> None:
        """A check is made in a child, or by a person's command: neither has the store."""
        docs = self._state.snapshot.observed.store.docs
        if docs is self._docs:
            return
        self._docs = docs
        found = fleet_baseline.of_others(docs, self._state.name)
        if found == self._fleet:
            return
        try:
            await asyncio.to_thread(results.keep_fleet, self.folder, found)
            self._fleet = found
        except OSError as error:
            self._state.errors("checks", f"{self.folder}: {error.strerror or error}")

    def _passive(self) -> list[str]:
        gate = self._state.config.checks.core_settings().names
        return [one.name for one in table.CHECKS
                if one.name in gate and not (one.disturbs or one.needs)]

    def _max_age_s(self) -> float:
        return self._state.config.checks.max_age_s * YOUNG_SHARE

    def _old(self) -> list[str]:
        """What disturbs nobody and is to be made anew; what failed is asked again sooner."""
        now_s = time.time()
        young = {one.check for one in self._state.checks if 0.0 <= now_s - one.wall_s <= (
            min(FAILED_S, self._max_age_s()) if one.proven else self._max_age_s())}
        return [name for name in self._passive() if name not in young]

    async def _round(self, names: Collection[str], max_age_s: float, limit_s: float) -> str:
        state = self._state
        limit_s = limit_s or state.config.checks.core_settings().limit_s
        begin_s = time.monotonic()
        async with self._one:
            left_s = limit_s - (time.monotonic() - begin_s) - MARGIN_S
            asked = msgspec.json.encode(self._asked(names, max_age_s)).decode()
            command = (sys.executable, "-P", "-m", "holdfast.agent.checks.round", asked)
            answer = await self._prober.ask("checks", command, max(1.0, left_s))
        if answer.stuck:
            state.errors("checks", answer.error)
        if not answer.ok:
            return answer.error
        try:
            made = msgspec.json.decode(answer.output, type=list[CheckVerdict])
        except UNREADABLE as error:
            return BAD.format(error)
        by_name = {one.check: one for one in state.checks} | {one.check: one for one in made}
        self._show(by_name.values())
        return ""

    def _asked(self, names: Collection[str], max_age_s: float) -> Round:
        state, checks = self._state, self._state.config.checks
        return Round(
            node=state.name, checks=tuple(names), folder=str(self.folder), boot_id=state.boot_id,
            collectors=state.config.collectors,
            pythons=pythons(checks.python, state.job_pythons(), os.environ),
            busy=state.training(), limits=checks.limits, profile=checks.profile,
            max_age_s=max_age_s,
            faults=tuple(Fault(one.detector, one.fault, one.severity, one.reason)
                         for one in state.snapshot.decision.verdicts if not one.run)[:FAULTS_MAX])

    def _show(self, verdicts: Collection[CheckVerdict]) -> None:
        found = known(verdicts)
        if found != self._state.checks:
            self._state.checks = found
            self._wake("checks")

    def _changed(self) -> results.Results | None:
        """The results; None where they are the same as before."""
        try:
            stat = os.stat(self.folder / results.FILE, follow_symlinks=False)
            seen = stat.st_ino, stat.st_mtime_ns, stat.st_size
        except OSError:
            seen = (0, 0, 0)
        if seen == self._seen:
            return None
        self._seen = seen
        return results.load(self.folder)


def passes(found: results.Results) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """What this node can tell others.  Pairs of nodes are no node's own."""
    rows = ((key, baseline.summary(kept)) for key, kept in sorted(found.baseline.items())
            if not key.startswith("peers,"))
    return tuple((key, values) for key, values in rows if values)


def known(verdicts: Iterable[CheckVerdict]) -> tuple[CheckVerdict, ...]:
    """Those that the table knows: the file is whoever's may write into the folder."""
    return tuple(one for one in verdicts if one.check in table.BY_NAME)
