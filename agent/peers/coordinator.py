"""Carries the tests of a pre-flight to the peers and their outcomes back, one node for all.

Owns who has come, who is awaited and for how long, and what a test between several nodes came to.
Which tests are made, and what follows from them, is said by agent/core/checks/preflight.py.  Every
wait has a deadline; whoever goes away in the middle is named and holds nobody up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..core.checks import preflight
from ..core.checks.preflight import COMPUTE, PAIR, REACH, Member, Outcome, Report, Trial
from . import transport
from .hosts import Peer
from .tester import GRACE_S, START_S
from .transport import Channel, Refused, Still

PENDING_MAX = 256  # connections that have proven nothing yet
COMPUTE_DEADLINE_S = 60.0
REACH_S = 2.0


class Plan(NamedTuple):
    """What is asked for.  `exchange_s`: the deadline of a test between nodes; `bytes`: its size, 0
    for the usual one; `ready_s`: until who came has torch; `groups`: all together at last;
    `candidates`: how many of the first may coordinate."""

    peers: Sequence[Peer]
    token: bytes
    port: int
    join_s: float
    exchange_s: float
    bytes: int = 0
    group_size: int = 0
    rails: bool = False
    usual: Callable[[str], float] = lambda model: 0.0  # of a pair of such nodes; 0: not known
    ready_s: float = START_S + GRACE_S
    groups: bool = True
    candidates: int = 2


class Seat:
    """A peer that came."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.member: Member | None = None
        self.ready = asyncio.Event()
        self.gone = ""
        self.still = False  # it is gone because it says nothing, while its connection stands
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}

    async def listen(self, name: str) -> None:
        """Until it goes away."""
        beating = asyncio.create_task(self.channel.beat())
        try:
            while True:
                message = await self.channel.take()
                if "member" in message:
                    found = msgspec.convert(message["member"], Member)
                    self.member = msgspec.structs.replace(found, name=name)
                    self.ready.set()
                elif (answers := self._answers.get(message.get("test", 0))) is not None:
                    answers.put_nowait(message)
        except Still as error:
            self.gone, self.still = f"{name} came, and stands still: {error}", True
        except (EOFError, OSError, ValueError, msgspec.ValidationError) as error:
            self.gone = f"{name} left in the middle: {error}"
        finally:
            beating.cancel()
            self.ready.set()
            for answers in self._answers.values():
                answers.put_nowait(self.loss())

    def loss(self) -> dict[str, Any]:
        return {"gone": self.gone, "still": self.still}

    async def ask(self, number: int, command: dict[str, Any]) -> None:
        self._answers[number] = asyncio.Queue()
        if self.gone:
            self._answers[number].put_nowait(self.loss())
            return
        try:
            await self.channel.send({"test": number, **command})
        except OSError as error:
            self._answers[number].put_nowait({"problem": str(error)})

    async def answer(self, number: int) -> dict[str, Any]:
        return await self._answers[number].get()

    def done(self, number: int) -> None:
        self._answers.pop(number, None)


class Coordinator:
    """`tell` gets a sentence now and then, for people who wait."""

    def __init__(self, plan: Plan, address: str, tell: Callable[[str], None]) -> None:
        self._plan, self._address, self._tell = plan, address, tell
        self._seats: dict[str, Seat] = {}
        self._refused: dict[str, str] = {}
        self._came = asyncio.Event()
        self._begun = False
        self._pending = self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.took_s = 0.0  # of the tests, without waiting for peers

    async def run(self) -> Report:
        """Raises OSError where it cannot listen at this node's address."""
        server = await asyncio.start_server(
            self._take, self._address, self._plan.port, limit=transport.PART_MAX)
        try:
            await self._gather()
            begin_s = time.monotonic()
            report = await self._drive()
            self.took_s = time.monotonic() - begin_s
            for seat in self._seats.values():
                if not seat.gone:
                    try:
                        await seat.channel.send({"report": msgspec.to_builtins(report),
                                                 "took_s": self.took_s})
                    except OSError:
                        continue  # its own loss: the report says what was found of it
        finally:
            server.close()
        for seat in self._seats.values():
            seat.channel.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GRACE_S)
        return report

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its end."""
        if self._pending >= PENDING_MAX:
            writer.close()
            return
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        self._pending += 1
        origin = writer.get_extra_info("peername")[0]
        try:
            channel = await transport.accept(reader, writer, self._plan.token)
        except Refused as refused:
            name = next((one.name for one in self._plan.peers if one.address == origin), origin)
            self._refused[name] = str(refused)
            self._tell(f"{origin}: {refused}")
            writer.close()
            return
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError):
            writer.close()
            return
        finally:
            self._pending -= 1
        try:
            await self._seated(channel)
        except OSError:
            channel.close()  # gone before it heard that it is refused

    async def _seated(self, channel: Channel) -> None:
        name = channel.peer
        known = name in {one.name for one in self._plan.peers}
        why = "" if known else f"{name} is none of the peers here: give every node the same list"
        if known and self._begun:
            why = f"too late: the tests began without {name}"
        elif known and name in self._seats and not self._seats[name].gone:
            why = f"{name} is here already: is the command started twice on one node?"
        if why:
            await channel.send({"refused": why})
            channel.close()
            return
        seat = self._seats[name] = Seat(channel)
        self._came.set()
        await seat.listen(name)
        self._came.set()

    async def _gather(self) -> None:
        """Until all are ready, or the wait is over."""
        names = [one.name for one in self._plan.peers]
        limit_s = time.monotonic() + self._plan.join_s

        def missing() -> list[str]:
            return [name for name in names if name not in self._seats or self._seats[name].gone]

        while missing() and (rest_s := limit_s - time.monotonic()) > 0:
            self._came.clear()
            try:
                async with asyncio.timeout(rest_s):
                    await self._came.wait()
            except TimeoutError:
                break
        self._begun = True
        here = [self._seats[name] for name in names if name in self._seats]
        try:
            async with asyncio.timeout(self._plan.ready_s):
                for seat in here:
                    await seat.ready.wait()
        except TimeoutError:
            pass  # named below, each by itself
        if missing():
            self._tell(f"{', '.join(missing())}: not here within {self._plan.join_s:g} s")

    async def _drive(self) -> Report:
        names = [one.name for one in self._plan.peers]
        members, absent = [], {}
        still: set[str] = set()
        for name in names:
            seat = self._seats.get(name)
            if seat is not None and seat.member is not None and not seat.gone:
                members.append(seat.member)
            elif name in self._refused:
                absent[name] = f"it did not come: {self._refused[name]}"
            elif seat is None:
                absent[name] = f"it did not come within {self._plan.join_s:g} s"
            else:
                absent[name] = seat.gone or "it came, and was not ready in time"
                still.update({name} if seat.still else ())
        coordinator = next(one.name for one in self._plan.peers if one.address == self._address)
        models = {one.model for one in members if not one.error}
        expected_rate = self._plan.usual(models.pop()) if len(models) == 1 else 0.0
        steps = preflight.preflight(names, members, absent, self._plan.group_size, coordinator,
                                    still, expected_rate, self._plan.rails, self._plan.groups)
        outcomes: list[Outcome] | None = None
        while True:
            try:
                tests = steps.send(outcomes)  # type: ignore[arg-type]
            except StopIteration as ended:
                report: Report = ended.value
                return report
            outcomes = list(await asyncio.gather(*(self._test(test) for test in tests)))

    # --------------------------------------------------------------------------------- one test

    async def _test(self, test: Trial) -> Outcome:
        self._number += 1
        number = self._number
        nodes = test.nodes[:1] if test.kind == REACH else test.nodes
        for name in nodes:
            if self._seats[name].gone:
                return _not_run(test, name, self._seats[name].loss())
        try:
            if test.kind == REACH:
                return await self._reach(test, number)
            if test.kind == COMPUTE:
                return await self._compute(test, number)
            return await self._exchange(test, number)
        finally:
            for name in nodes:
                self._seats[name].done(number)

    async def _asked(self, name: str, number: int, wait_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(wait_s):
                return await self._seats[name].answer(number)
        except TimeoutError:
            return {"problem": f"{name} says nothing"}

    async def _compute(self, test: Trial, number: int) -> Outcome:
        (name,) = test.nodes
        await self._seats[name].ask(number, {
            "do": COMPUTE, "threads": test.threads, "seconds": test.seconds,
            "deadline_s": COMPUTE_DEADLINE_S})
        answer = await self._asked(name, number, COMPUTE_DEADLINE_S + 2 * GRACE_S)
        if answer.get("gone") or answer.get("problem"):
            return _not_run(test, name, answer)
        found = answer["answer"]
        return Outcome(test, not found["wrong"], found["rate"], "; ".join(found["wrong"]))

    async def _reach(self, test: Trial, number: int) -> Outcome:
        witness, name = test.nodes
        address = next(one.address for one in self._plan.peers if one.name == name)
        await self._seats[witness].ask(number, {"do": REACH, "address": address,
                                                "port": self._plan.port, "deadline_s": REACH_S})
        answer = await self._asked(witness, number, REACH_S + GRACE_S)
        if answer.get("gone") or "reached" not in answer:
            return _not_run(test, witness, answer)
        return Outcome(test, bool(answer["reached"]))

    async def _exchange(self, test: Trial, number: int) -> Outcome:
        """The first node serves the group's store; the others are told where."""
        addresses = {one.name: one.address for one in self._plan.peers}
        wait_s = self._plan.exchange_s + 2 * GRACE_S
        first, *others = test.nodes

        async def ask(rank: int, name: str, store: list[Any] | None) -> None:
            await self._seats[name].ask(number, {
                "do": "exchange", "rank": rank, "n": len(test.nodes), "pair": test.kind == PAIR,
                "ranks": test.ranks, "rail": test.rail,
                "address": addresses[name], "store": store, "bytes": self._plan.bytes,
                "deadline_s": self._plan.exchange_s})

        await ask(0, first, None)
        answers: dict[str, dict[str, Any]] = {}
        answer = await self._asked(first, number, wait_s)
        if "port" not in answer:
            answers[first] = answer
        else:
            await asyncio.gather(*(ask(rank, name, [addresses[first], answer["port"]])
                                   for rank, name in enumerate(others, 1)))
            got = await asyncio.gather(*(self._asked(name, number, wait_s)
                                         for name in test.nodes))
            answers = dict(zip(test.nodes, got))
        return _together(test, answers, self._plan.exchange_s)


def _together(test: Trial, answers: dict[str, dict[str, Any]], wait_s: float) -> Outcome:
    """What the sides of one test make of it."""
    gone = next((name for name, answer in answers.items() if answer.get("gone")), "")
    if gone:
        return _not_run(test, gone, answers[gone])
    problems = [f"{name}: {shortened(answer['problem'], wait_s)}"
                for name, answer in answers.items() if answer.get("problem")]
    wrong = [f"{name}: {', '.join(answer['answer']['wrong'])} gave wrong results"
             for name, answer in answers.items() if answer.get("answer", {}).get("wrong")]
    if problems or wrong:
        return Outcome(test, False, error="; ".join(wrong + problems)[:600])
    found = [answer["answer"] for answer in answers.values()]
    rate = min(one["rate"] for one in found) if test.kind == PAIR else found[0]["rate"]
    return Outcome(test, True, rate, table=tuple(found[0].get("table", ())),
                   bytes=int(found[0].get("bytes", 0)),
                   rates=tuple(sorted(found[0].get("rates", {}).items())))


def shortened(problem: str, wait_s: float) -> str:
    """What a backend says of its sockets, as one reads it in a table."""
    words = problem.lower()
    if "timed out" in words or "timeout" in words or words.startswith("no answer within"):
        return f"no answer from the other side within {wait_s:g} s"
    if "closed by peer" in words or "reset by peer" in words:
        return "the other side closed the connection"
    if "no route to host" in words:
        return "no route to the other side"
    return " ".join(re.sub(r"\[/[^]]*\]", "", problem).split())[:160]


def _not_run(test: Trial, name: str, answer: dict[str, Any]) -> Outcome:
    why = answer.get("gone") or f"{name}: {answer.get('problem') or 'no answer'}"
    return Outcome(test, False, error=why, ran=False, gone=name if answer.get("gone") else "",
                   still=bool(answer.get("still")))
