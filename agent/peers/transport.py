"""Messages between peers over TCP, each side proving that it holds the same token.

Owns the handshake, the signature of every message and its bounds.  Nothing is encrypted: what goes
over it are names and measurements.  Whoever does not hold the token gets no further than one nonce.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import sys
from typing import Any

VERSION = 2  # of the handshake
PROTOCOL = 2  # of what is said behind it; one greater where an older release could not follow
UNSAID = 1  # that of a release which does not say its own
LINE_MAX = 4 << 20  # a report on 2,048 nodes
PART_MAX, HANDSHAKE_S = 4096, 5.0  # what is kept of somebody who has proven nothing
MAC_HEX = 64
MIN_RTT_AT = 148  # of struct tcp_info (linux/tcp.h): tcpi_min_rtt, in microseconds
# A side that stands still keeps its connection: its kernel goes on answering.  So each side says
# that it lives, from its event loop, in which no test runs.
BEAT_S, STILL_S = 1.0, 12.0


class Still(EOFError):
    """The other side keeps the connection and says nothing more."""


class Refused(Exception):
    """The other side holds another token, or speaks another version."""


class TooFar(Refused):
    """The other side's release is neither this one nor a neighbour of it."""


class OtherToken(Refused):
    """The other side proves another token than this one."""


class Channel:
    """One connection, once both sides are proven.  `peer` is the other side's name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes,
                 peer: str, server: bool) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self.peer = peer
        self._sends, self._takes = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._taken = 0

    async def send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        mac = _mac(self._key, self._sends, str(self._sent).encode(), text)
        self._sent += 1
        self._writer.write(mac + b" " + text + b"\n")
        await self._writer.drain()

    async def take(self) -> dict[str, Any]:
        """The next message that says something.  Raises EOFError at the end, Still where the other
        side is silent for too long, ValueError for what is no message."""
        while True:
            try:
                async with asyncio.timeout(STILL_S):
                    message = await self._message()
            except TimeoutError:
                raise Still(f"it says nothing for {STILL_S:g} s, and keeps its connection: frozen, "
                            "or without a processor") from None
            if message:
                return message

    async def _message(self) -> dict[str, Any]:
        line = await self._line()
        mac, text = line[:MAC_HEX], line[MAC_HEX + 1 : -1]
        wanted = _mac(self._key, self._takes, str(self._taken).encode(), text)
        if not hmac.compare_digest(mac, wanted):
            raise ValueError("a message with a wrong signature")
        self._taken += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

    async def beat(self) -> None:
        """Says that this side lives, until the connection ends."""
        while True:
            try:
                await self.send({})
            except OSError:
                return  # whoever takes from it says so
            await asyncio.sleep(BEAT_S)

    async def _line(self) -> bytes:
        """Read in parts, since the reader holds no more than one."""
        line = b""
        while not line.endswith(b"\n"):
            try:
                line += await self._reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as over:
                line += await self._reader.readexactly(over.consumed)
            except asyncio.IncompleteReadError as error:
                raise EOFError("the connection ended") from error
            if len(line) > LINE_MAX:
                raise ValueError(f"a message of more than {LINE_MAX} bytes")
        return line

    def patience(self, seconds: float) -> None:
        """The kernel gives up on what was sent and is not taken for this long: behind a cut it
        would try for a quarter of an hour, and after a healed one wait for minutes."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def round_trip_s(self) -> float:
        """The shortest that this side's kernel has measured of late, seconds: what the way itself
        takes, without the moments that either side makes the other wait (tcp(7), TCP_INFO)."""
        sock = self._writer.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_AT + 4)
        return int.from_bytes(info[MIN_RTT_AT:], sys.byteorder) / 1e6

    def close(self) -> None:
        self._writer.close()


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\0".join(parts), hashlib.sha256).hexdigest().encode()


def _refuse_far(said: dict[str, Any]) -> None:
    """Raises TooFar.  Neighbours understand each other, so that nodes are upgraded one by one."""
    theirs = said.get("protocol", UNSAID)
    if not isinstance(theirs, int) or abs(theirs - PROTOCOL) > 1:
        raise TooFar(f"speaks protocol {str(theirs)[:20]} of agents, and this node {PROTOCOL}: "
                     "install the same release of holdfast on both, or the next one on one of them")


async def connect(host: str, port: int, token: bytes, name: str) -> Channel:
    """Raises Refused, or OSError and TimeoutError where nobody is there yet."""
    reader, writer = await asyncio.open_connection(host, port, limit=PART_MAX)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            first = await _line(reader)
            if first.get("holdfast") != VERSION:
                raise Refused(f"{host}:{port} is no holdfast check of version {VERSION}")
            theirs, mine = str(first.get("nonce")), secrets.token_hex(16)
            said = [one.encode() for one in (theirs, mine, name)]
            await _say(writer, {"nonce": mine, "node": name, "protocol": PROTOCOL,
                                "mac": _mac(token, b"client", *said).decode()})
            answer = await _line(reader)
            if not hmac.compare_digest(str(answer.get("mac", "")).encode(),
                                       _mac(token, b"server", *said)):
                _refuse_far(first)  # an older one than this says it in other words
                raise OtherToken(str(answer.get("refused") or "it holds another token"))
            _refuse_far(first)
    except (Refused, OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        writer.close()
        if isinstance(error, (Refused, OSError)):
            raise
        raise ConnectionError(f"{host}:{port}: {error}") from error
    return Channel(reader, writer, _mac(token, b"key", *said), host, False)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 token: bytes) -> Channel:
    """The other half.  Raises Refused with whose token is wrong, OSError or ValueError."""
    async with asyncio.timeout(HANDSHAKE_S):
        mine = secrets.token_hex(16)
        await _say(writer, {"holdfast": VERSION, "nonce": mine, "protocol": PROTOCOL})
        answer = await _line(reader)
        name = str(answer.get("node", ""))[:256]
        said = [one.encode("utf-8", "replace") for one in (mine, str(answer.get("nonce")), name)]
        if not hmac.compare_digest(str(answer.get("mac", "")).encode("utf-8", "replace"),
                                   _mac(token, b"client", *said)):
            await _say(writer, {"refused": "it holds another token"})
            raise OtherToken(f"somebody who calls itself {name!r} holds another token")
        try:
            _refuse_far(answer)
        except TooFar as error:
            await _say(writer, {"refused": str(error)})
            raise TooFar(f"{name} {error}") from None
        await _say(writer, {"mac": _mac(token, b"server", *said).decode()})
    return Channel(reader, writer, _mac(token, b"key", *said), name, True)


async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Before anything is proven: no longer than a part."""
    value = json.loads(await reader.readuntil(b"\n"))
    if not isinstance(value, dict):
        raise ValueError("a greeting that is no object")
    return value


async def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()
