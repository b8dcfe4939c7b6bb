"""Runs that a user starts on this node from another one: from the agents to `holdfast accept`.

Owns who accepts runs here, the orders that wait for them, and what became of each launcher.  Starts
no process itself: the user's own `holdfast accept` does, so that no right is given to an agent.
Who asks is known by uid: the kernel's word on the node where the command was typed, the cluster
token's between the agents.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from holdfast.worker.peers import user_name

from ..core.actions import DRAIN
from ..core.model import Request, run_subject

STARTS = "starts"  # what agents ask one another
START, END, LOOK = "start", "end", "look"
RUNNING, REFUSED = "running", "refused"
ALL = "all"
AWAY_S = 5.0  # between two questions of one `holdfast accept`, and it still counts as there
BEGINS_S, ANSWER_S = 10.0, 14.0  # for a launcher to begin; for another node's agent to say so
RUNS_MAX, ORDERS_MAX, NODES_MAX = 64, 16, 2048
ARGUMENTS_MAX, ENVIRONMENT_MAX = 64 << 10, 64 << 10  # bytes
WORD_MAX = 32 << 10
USERS_MAX = 256

Text = Annotated[str, Meta(max_length=WORD_MAX)]
Short = Annotated[str, Meta(max_length=500)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Run = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,48}$")]


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
    """A launcher that `holdfast accept` started, or did not."""

    id: Annotated[str, Meta(max_length=64)]
    run: Run
    state: Literal["running", "ended", "refused"]
    code: int = 0
    text: Short = ""


class Waiting(msgspec.Struct, forbid_unknown_fields=True):
    """What `holdfast accept` says when it asks for orders: who it is, and all that it started."""

    life: Annotated[str, Meta(min_length=8, max_length=64)]
    wait_s: Annotated[float, Meta(ge=0.0, le=30.0)] = 0.0
    runs: Annotated[list[Launched], Meta(max_length=RUNS_MAX)] = []


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What a user's command asks for: on these nodes."""

    nodes: Annotated[list[Name], Meta(min_length=1, max_length=NODES_MAX)]
    run: Run
    order: Order | None = None


class Refusal(Exception):
    """It is not done, and nothing has happened; the text says why and what to do."""


class Accepting:
    """One user's `holdfast accept` on this node."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.asks = 0  # questions of it that wait for an order
        self.seen_s = time.monotonic()
        self.orders: deque[dict[str, Any]] = deque()
        self.launched: dict[str, Launched] = {}
        self.changed = asyncio.Condition()

    def is_here(self) -> bool:
        return self.asks > 0 or time.monotonic() - self.seen_s < AWAY_S

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Nodes(Protocol):
    """The other nodes' agents (agent/peers/beats.py)."""

    def others(self) -> tuple[str, ...]: ...

    async def ask(self, name: str, question: Any, limit_s: float) -> dict[str, Any]: ...


class Runs(NamedTuple):
    """What this part needs of the agent's own: whose launcher of a run is here (None: nobody's),
    the core's queue of requests, False where it is full, and the journal."""

    owner: Callable[[str], int | None]
    request: Callable[[Request], bool]
    record: Callable[[Request], None]


class Starts:
    """One agent's part, as the node where a run is started from and as one of those that run it."""

    def __init__(self, node: str, peers: Nodes | None, runs: Runs) -> None:
        self._node, self._peers, self._runs = node, peers, runs
        self._users: OrderedDict[int, Accepting] = OrderedDict()
    # ------------------------------------------------------------- `holdfast accept`

    async def orders(self, uid: int, said: Waiting) -> list[dict[str, Any]]:
        """What this user's `holdfast accept` is to do next, within its wait.  Raises Refusal where
        another one of the same user is here."""
        one = self._users.get(uid)
        if one is not None and one.life != said.life and one.is_here():
            raise Refusal(f"another `holdfast accept` of {user_name(uid)} runs on {self._node}")
        if one is None or one.life != said.life:
            one = self._users[uid] = Accepting(said.life)
            self._forget()
        self._users.move_to_end(uid)
        one.seen_s = time.monotonic()
        one.launched = {each.id: each for each in said.runs}
        await one.tell()
        if not said.wait_s:
            return []
        one.asks += 1
        try:
            async with asyncio.timeout(said.wait_s), one.changed:
                await one.changed.wait_for(lambda: bool(one.orders))
        except TimeoutError:
            pass
        finally:
            one.asks -= 1
            one.seen_s = time.monotonic()
        found = list(one.orders)
        one.orders.clear()
        return found

    def _forget(self) -> None:
        for uid in [uid for uid, one in self._users.items() if not one.is_here()]:
            if len(self._users) > USERS_MAX:
                del self._users[uid]

    # ------------------------------------------------------------- on this node

    async def _start(self, uid: int, order: Order) -> dict[str, Any]:
        one = self._accepting(uid)
        going_on = [each for each in one.launched.values() if each.state == RUNNING]
        if any(each.run == order.run for each in going_on):
            raise Refusal(f"run {order.run} goes on here already")
        if len(going_on) >= RUNS_MAX or len(one.orders) >= ORDERS_MAX:
            raise Refusal(f"{len(going_on)} runs of {user_name(uid)} go on here: no more are taken")
        order.id = f"start-{uuid.uuid4().hex[:12]}"
        why = f"asked for by {order.by}"
        self._runs.record(Request(
            order.id, START, run_subject(order.run), why, run=order.run, by=order.by))
        one.orders.append({"do": START, **msgspec.to_builtins(order)})
        await one.tell()
        try:
            async with asyncio.timeout(BEGINS_S), one.changed:
                await one.changed.wait_for(lambda: order.id in one.launched)
        except TimeoutError:
            # What was not fetched must not begin when nobody expects it any more.
            one.orders = deque(each for each in one.orders if each.get("id") != order.id)
            raise Refusal(f"`holdfast accept` of {user_name(uid)} did not say within "
                          f"{BEGINS_S:g} s that it began") from None
        return _told(one.launched[order.id])

    async def _end(self, uid: int, run: str) -> dict[str, Any]:
        one = self._users.get(uid)
        found = _of(one, run) if one is not None and one.is_here() else None
        if one is not None and found is not None and found.state == RUNNING:
            one.orders.append({"do": END, "id": found.id})
            await one.tell()
            return _told(found)
        if self._runs.owner(run) == uid:  # started otherwise, or its `holdfast accept` has gone
            asked = Request(f"end-{uuid.uuid4().hex[:12]}", DRAIN, run_subject(run),
                            "`holdfast end`", run=run, by=f"{user_name(uid)} (uid {uid})")
            if not self._runs.request(asked):
                raise Refusal("too many requests wait already: ask again")
            return {"state": RUNNING, "code": 0, "text": ""}
        if found is None:
            raise Refusal(f"no run {run} of {user_name(uid)} is here")
        return _told(found)

    def _look(self, uid: int, run: str) -> dict[str, Any]:
        found = _of(self._accepting(uid), run)
        if found is None:
            raise Refusal(f"no run {run} was started here from another node")
        return _told(found)

    def _accepting(self, uid: int) -> Accepting:
        one = self._users.get(uid)
        if one is None or not one.is_here():
            name = user_name(uid)
            raise Refusal(f"nobody accepts runs of {name} there: `systemctl enable --now "
                          f"holdfast-accept@{name}`, or `holdfast accept` as {name}, on "
                          f"{self._node}")
        return one

    async def _here(
        self, verb: str, uid: int, run: str, order: Order | None
    ) -> dict[str, Any]:
        try:
            if verb == START and order is not None:
                return await self._start(uid, order)
            return await self._end(uid, run) if verb == END else self._look(uid, run)
        except Refusal as refusal:
            return {"state": REFUSED, "code": 0, "text": str(refusal)}

    # ------------------------------------------------------------- between agents

    async def asked(self, node: str, question: dict[str, Any]) -> dict[str, Any]:
        """Another agent's question.  LookupError, TypeError or ValueError for what is none."""
        verb, uid = str(question["verb"]), msgspec.convert(question["uid"], type=int)
        run = msgspec.convert(question["run"], type=Run)
        order = question.get("order")
        made = msgspec.convert(order, type=Order) if order is not None else None
        name, here = str(question["user"])[:64], user_name(uid)
        if name != here:  # two nodes that do not share their users
            return {"answer": {"state": REFUSED, "code": 0, "text": (
                f"uid {uid} is {name} on {node}, and {here} on {self._node}")}}
        if verb not in (START, END, LOOK) or (verb == START) != (made is not None):
            raise ValueError(f"{verb[:40]!r} is nothing that is done with a run")
        if made is not None:
            made.by = f"{made.by[:300]} at {node}"
        return {"answer": await self._here(verb, uid, run, made)}

    async def everywhere(self, verb: str, uid: int, asked: Asked) -> dict[str, dict[str, Any]]:
        """What each node answers to this user: state, code and text by node.  Raises Refusal where
        there is nobody to ask."""
        names = self._named(asked.nodes, own=verb != START)
        order = asked.order
        if order is not None:
            order.by = f"{user_name(uid)} (uid {uid})"
        answers = await asyncio.gather(*(
            self._one(name, verb, uid, asked.run, order) for name in names))
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
            return await self._here(verb, uid, run, order)
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


def _of(one: Accepting, run: str) -> Launched | None:
    """The newest launcher of this run."""
    found = [each for each in one.launched.values() if each.run == run]
    return found[-1] if found else None


def _told(one: Launched) -> dict[str, Any]:
    return {"state": one.state, "code": one.code, "text": one.text}
