"""How many connections a listener of the web server holds, and which one makes room for a new one.

Owns the limits of what strangers may leave unfinished: connections that say nothing, heads without
an end, answers that nobody reads.  Nobody is refused: where there are too many, the one that has
been quiet longest is ended, so that whoever asks now is answered, however many others wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp import web

CONNECTIONS_MAX = 128  # of one listener; a browser opens six
HEAD_MAX_BYTES = 32_768  # of a request line and its headers, all together
UNSENT_MAX_BYTES = 16 << 20  # of answers that were not taken yet, on all connections
CONNECTION: dict[str, Any] = {"access_log": None, "keepalive_timeout": 20.0}
END_OF_HEAD = b"\r\n\r\n"


class Guest(web.RequestHandler):
    """One connection.  aiohttp bounds each header and the body; not their sum, nor the answers."""

    __slots__ = ("_door", "_head_bytes", "serving")

    def __init__(self, door: Door, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, **CONNECTION)
        self._door = door
        self._head_bytes = 0
        self.serving = False  # a handler works on its request

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.enter(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.serving:
            self._head_bytes = 0 if END_OF_HEAD in data else self._head_bytes + len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                return self._door.end(self, f"a request's head is longer than {HEAD_MAX_BYTES}")
        super().data_received(data)

    def begin(self) -> None:
        """A handler begins to work on a request of this connection."""
        self.serving, self._head_bytes = True, 0
        self._door.heard(self)


class Door:
    """One listener: asyncio calls it for every new connection."""

    def __init__(self, server: web.Server, trouble: Callable[[str], None]) -> None:
        self._server = server
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._inside: OrderedDict[Guest, None] = OrderedDict()  # who asked last is last

    def __call__(self) -> Guest:
        return Guest(self, self._server, self._loop)

    def enter(self, guest: Guest) -> None:
        self._inside[guest] = None
        if len(self._inside) > CONNECTIONS_MAX:
            quiet = (one for one in self._inside if not one.serving and not one.unsent)
            leaves = next(quiet, guest)
            if leaves is guest:  # all others are answered just now, or do not take their answers
                leaves = next(iter(self._inside))
            self.end(leaves, f"more than {CONNECTIONS_MAX} connections: the one that was quiet "
                     "longest is ended")

    def leave(self, guest: Guest) -> None:
        self._inside.pop(guest, None)

    def heard(self, guest: Guest) -> None:
        if guest in self._inside:
            self._inside.move_to_end(guest)
        if sum(one.unsent for one in self._inside) > UNSENT_MAX_BYTES:
            slowest = max(self._inside, key=lambda one: one.unsent)
            self.end(slowest, f"answers of more than {UNSENT_MAX_BYTES >> 20} MiB are not read: "
                     "the largest is given up")

    def end(self, guest: Guest, why: str) -> None:
        """At once: a close would wait until the other side has taken what is still to be sent."""
        self._trouble(why)
        self.leave(guest)
        if guest.transport is not None:
            guest.transport.abort()
