"""Whether a silent node's kernel answers, asked without filling its agent's queue.

Owns the questions to one node's address, and what became of them in one silence.  A connection to
a port where nobody listens is refused by the kernel alone, as often as it is asked: so it is asked
the oftener, the more packets get lost on the way there.  One to the agent's own port is taken into
a queue that a stopped agent never empties: full, it makes a living kernel as silent as a dead one.
So that port is asked only until another answers, or once.  A round is over when the last question
has had its time, and an answer to the first counts until then.
"""

from __future__ import annotations

import asyncio
import errno
import math
import select
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

PROBE_S, PROBE_MOST_S = 0.08, 0.3  # for an answer, the longer where the way is; unknown, the most
ROUND_TRIPS = 3.0  # an answer is waited for: what comes later than that will not come
PROBES, PROBE_GAP_S = 3, 0.035  # to the agent's own port, whose queue is not to be filled
CLOSED_PORT = 1  # tcpmux, which nobody serves; who does answers as well
CLOSED_LEAST, CLOSED_MOST, CLOSED_GAP_S = 6, 24, 0.014
ROUND_S = (CLOSED_LEAST - 1) * CLOSED_GAP_S + PROBE_S  # of questions on a short way
CHANCE = 1e-6  # that a kernel that lives answers none of the questions to its closed port
PRIOR_LOST, PRIOR = 1.0, 10.0  # where nothing is known: one question in ten gets no answer
# No packet left: descriptors, ports of our own or the kernel's memory are used up.
OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM,
                          errno.EADDRNOTAVAIL})
REMEMBERED = 100.0  # questions: loss of long ago says little of now


class Answer(Enum):
    NONE = "none"
    REFUSED = "refused"  # by a kernel, at once
    TAKEN = "taken"  # into the queue of whoever listens
    UNASKED = "unasked"  # this machine had nothing left to ask with


@dataclass
class Silence:
    """What is known of one node's kernel since the node is silent."""

    refuses: bool = False  # it answered at the closed port last time
    taken: bool = False  # a question stands in its agent's queue


@dataclass
class Way:
    """How much gets lost between here and one node, by the questions that its kernel answered."""

    asked: float = 0.0
    unanswered: float = 0.0

    def questions(self) -> int:
        """So many that a living kernel is not taken for a dead one, and no more: each takes time.
        """
        lost = (self.unanswered + PRIOR_LOST) / (self.asked + PRIOR)
        wanted = math.ceil(math.log(CHANCE) / math.log(lost))
        return min(CLOSED_MOST, max(CLOSED_LEAST, wanted))

    def learn(self, answers: int, asked: int) -> None:
        """Of what gets no answer at all nothing is learned: that may be a dead node, or a firewall.
        """
        if answers:
            kept = min(1.0, REMEMBERED / (self.asked + asked))
            self.asked = kept * (self.asked + asked)
            self.unanswered = kept * (self.unanswered + asked - answers)


class KernelQuestions:
    """One observer's."""

    def __init__(self) -> None:
        self.unasked = False  # of the latest round something never left this machine
        self._silences: dict[str, Silence] = {}
        self._ways: dict[str, Way] = {}

    def heard(self, name: str) -> None:
        """The node itself spoke: what its kernel said before is over."""
        self._silences.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """These are the others now."""
        for kept in (self._silences, self._ways):
            for name in kept.keys() - set(names):
                del kept[name]

    async def ask(
        self, name: str, host: str, port: int, round_trip_s: float | None = None
    ) -> bool | None:
        """Whether its kernel answers.  None: that cannot be told, and what was known stands.
        `round_trip_s`: of a packet there and back, where it is known.

        A firewall may swallow questions to closed ports.  Where the agent's own port took one
        before, silence at the other proves nothing any more.
        """
        closed, agent = self.wanted(name)
        wait_s = patience_s(round_trip_s)
        return self.told(name, *await asyncio.gather(
            _tries(host, CLOSED_PORT, closed, CLOSED_GAP_S, wait_s),
            _tries(host, port, agent, PROBE_GAP_S, wait_s)))

    def wanted(self, name: str) -> tuple[int, int]:
        """How often the closed port is asked now, and how often the agent's own."""
        silence = self._silences.setdefault(name, Silence())
        own = not (silence.refuses or silence.taken)
        return self._ways.setdefault(name, Way()).questions(), PROBES if own else 0

    def told(
        self, name: str, closed: Sequence[Answer], agent: Sequence[Answer]
    ) -> bool | None:
        """What the answers of both ports come to."""
        silence, way = self._silences.get(name, Silence()), self._ways.get(name, Way())
        way.learn(answered(closed), sum(one is not Answer.UNASKED for one in closed))
        self.unasked = Answer.UNASKED in closed or Answer.UNASKED in agent
        if answered(closed):
            silence.refuses = True
            return True
        silence.taken = silence.taken or Answer.TAKEN in agent
        if self.unasked:
            return True if answered(agent) else None  # fewer questions than silence is proven by
        if silence.refuses:
            silence.refuses = False  # the next question goes to both
            return None
        return answered(agent) > 0 if agent else None


def answered(questions: Sequence[Answer]) -> int:
    """How many of them got a word from the kernel."""
    return sum(one in (Answer.REFUSED, Answer.TAKEN) for one in questions)


def patience_s(round_trip_s: float | None) -> float:
    """How long the last question of a round waits for its answer."""
    if round_trip_s is None:
        return PROBE_MOST_S
    return min(PROBE_MOST_S, max(PROBE_S, ROUND_TRIPS * round_trip_s))


async def _tries(host: str, port: int, count: int, gap_s: float, wait_s: float) -> list[Answer]:
    """What becomes of so many questions in a row, each heard until the last has had its time."""
    until_s = asyncio.get_running_loop().time() + (count - 1) * gap_s + wait_s
    return list(await asyncio.gather(
        *(answer(host, port, number * gap_s, wait_s, until_s) for number in range(count))))


async def answer(
    host: str, port: int, delay_s: float, wait_s: float, until_s: float
) -> Answer:
    """What becomes of a connection.  One asked late, by an observer that stood still, has its whole
    time all the same."""
    await asyncio.sleep(delay_s)
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout_at(max(until_s, loop.time() + wait_s)):
                    await loop.sock_connect(sock, (host, port))
            except TimeoutError:
                return _held(sock)
    except ConnectionRefusedError:
        return Answer.REFUSED
    except OSError as error:
        own = isinstance(error, socket.gaierror) or error.errno in OWN_SHORTAGE
        return Answer.UNASKED if own else Answer.NONE
    return Answer.TAKEN


def _held(sock: socket.socket) -> Answer:
    """What this machine's own kernel knows by now: an observer that stood still has not looked when
    its time was over.  Raises what the connection ended with."""
    asked = select.poll()  # select knows no descriptor above 1,023
    asked.register(sock, select.POLLOUT)
    if not asked.poll(0):
        return Answer.NONE
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, "what became of a question")
    return Answer.TAKEN
