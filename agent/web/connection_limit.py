"""How many connections a listener of the web server holds, and which one makes room for a new one.

Owns the limits of unfinished business: connections that say nothing, heads without an end, answers
that nobody reads.  No connection is refused: where there are too many, the one that has been quiet
longest is ended, so that a new request is answered however many connections wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp import web

CONNECTIONS_MAX = 128  # of one listener; a browser opens six
HEAD_MAX_BYTES = 32_768  # of a request line and its headers, all together
UNSENT_MAX_BYTES = 16 << 20  # of answers not yet taken, on all connections
CONNECTION: dict[str, Any] = {"access_log": None, "keepalive_timeout": 20.0}
END_OF_HEAD = b"\r\n\r\n"


class LimitedConnection(web.RequestHandler):
    """One connection.  aiohttp bounds each header and the body; not their sum, nor the answers."""

    __slots__ = ("_limit", "_head_bytes", "serving")

    def __init__(
        self, limit: ConnectionLimit, server: web.Server, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(server, loop=loop, **CONNECTION)
        self._limit = limit
        self._head_bytes = 0
        self.serving = False  # a handler works on its request

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._limit.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limit.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.serving:
            self._head_bytes = 0 if END_OF_HEAD in data else self._head_bytes + len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                return self._limit.end(self, f"a request's head is longer than {HEAD_MAX_BYTES}")
        super().data_received(data)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Instead of aiohttp's traceback for whatever is sent here: one line for each kind."""
        error = kw.get("exc_info")
        kind = type(error).__name__ if isinstance(error, BaseException) else "unknown"
        self._limit.on_error(f"a request could not be answered: {kind}")

    def begin(self) -> None:
        """A handler begins to work on a request of this connection."""
        self.serving, self._head_bytes = True, 0
        self._limit.used(self)


class ConnectionLimit:
    """One listener: asyncio calls it for every new connection."""

    def __init__(self, server: web.Server, on_error: Callable[[str], None]) -> None:
        self._server = server
        self.on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._connections: OrderedDict[LimitedConnection, None] = OrderedDict()  # latest use last

    def __call__(self) -> LimitedConnection:
        return LimitedConnection(self, self._server, self._loop)

    def add(self, connection: LimitedConnection) -> None:
        self._connections[connection] = None
        if len(self._connections) > CONNECTIONS_MAX:
            quiet = (one for one in self._connections if not one.serving and not one.unsent)
            quietest = next(quiet, connection)
            if quietest is connection:  # all others are answered now, or do not take their answers
                quietest = next(iter(self._connections))
            self.end(quietest, f"more than {CONNECTIONS_MAX} connections: the one that was quiet "
                     "longest is ended")

    def remove(self, connection: LimitedConnection) -> None:
        self._connections.pop(connection, None)

    def used(self, connection: LimitedConnection) -> None:
        if connection in self._connections:
            self._connections.move_to_end(connection)
        if sum(one.unsent for one in self._connections) > UNSENT_MAX_BYTES:
            slowest = max(self._connections, key=lambda one: one.unsent)
            self.end(slowest, f"answers of more than {UNSENT_MAX_BYTES >> 20} MiB are not read: "
                     "the largest is given up")

    def end(self, connection: LimitedConnection, why: str) -> None:
        """Ends at once: a close would wait until the other side has taken the unsent bytes."""
        self.on_error(why)
        self.remove(connection)
        if connection.transport is not None:
            connection.transport.abort()
