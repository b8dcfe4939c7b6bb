"""One launcher's socket: packets with descriptors in, packets out, never blocking.

Owns reading, writing and the bounded list of what a slow launcher has not taken yet.  Knows
nothing of what packets mean; server.py does.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping

from . import protocol

TURNED_AWAY_PACKETS = 64  # read of a launcher that gets no connection
UNSENT_MAX = 256  # packets kept for a launcher that does not read; then it is cut off


class Connection:
    """One connected socket: packets in, packets out, never blocking."""

    def __init__(
        self, sock: socket.socket, on_readable: Callable[[Connection], None],
        on_broken: Callable[[Connection], None],
    ) -> None:
        self.sock = sock
        self.open = True
        self.since_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._on_readable = on_readable
        self._on_broken = on_broken
        self._unsent: deque[bytes] = deque()
        self.pid, self.uid = peer(sock)
        sock.setblocking(False)
        self._loop.add_reader(sock, on_readable, self)

    def send(self, fields: Mapping[str, object]) -> bool:
        """Sends one packet, now or when the launcher reads again; False when it is cut off."""
        if not self.open:
            return False
        packet = protocol.encode(fields)
        if self._unsent:
            self._unsent.append(packet)
            return self._check_unsent()
        try:
            self.sock.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            self._unsent.append(packet)
            self._loop.add_writer(self.sock, self._writable)
        except (BrokenPipeError, ConnectionResetError):
            return False  # it has gone: what it said before is read yet, and then its end
        except OSError:
            self._loop.call_soon(self._on_broken, self)
            return False
        return True

    def _check_unsent(self) -> bool:
        if len(self._unsent) <= UNSENT_MAX:
            return True
        self._loop.call_soon(self._on_broken, self)
        return False

    def _writable(self) -> None:
        try:
            while self._unsent:
                self.sock.send(self._unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self.sock)

    def pause(self, wait_s: float) -> None:
        """Reads nothing for a while: what the launcher sends waits in the kernel."""
        self._loop.remove_reader(self.sock)
        self._loop.call_later(wait_s, self._resume)

    def _resume(self) -> None:
        if self.open:
            self._loop.add_reader(self.sock, self._on_readable, self)

    def close(self) -> None:
        self.open = False
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        self.sock.close()


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel saw them when it connected."""
    pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def turn_away(sock: socket.socket, why: str) -> None:
    """Says why there is no room, and closes.

    What the launcher has sent already is read first, descriptors unseen: the kernel answers a
    close over unread packets with ECONNRESET, before the reason.
    """
    try:
        sock.setblocking(False)
        for _ in range(TURNED_AWAY_PACKETS):
            if not sock.recv(protocol.PACKET_MAX_BYTES):
                break
    except OSError:
        pass  # nothing more is there, or it has gone
    try:
        sock.send(protocol.encode({"t": "error", "error": why, "protocol": protocol.PROTOCOL}),
                  socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass  # it has gone: nobody is left to tell
    sock.close()


def receive(sock: socket.socket) -> tuple[bytes, list[int], str]:
    """One packet with its descriptors, and what of it got lost on the way, or ""."""
    data, ancillary, flags, _ = sock.recvmsg(
        protocol.PACKET_MAX_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if flags & socket.MSG_TRUNC:
        return data, fds, f"packet is longer than {protocol.PACKET_MAX_BYTES} bytes"
    if flags & socket.MSG_CTRUNC:
        return data, fds, "descriptors got lost: more than 4, or this agent may open no more files"
    return data, fds, ""


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
