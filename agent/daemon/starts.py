"""Runs that a user starts on this node from another one: from the agents to `holdfast accept`.

Owns who accepts runs here, the orders that wait for them, and what became of each launcher.  Starts
no process itself: the user's own `holdfast accept` does, so that no right is given to an agent.
Who asks is known by uid: the kernel's word on the node where the command was typed, the cluster
token's between the agents.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from holdfast.worker.peers import user_name

from ..core.actions import DRAIN
from ..core.model import Request, StoreView, run_subject
from .attempts import RUNS_MAX, Local, Run, Still, confirmed, judged

STARTS = "starts"  # what agents ask one another
START, END, LOOK = "start", "end", "look"
QUEUED: Final = "queued"
RUNNING: Final = "running"
REFUSED: Final = "refused"
ALL = "all"
AWAY_S = 5.0  # between two questions of one `holdfast accept`, and it still counts as there
BEGINS_S = 12.0  # for a launcher to begin; what begins later is ended
AGAIN_S = 1.0  # an order that nobody confirmed is given again
ANSWER_S = 3.0  # of another node's agent, which waits for nobody
WITNESS_S = 2.0  # of another node's agent, of the runs there
ASKED_AT_ONCE = 8  # of the agent's questions to others: those of the core come first
KEPT_MAX, PENDING_MAX, NODES_MAX = 32, 4, 2048
ARGUMENTS_MAX, ENVIRONMENT_MAX = 64 << 10, 64 << 10  # bytes
WORD_MAX = 32 << 10
USERS_MAX = 256
NOT_HERE = "no run"  # how the words begin that mean nothing else
LATE_MAX = 64

Text = Annotated[str, Meta(max_length=WORD_MAX)]
Short = Annotated[str, Meta(max_length=500)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """One launcher to start: the command line behind `holdfast`, its folder and environment."""

    run: Run
    command: Literal["run", "train"]
    arguments: Annotated[list[Text], Meta(max_length=4096)]
    folder: Annotated[str, Meta(pattern="^/", max_length=4096)]
    environment: Annotated[dict[Name, Text], Meta(max_length=256)] = {}
    id: Annotated[str, Meta(max_length=64)] = ""
    by: Short = ""

    def __post_init__(self) -> None:
        if sum(len(one) for one in self.arguments) > ARGUMENTS_MAX:
            raise ValueError(f"the arguments are longer than {ARGUMENTS_MAX >> 10} KiB")
        long = sum(len(name) + len(text) for name, text in self.environment.items())
        if long > ENVIRONMENT_MAX:
            raise ValueError(f"the environment is longer than {ENVIRONMENT_MAX >> 10} KiB")
        words = (self.folder, *self.arguments, *self.environment, *self.environment.values())
        if any("\0" in one for one in words) or any("=" in one for one in self.environment):
            raise ValueError("a zero byte, or a variable with = in its name")


class Launched(msgspec.Struct, forbid_unknown_fields=True):
    """A launcher that `holdfast accept` started, or did not; `queued` by its own word: it is kept
    from before, and begins again once it is known that its run goes on."""

    id: Annotated[str, Meta(max_length=64)]
    run: Run
    state: Literal["queued", "running", "ended", "refused"]
    code: int = 0
    text: Short = ""


class Waiting(msgspec.Struct, forbid_unknown_fields=True):
    """What `holdfast accept` says when it asks for orders: who it is, and all that it started."""

    life: Annotated[str, Meta(min_length=8, max_length=64)]
    count: Annotated[int, Meta(ge=0)] = 0  # one more each time: words may overtake each other
    wait_s: Annotated[float, Meta(ge=0.0, le=30.0)] = 0.0
    runs: Annotated[list[Launched], Meta(max_length=RUNS_MAX + KEPT_MAX)] = []


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What a user's command asks for: on these nodes."""

    nodes: Annotated[list[Name], Meta(min_length=1, max_length=NODES_MAX)]
    run: Run
    order: Order | None = None


class Refusal(Exception):
    """It is not done, and nothing has happened; the text says why and what to do."""


class Pending:
    """An order that `holdfast accept` has not confirmed yet."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.until_s = time.monotonic() + BEGINS_S
        self.given_s = -math.inf


class Accepting:
    """One user's `holdfast accept` on this node."""

    def __init__(self, life: str) -> None:
        self.life, self.count = life, -1
        self.poll: object | None = None  # the question of it that waits for an order
        self.gone: Callable[[], bool] = bool  # whether nobody waits for that one's answer any more
        self.seen_s = time.monotonic()
        self.pending: dict[str, Pending] = {}
        self.late: OrderedDict[str, str] = OrderedDict()  # id -> run, of what must not begin now
        self.ends: dict[str, float] = {}  # id -> when it was told last
        self.launched: dict[str, Launched] = {}
        self.changed = asyncio.Condition()

    def is_here(self) -> bool:
        if self.poll is not None:
            return not self.gone()
        return time.monotonic() - self.seen_s < AWAY_S

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def says(self, said: Waiting) -> list[tuple[str, str, str]]:
        """Takes its word of what it started; returns id, run and by whom of what began by it."""
        if said.count <= self.count:
            return []
        before = self.launched
        self.count, self.launched = said.count, {one.id: one for one in said.runs}
        confirmed = [(id, self.pending[id].order.run, self.pending.pop(id).order.by)
                     for id in self.launched if id in self.pending]
        confirmed += [
            (id, one.run, "`holdfast accept`, which kept the order")
            for id, one in self.launched.items()
            if one.state == RUNNING and id in before and before[id].state == QUEUED]
        for id in self.late.keys() & self.launched.keys():
            self.ends[id] = -math.inf
            del self.late[id]
        self.ends = {id: at_s for id, at_s in self.ends.items()
                     if id in self.launched and self.launched[id].state in (QUEUED, RUNNING)}
        return confirmed

    def expire(self) -> None:
        for id in [id for id, one in self.pending.items() if one.until_s < time.monotonic()]:
            self.withdraw(id)

    def withdraw(self, id: str) -> None:
        """Who fetched it already may begin it yet: it is ended then."""
        self.late[id] = self.pending.pop(id).order.run
        while len(self.late) > LATE_MAX:
            self.late.popitem(last=False)

    def due(self, take: bool = False) -> list[dict[str, Any]]:
        """What is to be given now; `take`: it is."""
        self.expire()
        now_s, found = time.monotonic(), []
        for one in self.pending.values():
            if now_s - one.given_s > AGAIN_S:
                one.given_s = now_s if take else one.given_s
                found.append({"do": START, **msgspec.to_builtins(one.order)})
        for id, at_s in self.ends.items():
            if now_s - at_s > AGAIN_S:
                self.ends[id] = now_s if take else at_s
                found.append({"do": END, "id": id})
        return found

    def of(self, run: str) -> Launched | None:
        """What is known of this user's launcher of the run: of several the one that lives, else
        the newest."""
        self.expire()
        for id, waiting in self.pending.items():
            if waiting.order.run == run:
                return Launched(id, run, QUEUED)
        rows = [each for each in self.launched.values() if each.run == run]
        for each in rows:
            if each.state in (RUNNING, QUEUED):
                return each
        for id, name in self.late.items():
            if name == run:
                return Launched(id, run, REFUSED, text=(
                    f"`holdfast accept` did not begin it within {BEGINS_S:g} s"))
        return rows[-1] if rows else None


class Nodes(Protocol):
    """The other nodes' agents (agent/peers/beats.py)."""

    def others(self) -> tuple[str, ...]: ...

    async def ask(self, name: str, question: Any, limit_s: float) -> dict[str, Any]: ...


class Runs(NamedTuple):
    """What this part needs of the agent's own: whose launcher of a run is here (None: nobody's),
    whether one serves it now, what the store says, the core's queue of requests, False where it is
    full, the journal, and what writes down that a user (uid, what, why, example) asked for
    another's."""

    owner: Callable[[str], int | None]
    is_served: Callable[[str], bool]
    store: Callable[[], StoreView]
    request: Callable[[Request], bool]
    record: Callable[[Request], None]
    refused: Callable[[int, str, str, str], None]


class Starts:
    """One agent's part, as the node where a run is started from and as one of those that run it."""

    def __init__(self, node: str, peers: Nodes | None, runs: Runs) -> None:
        self._node, self._peers, self._runs = node, peers, runs
        self._users: OrderedDict[int, Accepting] = OrderedDict()
    # ------------------------------------------------------------- `holdfast accept`

    async def orders(
        self, uid: int, said: Waiting, gone: Callable[[], bool] = bool
    ) -> list[dict[str, Any]]:
        """What this user's `holdfast accept` is to do next, within its wait; an order is given
        again until it is confirmed.  `gone`: whether nobody waits for the answer any more.  Raises
        Refusal where another one of the same user is here."""
        one = self._users.get(uid)
        if one is not None and one.life != said.life and one.is_here():
            raise Refusal(f"another `holdfast accept` of {user_name(uid)} runs on {self._node}")
        if one is None or one.life != said.life:
            one = self._users[uid] = Accepting(said.life)
            self._forget()
        self._users.move_to_end(uid)
        for id, run, by in one.says(said):
            self._write(START, id, run, by)
        one.seen_s = time.monotonic()
        if not said.wait_s:
            return []
        mine = one.poll = object()  # one question waits for each user: an older one is answered
        one.gone = gone
        await one.tell()
        try:
            async with asyncio.timeout(said.wait_s), one.changed:
                await one.changed.wait_for(lambda: one.poll is not mine or bool(one.due()))
        except TimeoutError:
            pass
        finally:
            last = one.poll is mine
            if last:
                one.poll, one.seen_s = None, time.monotonic()
        return one.due(take=True) if last and not gone() else []

    async def still(self, uid: int, asked: Still) -> dict[str, Any]:
        """Whether the attempts of which this user's `holdfast accept` has orders still go on."""
        store = self._runs.store()
        found = {one.run: judged(one, uid, store, Local(
            self._node, self._runs.is_served(one.run))) for one in asked.runs}
        witnesses = sorted({one.witness for one in found.values()} - {""})
        places = asyncio.Semaphore(ASKED_AT_ONCE)
        said = dict(zip(witnesses, await asyncio.gather(*(
            self._status_of(name, places) for name in witnesses)), strict=True))
        rows = {}
        for run, one in found.items():
            if one.witness:
                try:
                    one = confirmed(one, run, uid, said[one.witness])
                except (LookupError, TypeError, ValueError, AttributeError):
                    one = confirmed(one, run, uid, None)  # of another release, perhaps
            rows[run] = {"state": one.state, "attempt": one.attempt, "text": one.text}
        return {"node": self._node, "runs": rows}

    async def _status_of(self, name: str, places: asyncio.Semaphore) -> dict[str, Any] | None:
        if self._peers is None:
            return None
        try:
            async with places:
                return await self._peers.ask(name, {"what": "status"}, WITNESS_S)
        except (ConnectionError, LookupError, TypeError, ValueError):
            return None

    def _forget(self) -> None:
        for uid in [uid for uid, one in self._users.items() if not one.is_here()]:
            if len(self._users) > USERS_MAX:
                del self._users[uid]

    def _write(self, verb: str, id: str, run: str, by: str) -> None:
        self._runs.record(Request(id, verb, run_subject(run), f"asked for by {by}", run=run, by=by))

    # ------------------------------------------------------------- on this node

    async def _start(self, uid: int, order: Order) -> Launched:
        one = self._accepting(uid)
        known = one.of(order.run)
        # An order that is only kept there gives way: nothing of it runs.
        if self._runs.owner(order.run) is not None or known is not None and (
                known.state == RUNNING or known.id in one.pending):
            raise Refusal(f"run {order.run} goes on here already")
        going_on = sum(each.state == RUNNING for each in one.launched.values())
        if going_on >= RUNS_MAX or len(one.pending) >= PENDING_MAX:
            raise Refusal(f"{going_on} runs of {user_name(uid)} go on here, and "
                          f"{len(one.pending)} are beginning: no more are taken")
        order.id = f"start-{uuid.uuid4().hex[:12]}"
        one.pending[order.id] = Pending(order)
        await one.tell()
        return Launched(order.id, order.run, QUEUED)

    async def _end(self, uid: int, run: str, by: str) -> Launched:
        one = self._users.get(uid)
        found = one.of(run) if one is not None and one.is_here() else None
        if one is not None and found is not None and found.state in (QUEUED, RUNNING):
            if found.id in one.pending:
                one.withdraw(found.id)
            else:
                one.ends.setdefault(found.id, -math.inf)
                await one.tell()
            self._write(END, f"end-{uuid.uuid4().hex[:12]}", run, by)
            return Launched(found.id, run, RUNNING, text=found.text)
        if self._runs.owner(run) == uid:  # started otherwise, or its `holdfast accept` has gone
            asked = Request(f"end-{uuid.uuid4().hex[:12]}", DRAIN, run_subject(run),
                            f"`holdfast end` of {by}", run=run, by=by)
            if not self._runs.request(asked):
                raise Refusal("too many requests wait already: ask again")
            return Launched(asked.id, run, RUNNING)
        if found is None:
            if self._is_anothers(uid, run):
                self._runs.refused(uid, f"{END} a run", "another user's run", run)
            raise Refusal(f"{NOT_HERE} {run} of {user_name(uid)} is here")
        return found

    def _is_anothers(self, uid: int, run: str) -> bool:
        """Whether somebody else's run of this name goes on here, or is about to begin."""
        if self._runs.owner(run) not in (None, uid):
            return True
        found = (one.of(run) for other, one in self._users.items() if other != uid)
        return any(one is not None and one.state in (QUEUED, RUNNING) for one in found)

    def _look(self, uid: int, run: str) -> Launched:
        found = self._accepting(uid).of(run)
        if found is None:
            raise Refusal(f"{NOT_HERE} {run} was started here from another node")
        return found

    def _accepting(self, uid: int) -> Accepting:
        one = self._users.get(uid)
        if one is None or not one.is_here():
            name = user_name(uid)
            unit = "" if name.startswith("uid ") else (
                f"`systemctl enable --now holdfast-accept@{name}`, or ")
            raise Refusal(f"nobody accepts runs of {name} there: {unit}`holdfast accept` as "
                          f"{name}, on {self._node}")
        return one

    async def _here(
        self, verb: str, uid: int, run: str, order: Order | None, by: str
    ) -> dict[str, Any]:
        try:
            if verb == START and order is not None:
                return _told(await self._start(uid, order))
            return _told(await self._end(uid, run, by) if verb == END else self._look(uid, run))
        except Refusal as refusal:
            return {"state": REFUSED, "code": 0, "text": str(refusal)}

    # ------------------------------------------------------------- between agents

    async def asked(self, node: str, question: dict[str, Any]) -> dict[str, Any]:
        """Another agent's question.  LookupError, TypeError or ValueError for what is none."""
        verb, uid = str(question["verb"]), msgspec.convert(question["uid"], type=int)
        run = msgspec.convert(question["run"], type=Run)
        order = question.get("order")
        made = msgspec.convert(order, type=Order) if order is not None else None
        name, here = str(question["user"])[:64], user_name(uid)  # held equal: it is printed
        if name != here:  # two nodes that do not share their users
            return {"answer": {"state": REFUSED, "code": 0, "text": (
                f"uid {uid} is {name} on {node}, and {here} on {self._node}")}}
        if verb not in (START, END, LOOK) or (verb == START) != (made is not None):
            raise ValueError(f"{verb[:40]!r} is nothing that is done with a run")
        by = f"{name} (uid {uid}) at {node}"
        if made is not None:
            made.by = by
        return {"answer": await self._here(verb, uid, run, made, by)}

    async def everywhere(self, verb: str, uid: int, asked: Asked) -> dict[str, dict[str, Any]]:
        """What each node answers to this user: state, code and text by node.  Raises Refusal where
        there is nobody to ask."""
        names = self._named(asked.nodes, own=verb != START)
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(name: str) -> dict[str, Any]:
            async with places:
                return await self._one(name, verb, uid, asked.run, asked.order)

        answers = await asyncio.gather(*(one(name) for name in names))
        return dict(zip(names, answers, strict=True))

    def _named(self, nodes: Sequence[str], own: bool) -> list[str]:
        """`own`: this node counts as well; where a run is started its launcher is the command's."""
        if self._peers is None and own:
            return [self._node]
        if self._peers is None:
            raise Refusal(f"the agent of {self._node} is in touch with no other node: set [store] "
                          "on all of them (docs/cluster.md), or give the command to each node by "
                          "srun or ssh")
        found = dict.fromkeys(nodes)
        if ALL in found:
            found = dict.fromkeys(sorted({*self._peers.others(), self._node}))
        return [name for name in found if own or name != self._node]

    async def _one(
        self, name: str, verb: str, uid: int, run: str, order: Order | None
    ) -> dict[str, Any]:
        if name == self._node:
            by = f"{user_name(uid)} (uid {uid}) at {name}"
            return await self._here(verb, uid, run, order, by)
        assert self._peers is not None
        question: dict[str, Any] = {"what": STARTS, "verb": verb, "uid": uid, "run": run,
                                    "user": user_name(uid)}
        if order is not None:
            question["order"] = msgspec.to_builtins(order)
        try:
            said = await self._peers.ask(name, question, ANSWER_S)
            found = msgspec.convert(said["answer"], type=dict[str, Any])
            return {"state": str(found["state"]), "code": int(found["code"]),
                    "text": str(found["text"])[:500]}
        except (ConnectionError, LookupError, TypeError, ValueError) as error:
            return {"state": "", "code": 0, "text": f"its agent does not answer: {error}"}


def _told(one: Launched) -> dict[str, Any]:
    return {"state": one.state, "code": one.code, "text": one.text}
