"""Whether a silent node's kernel answers, asked without filling its agent's queue.

Owns the questions to one node's address, and what became of them in one silence.  A connection to
a port where nobody listens is refused by the kernel alone, as often as it is asked.  One to the
agent's own port is taken into a queue that a stopped agent never empties: full, it makes a living
kernel as silent as a dead one.  So that port is asked only until another answers, or once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

PROBES, PROBE_GAP_S, PROBE_S = 3, 0.1, 0.3  # a lost packet must not pass for a dead kernel
CLOSED_PORT = 1  # tcpmux, which nobody serves; who does answers as well


class Answer(Enum):
    NONE = "none"
    REFUSED = "refused"  # by a kernel, at once
    TAKEN = "taken"  # into the queue of whoever listens


@dataclass
class Silence:
    """What is known of one node's kernel since the node is silent."""

    refuses: bool = False  # it answered at the closed port last time
    taken: bool = False  # a question stands in its agent's queue


class KernelQuestions:
    """One observer's."""

    def __init__(self) -> None:
        self._silences: dict[str, Silence] = {}

    def heard(self, name: str) -> None:
        """The node itself spoke: what its kernel said before is over."""
        self._silences.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """These are the others now."""
        for name in self._silences.keys() - set(names):
            del self._silences[name]

    async def ask(self, name: str, host: str, port: int) -> bool | None:
        """Whether its kernel answers.  None: that cannot be told, and what was known stands.

        A firewall may swallow questions to closed ports.  Where the agent's own port took one
        before, silence at the other proves nothing any more.
        """
        silence = self._silences.setdefault(name, Silence())
        own = not (silence.refuses or silence.taken)
        closed, agent = await asyncio.gather(
            _tries(host, CLOSED_PORT), _tries(host, port if own else 0))
        if any(answer is not Answer.NONE for answer in closed):
            silence.refuses = True
            return True
        if silence.refuses:
            silence.refuses = False  # the next question goes to both
            return None
        silence.taken = silence.taken or Answer.TAKEN in agent
        return any(answer is not Answer.NONE for answer in agent) if own else None


async def _tries(host: str, port: int) -> list[Answer]:
    """What becomes of a few questions in a row; port 0: none is asked."""
    count = PROBES if port else 0
    return list(await asyncio.gather(
        *(answer(host, port, number * PROBE_GAP_S) for number in range(count))))


async def answer(host: str, port: int, delay_s: float) -> Answer:
    """What becomes of a connection."""
    await asyncio.sleep(delay_s)
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(PROBE_S):
                await loop.sock_connect(sock, (host, port))
        except ConnectionRefusedError:
            return Answer.REFUSED
        except (OSError, TimeoutError):
            return Answer.NONE
    return Answer.TAKEN
