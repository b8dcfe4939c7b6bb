"""What agents tell one another while runs go on: pings, beats, where stores are; and questions.

Owns one connection to each other agent, on which this one speaks, and the server on which it
listens.  What is said are levels: the newest counts, and a lost message costs nothing but time.
A question has a connection of its own, so that its answer holds up no ping.
What a beat means is the core's, who is lost failure_detector.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from ..core.model import Beat
from . import transport
from .choice import LINES_MAX, Choice, choice
from .failure_detector import FailureDetector
from .kernel_questions import KernelQuestions

PING_S = 0.1
SEND_S = 2.0  # who takes nothing for this long is connected anew
RETRY_S = 0.3
WAITING_MAX = 4096  # connections that it has yet to take; the kernel may allow fewer
INCOMING_MAX = 2 * LINES_MAX  # those that have proven nothing among them
BEATS_MAX = 4 * LINES_MAX
GONE_S = 600.0  # a node that was not heard of for so long, and is nowhere any more, is forgotten
NOTHING_LEFT = (
    "a silent node cannot be asked whether it lives: this machine has no descriptor, port or "
    "memory left for it. Until it has, a dead node is noticed by its lease, or by the others")
ASKING_MAX, ANSWERING_MAX = 32, 16  # questions at a time, our own and the others'
ANSWER_MAX = 2 << 20  # of one answer
PINGS_KEPT = 64  # whose answers may still come
SLOW_LEASES = 0.2  # of a lease between two beats without news
BACK_LEASES = 2.0  # a new agent has its node's launchers again by then, or its node is lost by age


class Address(NamedTuple):
    host: str
    port: int


class Endpoint(msgspec.Struct, frozen=True):
    """Where the store of a run's generation is."""

    run: str
    generation: int
    host: str
    port: int


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message's content, beside the ping's."""

    beats: tuple[Beat, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    known: tuple[tuple[str, int], ...] = ()  # run -> generation of the newest document it knows


class Listener(Protocol):
    """What the agent does with what others say."""

    def beats_came(self, told: Told, is_news: bool) -> None: ...

    def nodes_lost(self, nodes: frozenset[str]) -> None: ...

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        """The answer to any JSON value that a node asks with."""


def news_of(told: Told) -> tuple[object, ...]:
    """What others must know at once; steps and times move by themselves."""
    return (told.endpoints, told.known, *(
        (one.run, one.generation, one.fatal, one.held, one.shutdown, len(one.commits),
         *((rank.rank, rank.state, rank.generation) for rank in one.ranks))
        for one in told.beats))


class Line:
    """This node's connection to one other, kept up for as long as the other is known."""

    def __init__(self, peers: Peers, name: str, address: Address) -> None:
        self.peers, self.name, self.address = peers, name, address
        self.wake = asyncio.Event()
        self.number = 0
        self.sent: deque[tuple[int, float]] = deque(maxlen=PINGS_KEPT)
        self.heard_number = 0  # of the other's last ping
        self.acked_boot_s = 0.0  # when the newest ping left that the other has heard
        self.is_up = False
        self.problem = ""
        self.refusal = ""  # why its release is not spoken with
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._talk()
            except (OSError, TimeoutError, EOFError, ValueError, transport.Refused) as error:
                self.problem = str(error) or type(error).__name__
                if isinstance(error, transport.TooFar):
                    self.refusal = f"{self.name} {error}"
                    self.peers.on_error("peers", self.refusal)
            self.is_up = False
            await asyncio.sleep(RETRY_S)

    async def _talk(self) -> None:
        peers = self.peers
        async with asyncio.timeout(SEND_S):
            channel = await transport.connect(
                self.address.host, self.address.port, peers.token, peers.name)
        try:
            channel.patience(SEND_S)
            self.is_up, self.problem, self.refusal = True, "", ""
            told_at_s, number = -1e9, -1
            while True:
                now_s = time.monotonic()
                is_news = number != peers.news_number
                message = self._ping()
                if is_news or now_s - told_at_s > SLOW_LEASES * peers.lease_s():
                    number, told_at_s = peers.news_number, now_s
                    message["told"] = msgspec.json.encode(peers.told).decode()
                    message["news"] = is_news
                async with asyncio.timeout(SEND_S):
                    await channel.send(message)
                self.wake.clear()
                # wait_for of Python 3.11 forgets that it was cancelled where it was just woken.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(peers.ping_s()):
                        await self.wake.wait()
        finally:
            channel.close()

    def _ping(self) -> dict[str, Any]:
        self.number += 1
        self.sent.append((self.number, time.clock_gettime(time.CLOCK_BOOTTIME)))
        return {"n": self.number, "ack": self.heard_number, "from": self.peers.instance,
                "to": self.peers.instances.get(self.name, ""),
                "silent": self.peers.detector.unreachable()}

    def acked(self, number: int) -> None:
        for sent, boot_s in self.sent:
            if sent == number:
                self.acked_boot_s = max(self.acked_boot_s, boot_s)


class Peers:
    """All other agents."""

    def __init__(
        self, name: str, instance: str, listener: Listener, lease_s: Callable[[], float],
        on_error: Callable[[str, BaseException | str], None],
    ) -> None:
        self.name, self.instance, self.listener = name, instance, listener
        self.lease_s, self.on_error = lease_s, on_error
        self.token = b""
        self.detector = FailureDetector()
        self.told = Told()
        self.news_number = 0
        self.instances: dict[str, str] = {}  # of the others, as they said last
        self.addresses: dict[str, Address] = {}  # of all others
        self.lines: dict[str, Line] = {}  # to those that this one keeps in touch with
        self.choice = Choice(frozenset())
        self._news: tuple[object, ...] = ()
        self._beats: dict[tuple[str, str], Beat] = {}
        self._known: dict[str, dict[str, int]] = {}  # node -> run -> generation
        self._spoken: dict[str, tuple[str, frozenset[str]]] = {}  # node -> life, runs told of last
        self._lost: frozenset[str] = frozenset()
        self._server: asyncio.Server | None = None
        self._incoming: set[asyncio.Task[None]] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._questions = KernelQuestions()
        self._asking = asyncio.Semaphore(ASKING_MAX)
        self._answering = 0

    # ------------------------------------------------------------- life

    async def listen(self, host: str, port: int) -> int:
        """Serves the others; the port, which is another where the wanted one is taken."""
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, limit=transport.PART_MAX, backlog=WAITING_MAX)
        except OSError:
            if not port:
                raise
            self._server = await asyncio.start_server(
                self._accept, host, 0, limit=transport.PART_MAX, backlog=WAITING_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._incoming) >= INCOMING_MAX:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._incoming.add(task)
        task.add_done_callback(self._incoming.discard)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [line.task for line in self.lines.values()]
        tasks += [*self._incoming, *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lines.clear()

    def know(
        self, addresses: Mapping[str, Address], mates: Collection[str] = frozenset()
    ) -> None:
        """Where the others are now, as the store says, and which of them share a run with this one.
        """
        self.addresses = {name: one for name, one in addresses.items() if name != self.name}
        self.choice = choice(self.name, self.addresses, mates)
        for name, line in list(self.lines.items()):
            if name not in self.choice.wanted or self.addresses[name] != line.address:
                line.task.cancel()
                del self.lines[name]
        for name in self.choice.wanted:
            if name not in self.lines:
                self.lines[name] = Line(self, name, self.addresses[name])
        self.detector.watch(self.lines)
        self._questions.keep(self.lines)
        old_s = time.clock_gettime(time.CLOCK_BOOTTIME) - GONE_S
        for key, beat in list(self._beats.items()):
            if key[0] not in self.addresses and beat.boot_s < old_s:
                del self._beats[key]
                for kept in (self._known, self.instances, self._spoken):
                    kept.pop(key[0], None)

    def ping_s(self) -> float:
        """Among many, each is pinged less often: what one node sends stays bounded."""
        return PING_S * max(1.0, len(self.lines) / 16)

    def tick(self) -> None:
        """To be called each `ping_s`; asks the kernels of those that are silent."""
        for name in self.detector.tick():
            if name in self.lines and name not in self._probes:
                task = asyncio.get_running_loop().create_task(self._probe(name))
                self._probes[name] = task
        self._judge()

    def long_silent(self) -> list[str]:
        """Nodes without a word for GONE_S of this observer's own ticks."""
        ticks = GONE_S / self.ping_s()
        return [name for name, peer in self.detector.peers.items() if peer.missed > ticks]

    def hosts_lost(self) -> set[str]:
        """Where the nodes are that are lost now."""
        return {line.address.host for name, line in self.lines.items() if name in self._lost}

    def _judge(self) -> None:
        lost = self.detector.lost()
        if lost != self._lost:
            new, self._lost = lost - self._lost, lost
            self.listener.nodes_lost(new)

    # ------------------------------------------------------------- speaking

    def tell(self, told: Told) -> None:
        """What the others are to know; at once where it is news."""
        self.told = told
        news = news_of(told)
        if news != self._news:
            self._news = news
            self.news_number += 1
            for line in self.lines.values():
                line.wake.set()

    # ------------------------------------------------------------- asking

    def others(self) -> tuple[str, ...]:
        """The nodes that are known and not lost."""
        return tuple(name for name in self.addresses if name not in self._lost)

    def refused(self) -> dict[str, str]:
        """The nodes whose release is too far from this one, and why."""
        return {name: line.refusal for name, line in self.lines.items() if line.refusal}

    def out_of_touch(self) -> int:
        """How many nodes of the cluster it keeps no connection to."""
        return self.choice.left_out + self.choice.missing

    async def ask(self, name: str, question: Any, limit_s: float) -> dict[str, Any]:
        """Another agent's answer.  ConnectionError with the reason why there is none."""
        address = self.addresses.get(name)
        if address is None or name in self._lost:
            raise ConnectionError("it is lost" if address else "it is not known here")
        channel: transport.Channel | None = None
        try:
            async with self._asking, asyncio.timeout(limit_s):
                channel = await transport.connect(
                    address.host, address.port, self.token, self.name)
                await channel.send({"ask": question})
                answer = await channel.take()
        except TimeoutError as error:
            raise ConnectionError(f"it did not answer within {limit_s:g} s") from error
        except (OSError, ValueError, transport.Refused) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        except EOFError as error:
            raise ConnectionError("it ended the connection: it went away, or its release answers "
                                  "no questions") from error
        finally:
            if channel is not None:
                channel.close()
        if "refused" in answer:
            raise ConnectionError(str(answer["refused"])[:500])
        return answer

    async def _answer(self, name: str, question: Any) -> dict[str, Any]:
        if self._answering >= ANSWERING_MAX:
            return {"refused": f"{ANSWERING_MAX} questions are being answered: ask again"}
        self._answering += 1
        try:
            answer = await self.listener.asked(name, question)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            return {"refused": f"not understood: {error}"[:500]}
        finally:
            self._answering -= 1
        return answer

    # ------------------------------------------------------------- hearing

    def heard(self) -> tuple[Beat, ...]:
        """The newest beat of each node and run, those of lost nodes marked."""
        return tuple(
            msgspec.structs.replace(beat, lost=True) if beat.node in self._lost else beat
            for beat in self._beats.values())

    def answered_s(self, name: str, run: str, generation: int) -> float:
        """When the newest ping left that this node has answered (CLOCK_BOOTTIME); 0.0 where it has
        not, or knows a higher generation of the run."""
        line, known = self.lines.get(name), self._known.get(name)
        if line is None or known is None or known.get(run, 0) > generation:
            return 0.0
        return line.acked_boot_s

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await transport.accept(reader, writer, self.token)
            while True:
                message = await channel.take()
                if "ask" in message:
                    await channel.send(await self._answer(channel.peer, message["ask"]))
                else:
                    self._take(channel.peer, message)
        except transport.Refused as error:
            self.on_error("peers", str(error))
        except (OSError, TimeoutError, EOFError, ValueError, asyncio.LimitOverrunError):
            return  # it connects anew; until then it is silent, which is counted elsewhere
        finally:
            writer.close()

    def _take(self, name: str, message: dict[str, Any]) -> None:
        """ValueError for what is no message of ours: it ends the connection."""
        line = self.lines.get(name)
        try:
            number, ack = int(message["n"]), int(message["ack"])
            instance, to = str(message["from"]), str(message["to"])
            silent = [str(one) for one in message["silent"][:LINES_MAX]]
            text = message.get("told")
            told = msgspec.json.decode(text, type=Told) if text else None
        except (KeyError, TypeError, msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"no message of an agent's: {error}") from error
        self.instances[name] = instance
        self.detector.heard(name, silent)
        self._questions.heard(name)
        if told is not None:
            self._keep(name, told)  # before its answer counts: it may know of something newer
        if line is not None:
            line.heard_number = number
            if to == self.instance:
                line.acked(ack)
        self._judge()
        if told is not None:
            self.listener.beats_came(told, bool(message.get("news")))

    def _keep(self, name: str, told: Told) -> None:
        """A node speaks for itself alone, and what it does not say any more is over.  An agent that
        has just begun says nothing yet of runs whose launchers are about to come back to it: what
        the one before it said of them stands, and ages."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        life = self.instances.get(name, "")
        before, runs = self._spoken.get(name, ("", frozenset()))
        self._known[name] = dict(told.known[:BEATS_MAX])
        old_s = now_s - BACK_LEASES * self.lease_s()
        for key, kept in list(self._beats.items()):
            if key[0] == name and (kept.boot_s < old_s or life == before and key[1] in runs):
                del self._beats[key]
        for beat in told.beats:
            if beat.node == name and len(self._beats) < BEATS_MAX:
                self._beats[name, beat.run] = msgspec.structs.replace(beat, boot_s=now_s)
        self._spoken[name] = life, frozenset(beat.run for beat in told.beats[:BEATS_MAX])

    # ------------------------------------------------------------- asking a kernel

    async def _probe(self, name: str) -> None:
        address = self.lines[name].address
        try:
            answers = await self._questions.ask(name, address.host, address.port)
            if self._questions.unasked:
                self.on_error("peers", NOTHING_LEFT)
            if answers is not None:
                self.detector.probed(name, answers)
            self._judge()
            for other in self.lines.values():
                other.wake.set()  # a second observer waits for this node's word
        finally:
            del self._probes[name]
