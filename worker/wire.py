"""Packets of JSON over SOCK_SEQPACKET, with file descriptors beside them.

Owns framing and its limits for both sockets of a launcher: the one to the agent and the one to
each rank.  One object a packet, key "t" says what it is.  What comes in is input from outside:
too long, not JSON or not an object is a ValueError, never a crash.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .redact import redacted_head

PROTOCOL = 1
LIMIT_BYTES = 60_000  # of one packet; the receive buffer is larger, so a longer one is noticed
FDS_MAX = 250  # the kernel passes 253 with one packet
TEXT_LIMIT = 2_000  # of one string inside a packet

Packet = Dict[str, Any]


class Channel:
    """One end of a packet socket.  Sending never blocks for long: see `send`.

    well_formed: the other end reads strictly, as the agent does: see `encoded`.
    """

    def __init__(self, sock: socket.socket, well_formed: bool = False) -> None:
        self.sock = sock
        self.well_formed = well_formed

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, packet: Packet, fds: Sequence[int] = ()) -> bool:
        """Sends one packet; False when the other end is gone or does not read.

        A peer that has stopped reading is as good as gone: everything sent here is a level that
        is repeated, or an order whose missing outcome is noticed.
        """
        data = encoded(packet, self.well_formed)
        if len(data) > LIMIT_BYTES:
            raise ValueError("packet %r of %d bytes" % (packet.get("t"), len(data)))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([data], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            return True
        except OSError:
            return False

    def readable(self) -> bool:
        """Whether a packet, or the other end's leaving, waits to be received."""
        poller = select.poll()
        poller.register(self.sock.fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def receive(self, fds: int = 4) -> Tuple[Optional[Packet], List[int]]:
        """The next packet and the descriptors that came with it; (None, []) when the peer closed.

        Raises BlockingIOError when there is none (on a non-blocking socket), ValueError when it is
        not a packet; descriptors of a refused packet are closed.
        """
        room = socket.CMSG_SPACE(fds * 4) if fds else 0
        try:
            data, rights, flags, _ = self.sock.recvmsg(
                LIMIT_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
        except (ConnectionResetError, BrokenPipeError):
            return None, []
        received: List[int] = []
        for level, kind, payload in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % 4])
                received.extend(numbers)
        if not data:
            close_all(received)
            return None, []
        try:
            return decode(data, bool(flags & socket.MSG_TRUNC)), received
        except ValueError:
            close_all(received)
            raise

    def close(self) -> None:
        self.sock.close()


def encoded(packet: Packet, well_formed: bool = False) -> bytes:
    """A packet's bytes.

    A file name that is no UTF-8 holds lone surrogates in Python, and so does a message that names
    it.  No Unicode text may: a strict reader refuses the packet, and the death that it tells of.
    `well_formed` puts "?" in their place.  Between launcher and rank they stay: a path has to lead
    back to its file.
    """
    text = json.dumps(packet, separators=(",", ":"))
    if well_formed and "\\ud" in text:  # half of a pair, or an emoji: looked at again
        text = json.dumps(packet, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def size_of(packet: Packet) -> int:
    """Bytes at most, whoever reads it."""
    return len(encoded(packet))


def decode(data: bytes, truncated: bool = False) -> Packet:
    """One packet's bytes as an object with a string "t"; ValueError says what is wrong."""
    if truncated or len(data) > LIMIT_BYTES:
        raise ValueError("packet longer than %d bytes" % LIMIT_BYTES)
    try:
        packet = json.loads(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError("packet is not JSON: %s" % type(error).__name__) from None
    if not isinstance(packet, dict) or not isinstance(packet.get("t"), str):
        raise ValueError('packet is not an object with a string "t"')
    return packet


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """Text short enough for a packet; what is whole is redacted by whoever keeps it."""
    return text if len(text) <= limit else redacted_head(text, limit - 1) + "\u2026"


def pair() -> Tuple[Channel, Channel]:
    """Two connected channels, both non-blocking for sends, blocking for receives."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
