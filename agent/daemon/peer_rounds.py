"""Tests between the nodes of a run, as agents arrange them: one asks the others, and all take part.

Owns the children that take part (agent/peers/attend.py), one at a time, each with a deadline; and
who may ask for one: the node that leads a run which is here.  What was found is judged by the core.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..checks.round import pythons
from ..core.checks.node_tests import read_found, with_away
from ..core.model import Effect, EffectOutcome, NodeTests
from ..peers.attend import TOKEN_VARIABLE, Asked
from ..system.child_probe import Answer, Prober
from .parts.peers import PeerPart
from .state import AgentState

ATTEND = "attend"  # the question
ASK_S = 3.0  # for an agent's word that it takes part; 32 are asked at a time
ASKING_S = 2 * ASK_S  # for all of them: many that are silent keep nobody else waiting for longer
AGAIN_S = 0.2  # from one question to the next, of who does not take part yet
MARGIN_S = 2.0  # the child is ended before the effect's deadline, and says why
LIMIT_MAX_S = 3600.0
NAME = "tests between nodes"
NOT_KNOWN = "it is not known here"


class PeerRounds:
    """This node's part in such tests, and those that it arranges."""

    def __init__(self, state: AgentState, part: PeerPart, folder: Path) -> None:
        self._state, self._part, self._folder = state, part, folder
        self._prober = Prober()
        self._run = ""  # whose tests this node takes part in
        self._task: asyncio.Task[Answer] | None = None
        self._telling: asyncio.Task[None] | None = None

    async def arrange(self, effect: Effect, body: NodeTests) -> EffectOutcome:
        """Has the nodes come to this one, which coordinates, and says what was found."""
        if self._is_busy(body.run):
            return EffectOutcome(effect.id, False, self._busy_words())
        limit_s = effect.deadline_s - ASKING_S - MARGIN_S
        others = [name for name in body.nodes if name != self._state.name]
        try:
            port = _free_port(self._part.host)
        except OSError as error:
            return EffectOutcome(effect.id, False, f"{self._part.host}: {error}")
        question = {"what": ATTEND, "run": body.run, "id": effect.id, "limit_s": limit_s,
                    "leader": [self._state.name, self._part.host], "port": port}
        begin_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(self._ask(name, question, begin_s) for name in others))
        away = {name: why for name, why in zip(others, answers, strict=True) if why}
        known = self._part.peers.addresses
        away |= {name: NOT_KNOWN for name in others if name not in away and name not in known}
        names = [name for name in others if name not in away]
        if not names:
            return EffectOutcome(effect.id, False, _words(away))
        peers = ((self._state.name, self._part.host), *((one, known[one].host) for one in names))
        answer = await self._take_part(body.run, effect.id, Asked(
            peers, 0, port, limit_s, str(self._folder), self._state.boot_id, groups=body.groups))
        found = read_found(answer.output.decode("utf-8", "replace")) if answer.ok else None
        if found is None:
            return EffectOutcome(effect.id, False, answer.error or "no report that can be read")
        if found.problem:
            return EffectOutcome(effect.id, False, found.problem)
        found = with_away(found, away)
        return EffectOutcome(effect.id, True, "", msgspec.json.encode(found).decode())

    def attend(self, node: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Begins this node's part in the tests of the node that leads a run here.  Raises
        LookupError, TypeError or ValueError for what is no such question."""
        run, id = str(question["run"]), str(question["id"])
        name, address = msgspec.convert(question["leader"], type=tuple[str, str])
        limit_s = min(max(1.0, float(question["limit_s"])), LIMIT_MAX_S)
        leases = self._state.snapshot.observed.store.leases
        if name != node or not any((one.run, one.holder) == (run, node) for one in leases):
            return {"refused": f"{node} does not lead run {run}, as {self._state.name} knows"}
        if self._state.launchers.session(run) is None:
            return {"refused": f"no launcher of run {run} is on {self._state.name}"}
        if self._is_busy(run):
            return {"refused": self._busy_words()}
        asked = Asked(((name, address), (self._state.name, self._part.host)), 1,
                      int(question["port"]), limit_s, str(self._folder), self._state.boot_id)
        self._telling = asyncio.get_running_loop().create_task(self._told(run, id, asked))
        return {"taken": id}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ------------------------------------------------------------ within

    async def _ask(self, name: str, question: dict[str, Any], begin_s: float) -> str:
        """Why a node takes no part; "" = it does.  It is asked again for a while: at the start of a
        run its address, or the word there of who leads, may be on its way still."""
        time_s, why = asyncio.get_running_loop().time, ""
        while True:
            try:
                async with asyncio.timeout_at(begin_s + ASKING_S):
                    await self._part.peers.ask(name, question, ASK_S)
                return ""
            except ConnectionError as error:
                why = str(error)
            except TimeoutError:
                return why or f"too many others did not answer within {ASKING_S:g} s"
            if time_s() + AGAIN_S > begin_s + ASK_S:
                return why
            await asyncio.sleep(AGAIN_S)

    async def _told(self, run: str, id: str, asked: Asked) -> None:
        answer = await self._take_part(run, id, asked)
        if not answer.ok:
            self._state.errors(NAME, answer.error)

    async def _take_part(self, run: str, id: str, asked: Asked) -> Answer:
        """In a child.  An earlier one for the same run ends: another node leads it now."""
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._run, checks = run, self._state.config.checks
        asked.pythons = pythons(checks.python, self._state.job_pythons(), os.environ)
        if training := self._state.training():
            asked.why_not = f"{training[0]} trains here, and would be disturbed"
        command = (sys.executable, "-P", "-m", "holdfast.agent.peers.attend",
                   msgspec.json.encode(asked).decode())
        secret = hmac.new(self._part.peers.token, f"{NAME} {id}".encode(), hashlib.sha256)
        task = self._task = asyncio.get_running_loop().create_task(self._prober.ask(
            NAME, command, asked.limit_s, {TOKEN_VARIABLE: secret.hexdigest()}))
        await asyncio.wait([task])
        if task.cancelled():
            return Answer(False, b"", "other tests of the same run began", 0.0)
        return task.result()

    def _is_busy(self, run: str) -> bool:
        return self._task is not None and not self._task.done() and self._run != run

    def _busy_words(self) -> str:
        return f"{self._state.name} is tested for run {self._run}: ask again"


def _free_port(host: str) -> int:
    """OSError also where the address is none of IPv4: the tests speak no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.bind((host, 0))
        return int(tried.getsockname()[1])


def _words(away: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in list(away.items())[:8])
