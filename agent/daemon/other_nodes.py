"""Questions between agents: what this one asks of the others, and how it answers theirs.

Owns what may be asked over the agents' connections, its bounds, and the last word of each node for
the time when it does not answer any more.  Who asks holds the cluster's token; an order for a run's
ranks is taken from the node that leads the run alone.  What is ordered is the core's.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from ..actions.performer import Performer
from ..core.model import Effect, EffectOutcome, Request, Stop, TakeEvidence
from ..peers.beats import ANSWER_MAX, Peers
from ..web import node_places, status
from ..web.fleet import Word
from .operators import Operators
from .peer_rounds import ATTEND, PeerRounds
from .starts import STARTS, Runs, Starts
from .state import AgentState

STATUS, INCIDENTS, INCIDENT, LEDGER = "status", "incidents", "incident", "ledger"
WHOLE = (STATUS, INCIDENTS, LEDGER)  # what is asked of every node
ORDERS = ("evidence", "logs", "stop")
ANSWER_S = 2.0  # for a person who waits
FRESH_S = 1.0  # many pages that are open ask once
KEPT_MAX, KEPT_BYTES_MAX = 256 << 10, 4 << 20  # of one last word, and of all
DEADLINE_MAX_S = 60.0
REASON_MAX, ID_MAX = 500, 500
FORWARDED_MAX = 256
Left = Annotated[float, msgspec.Meta(ge=0.0)]  # seconds


class OtherNodes:
    """Both directions, for one agent; without `peers` there are no other nodes."""

    def __init__(
        self, state: AgentState, peers: Peers | None, performer: Performer, operators: Operators,
        rounds: PeerRounds | None = None,
    ) -> None:
        self._state, self._peers = state, peers
        self._performer, self._operators, self._rounds = performer, operators, rounds
        self._kept: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._asked: dict[str, tuple[float, asyncio.Future[list[Word]]]] = {}
        self._forwarded: OrderedDict[str, str] = OrderedDict()  # request -> node that has it
        performer.elsewhere = self.carry_out
        self.starts = Starts(
            state.name, peers,
            Runs(self._owner, self._is_served, lambda: state.snapshot.observed.store,
                 operators.request, operators.done,
                 lambda *said: state.audit.refused(*said)))

    # ------------------------------------------------------------- asking for people

    async def words(self, what: str) -> list[Word]:
        """What every node says of WHOLE's `what`, this one first."""
        made_s, answer = self._asked.get(what, (-1e9, None))
        if answer is None or answer.done() and time.monotonic() - made_s > FRESH_S:
            answer = asyncio.ensure_future(self._gathered(what))
            self._asked[what] = (time.monotonic(), answer)
        return await asyncio.shield(answer)

    async def _gathered(self, what: str) -> list[Word]:
        others = [name for name in node_places.names(self._state) if name != self._state.name]
        mine = self._said(what, "")
        own = Word(self._state.name, 0.0, "", mine["answer"], mine["owners"])
        return [own, *await asyncio.gather(*(self._word(name, what) for name in others))]

    async def _word(self, name: str, what: str) -> Word:
        key = (what, name)
        try:
            said = await self._ask(name, {"what": what})
            self._keep(key, msgspec.json.encode(said))
            return Word(name, 0.0, "", said["answer"], _owners(said))
        except (ConnectionError, LookupError, TypeError) as error:
            kept_s, body = self._kept.get(key, (0.0, b""))
            said = msgspec.json.decode(body) if body else {"answer": None}
            age_s = round(time.monotonic() - kept_s, 1) if body else None
            return Word(name, age_s, str(error), said["answer"], _owners(said))

    async def incident(self, id: str) -> Word | None:
        """One incident that another node knows: from whoever has it, newest word first."""
        if self._peers is None:
            return None
        names = self._peers.others()  # as they were asked: meanwhile one may be lost
        answers = await asyncio.gather(*(
            self._ask(name, {"what": INCIDENT, "id": id}) for name in names),
            return_exceptions=True)
        for name, said in zip(names, answers, strict=True):
            if isinstance(said, dict) and said.get("answer"):
                return Word(name, 0.0, "", said["answer"], _owners(said))
        for (what, name), (kept_s, body) in reversed(self._kept.items()):
            if what == INCIDENTS:
                said = msgspec.json.decode(body)
                for one in said["answer"]:
                    if one["id"] == id:
                        age_s = round(time.monotonic() - kept_s, 1)
                        return Word(name, age_s, "it does not answer", one, _owners(said))
        return None

    def _keep(self, key: tuple[str, str], body: bytes) -> None:
        self._kept.pop(key, None)
        if len(body) <= KEPT_MAX:
            self._kept[key] = (time.monotonic(), body)
        while sum(len(one) for _, one in self._kept.values()) > KEPT_BYTES_MAX:
            self._kept.popitem(last=False)

    async def _ask(
        self, name: str, question: dict[str, Any], limit_s: float = ANSWER_S
    ) -> dict[str, Any]:
        if self._peers is None:
            raise ConnectionError("this agent is in touch with no other node")
        return await self._peers.ask(name, question, limit_s)

    # ------------------------------------------------------------- asking for the core

    async def carry_out(self, effect: Effect) -> EffectOutcome:
        """Has the node that the effect names carry it out."""
        assert isinstance(effect.body, (Stop, TakeEvidence))
        node = effect.body.node
        try:
            said = await self._ask(
                node, {"what": "do", "effect": msgspec.to_builtins(effect)}, effect.deadline_s)
            return EffectOutcome(effect.id, bool(said["ok"]), str(said["error"]),
                                 str(said["detail"]))
        except (ConnectionError, LookupError) as error:
            return EffectOutcome(effect.id, False, f"{node}: {error}")

    def leader(self, run: str) -> str:
        """The other node that leads the run; "" where it is this one, or nobody that is known."""
        found = self._holder(run)
        return found if found != self._state.name and self._peers is not None else ""

    async def forward(self, node: str, request: Request) -> None:
        """Hands a person's request to another node's agent.  ConnectionError with its reason.

        How long a pause still lasts goes with it: two nodes' times of day may be hours apart."""
        question = {"what": "request", "request": msgspec.to_builtins(request)}
        if request.until_wall_s:
            question["for_s"] = max(0.0, request.until_wall_s - time.time())
        await self._ask(node, question)
        self._forwarded[request.id] = node
        while len(self._forwarded) > FORWARDED_MAX:
            self._forwarded.popitem(last=False)

    async def request_state(self, id: str) -> dict[str, Any] | None:
        """How a forwarded request stands there; None for one that is not known."""
        node = self._forwarded.get(id)
        if node is None:
            return None
        try:
            said = await self._ask(node, {"what": "answered", "id": id})
            return dict(said["answer"])
        except (ConnectionError, LookupError, TypeError, ValueError) as error:
            return {"id": id, "state": "waiting", "text": f"{node} has it: {error}"}

    # ------------------------------------------------------------- answering

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        """Raises LookupError, TypeError or ValueError for what is no question."""
        if not isinstance(question, dict):
            raise TypeError("no object")
        what = question["what"]
        if what in (*WHOLE, INCIDENT):
            return self._said(str(what), str(question.get("id", "")))
        if what == "do":
            return await self._obey(node, question["effect"])
        if what == "request":
            return self._take(node, question["request"], question.get("for_s"))
        if what == STARTS:
            return await self.starts.asked(node, question)
        if what == ATTEND and self._rounds is not None:
            return self._rounds.attend(node, question)
        if what == "answered":
            return {"answer": self._operators.answer(str(question["id"])) or {}}
        raise ValueError(f"{str(what)[:40]!r} is nothing that this release answers")

    def _said(self, what: str, id: str) -> dict[str, Any]:
        """This node's own answer, and whose each run or incident in it is."""
        state = self._state
        if what == STATUS:
            owners = {one.hello.run: one.uid for one in state.launchers.sessions()}
            return {"answer": status.status(state), "owners": owners}
        if what == LEDGER:
            return {"answer": status.ledger(state), "owners": {}}
        if what == INCIDENT:
            one = state.incident_log.incidents.get(id)
            found = [status.reviewed(state, one, state.jobs.attempts())] if one else []
        else:
            found = _fitting(status.incidents(state, everything=False))
        owners = {one["id"]: state.incident_log.owner(one["id"]) for one in found}
        answer = found if what == INCIDENTS else found[0] if found else None
        return {"answer": answer, "owners": owners}

    async def _obey(self, node: str, sent: Any) -> dict[str, Any]:
        """Carries out an order for ranks here, of the node that leads their run."""
        effect = msgspec.convert(sent, type=Effect)
        body = effect.body
        if effect.kind not in ORDERS or not isinstance(body, (Stop, TakeEvidence)):
            raise ValueError(f"{effect.kind[:40]!r} is no order for another node")
        if isinstance(body, Stop) and (body.leave or body.save or body.after) or (
                body.node != self._state.name):
            raise ValueError("it is for another node, or none that a leader gives")
        if self._holder(body.run) != node:
            return {"refused": f"{node} does not lead run {body.run}, as {self._state.name} knows"}
        made = replace(
            effect, id=f"{effect.id[:ID_MAX]}@{node}", reason=effect.reason[:REASON_MAX],
            deadline_s=min(max(0.0, effect.deadline_s), DEADLINE_MAX_S), outlives_node=False,
            body=replace(body, node="", reason=body.reason[:REASON_MAX]))
        outcome = await self._performer.obey(made)
        return {"ok": outcome.ok, "error": outcome.error, "detail": outcome.detail}

    def _take(self, node: str, sent: Any, for_s: Any) -> dict[str, Any]:
        """A person's request that came to another node, which saw to it that he may.  `for_s`: how
        long a pause lasts from now on; None where it has no end, or an older release asks."""
        request = msgspec.convert(sent, type=Request)
        if for_s is not None:
            left_s = msgspec.convert(for_s, type=Left)
            request = replace(request, until_wall_s=time.time() + left_s)
        if not request.run or self._state.launchers.session(request.run) is None:
            return {"refused": f"no run {request.run!r} on {self._state.name}"}
        made = replace(request, id=request.id[:ID_MAX], reason=request.reason[:REASON_MAX],
                       by=f"{request.by} at {node}"[:REASON_MAX])
        if not self._operators.request(made):
            return {"refused": "too many requests wait already"}
        return {"taken": made.id}

    def _owner(self, run: str) -> int | None:
        """Whose launcher of the run is here; None for nobody's."""
        session = self._state.launchers.session(run)
        return session.uid if session is not None else None

    def _is_served(self, run: str) -> bool:
        """Whether a launcher of the run is connected here."""
        session = self._state.launchers.session(run)
        return session is not None and session.connection is not None

    def _holder(self, run: str) -> str:
        """Who holds the run's lease, as the store says; "" for nobody."""
        leases = self._state.snapshot.observed.store.leases
        return next((one.holder for one in leases if one.run == run), "")


def _owners(said: dict[str, Any]) -> dict[str, int]:
    found = said.get("owners")
    return dict(found) if isinstance(found, dict) else {}


def _fitting(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest that fit into one answer."""
    room, kept = ANSWER_MAX, []
    for one in found:
        room -= len(msgspec.json.encode(one)) + 2
        if room < 0:
            break
        kept.append(one)
    return kept
