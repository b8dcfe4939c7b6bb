"""What agents tell one another while runs go on: pings, beats, where stores are; and questions.

Owns one connection to each other agent, on which this one speaks, and the server on which it
listens.  What is said are levels: the newest counts, and a lost message costs nothing but time.
A question has a connection of its own, so that its answer holds up no ping.
What is said is conversation.py's, what a beat means the core's, who is lost failure_detector.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.model import UNREADABLE
from ..system.clocks import boot_s
from . import transport
from .choice import LINES_MAX, Choice, choice
from .conversation import GONE_S, PING_S, Conversation, Listener, Told, Way, Word
from .kernel_questions import KernelQuestions

SEND_S = 2.0  # who takes nothing for this long is connected anew
RETRY_S = 0.3
WAITING_MAX = 4096  # connections that it has yet to take; the kernel may allow fewer
INCOMING_MAX = 2 * LINES_MAX  # those that have proven nothing among them
NOTHING_LEFT = (
    "a silent node cannot be asked whether it lives: this machine has no descriptor, port or "
    "memory left for it. Until it has, a dead node is noticed by its lease, or by the others")
OTHER_TOKEN = (
    "{name} ({host}:{port}) holds another cluster token than this node, and no word of it is taken "
    "here: set the same cluster.token_file on all nodes, or on none, and start their agents again")
ASKING_MAX, ANSWERING_MAX = 32, 16  # questions at a time, our own and the others'
ANSWER_MAX = 2 << 20  # of one answer


class Address(NamedTuple):
    host: str
    port: int


class Line(Way):
    """This node's connection to one other, kept up for as long as the other is known."""

    def __init__(self, peers: Peers, name: str, address: Address) -> None:
        super().__init__()
        self.peers, self.name, self.address = peers, name, address
        self.wake = asyncio.Event()
        self.is_up = False
        self.problem = ""
        self.refusal = ""  # why no word is exchanged with it until a person mends that
        self.round_trip_s: float | None = None  # as the newest connection found it
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._talk()
            except (OSError, TimeoutError, EOFError, ValueError, transport.Refused) as error:
                self.problem = str(error) or type(error).__name__
                if isinstance(error, transport.TooFar):
                    self._refused(f"{self.name} {error}")
                elif isinstance(error, transport.OtherToken):
                    self._refused(OTHER_TOKEN.format(name=self.name, **self.address._asdict()))
            self.is_up = False
            await asyncio.sleep(RETRY_S)

    def _refused(self, why: str) -> None:
        self.refusal = why
        self.peers.on_error("peers", why)

    async def _talk(self) -> None:
        peers = self.peers
        async with asyncio.timeout(SEND_S):
            channel = await transport.connect(
                self.address.host, self.address.port, peers.token, peers.name)
        try:
            channel.patience(SEND_S)
            self.round_trip_s = channel.round_trip_s()
            self.is_up, self.problem, self.refusal = True, "", ""
            self.begin()
            while True:
                self.wake.clear()
                word = peers.word_for(self.name, time.monotonic())
                async with asyncio.timeout(SEND_S):
                    await channel.send(packed(word))
                # wait_for of Python 3.11 forgets that it was cancelled where it was just woken.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PING_S * word.every):
                        await self.wake.wait()
        finally:
            channel.close()

    def urge(self) -> None:
        self.wake.set()


def packed(word: Word) -> dict[str, Any]:
    """A word as it stands on the wire."""
    message = {"n": word.number, "ack": word.ack, "from": word.instance, "to": word.to,
               "silent": word.silent, "every": word.every}
    if word.told is not None:
        message |= {"told": msgspec.json.encode(word.told).decode(), "news": word.is_news}
    return message


def unpacked(message: dict[str, Any]) -> Word:
    """ValueError for what is no message of ours."""
    try:
        text = message.get("told")
        return Word(
            int(message["n"]), int(message["ack"]), str(message["from"]), str(message["to"]),
            [str(one) for one in message["silent"][:LINES_MAX]],
            msgspec.json.decode(text, type=Told) if text else None, bool(message.get("news")),
            int(message.get("every", 0)))
    except (KeyError, TypeError, *UNREADABLE) as error:
        raise ValueError(f"no message of an agent's: {error}") from error


class Peers(Conversation[Line]):
    """All other agents."""

    def __init__(
        self, name: str, instance: str, listener: Listener, lease_s: Callable[[], float],
        on_error: Callable[[str, BaseException | str], None],
    ) -> None:
        super().__init__(name, instance, listener, lease_s, boot_s)
        self.on_error = on_error
        self.token = b""
        self.addresses: dict[str, Address] = {}  # of all others
        self.choice = Choice(frozenset())
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

    def change_token(self, token: bytes) -> None:
        """What was proven with the one before ends; the next `know` connects anew."""
        for line in self.lines.values():
            line.task.cancel()
        self.lines.clear()
        for task in self._incoming:
            task.cancel()
        self.token = token

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
        self.watch()
        self._questions.keep(self.lines)
        self.forget(self.addresses)

    def ask_kernel(self, name: str) -> None:
        if name in self.lines and name not in self._probes:
            task = asyncio.get_running_loop().create_task(self._probe(name, self.lines[name]))
            self._probes[name] = task
            # Not in the task itself: one that is cancelled before it runs ends nothing.
            task.add_done_callback(lambda _: self._probes.pop(name, None))

    def long_silent(self) -> list[str]:
        """Nodes without a word for GONE_S of this observer's own ticks."""
        return [name for name, peer in self.detector.peers.items()
                if peer.missed * peer.every * PING_S > GONE_S]

    def hosts_lost(self) -> set[str]:
        """Where the nodes are that are lost now."""
        return {line.address.host for name, line in self.lines.items() if name in self.lost}

    # ------------------------------------------------------------- asking

    def others(self) -> tuple[str, ...]:
        """The nodes that are known and not lost."""
        return tuple(name for name in self.addresses if name not in self.lost)

    def refused(self) -> dict[str, str]:
        """The nodes whose release is too far from this one, or whose token is another, and why."""
        return {name: line.refusal for name, line in self.lines.items() if line.refusal}

    def out_of_touch(self) -> int:
        """How many nodes of the cluster it keeps no connection to."""
        return self.choice.left_out + self.choice.missing

    async def ask(self, name: str, question: Any, limit_s: float) -> dict[str, Any]:
        """Another agent's answer.  ConnectionError with the reason why there is none."""
        address = self.addresses.get(name)
        if address is None or name in self.lost:
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
        word = unpacked(message)
        self._questions.heard(name)
        self.take(name, word)

    # ------------------------------------------------------------- asking a kernel

    async def _probe(self, name: str, line: Line) -> None:
        address = line.address
        answers = await self._questions.ask(name, address.host, address.port, line.round_trip_s)
        if self._questions.unasked:
            self.on_error("peers", NOTHING_LEFT)
        self.kernel_said(name, answers)
