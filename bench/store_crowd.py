"""Most agents of bench.store_fleet, which are not whole: sockets that ask etcd what an agent asks.

Owns the connections of those that ask one member of etcd, in a process of its own.  Each has two,
as an agent has: one that watches the cluster and one for its questions.  What etcd sends is counted
and not decoded, for each agent does that on its own node.
"""

from __future__ import annotations

import base64
import heapq
import json
import multiprocessing
import random
import secrets
import select
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from holdfast.agent.store.etcd import look_s
from holdfast.agent.store.etcd_answers import after
from holdfast.agent.store.etcd_leases import NAME, NAME_S
from holdfast.agent.store.identity import CLUSTER

AT_ONCE = 64  # join together
IP_BIND_ADDRESS_NO_PORT = 24  # of linux/in.h
PER_ADDRESS = 20_000  # connections to one port from one address: the kernel has some 28,000
READ_BYTES = 1 << 20
TURN_S = 0.05  # from one question of the other process to the next, at most
WAIT_S = 120.0  # for an answer: longer, and the store gave way


class Said(NamedTuple):
    """What the crowd counts; times are CLOCK_MONOTONIC's, which all processes share."""

    up: int  # watches that have said something
    missing: int  # of them: have fewer bytes since the mark than were asked for
    heard_s: float  # when the newest byte of a watch came
    asked: int  # questions so far
    slowest_s: float  # of the answers since the last mark
    lost: int  # connections that etcd ended


def together(several: Sequence[Said]) -> Said:
    """What several crowds count, as one."""
    up, missing, heard_s, asked, slowest_s, lost = zip(*several, strict=True)
    return Said(sum(up), sum(missing), max(heard_s), sum(asked), max(slowest_s), sum(lost))


class Asker:
    """One agent's connection for questions: one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.got, self.sent_s, self.lease = sock, b"", 0.0, ""


class Crowd:
    """Some agents of so many, by number; it begins with those that are joined."""

    def __init__(self, address: str, prefix: str, numbers: range, agents: int) -> None:
        host, _, port = address.rpartition(":")
        self.to, self.prefix, self.numbers = (host, int(port)), prefix, numbers
        self.look_s = look_s(agents)
        self.poll = select.epoll()
        self.watches = dict[int, list[int]]()  # descriptor -> [bytes since the mark, all bytes]
        self.askers = dict[int, Asker]()
        self.kept = list[socket.socket]()
        self.due = list[tuple[float, int, float]]()  # when, whose descriptor, its lease renewed
        self.heard_s, self.asked, self.slowest_s, self.lost = 0.0, 0, 0.0, 0
        self.spacious = memoryview(bytearray(READ_BYTES))

    # ------------------------------------------------------------- connections

    def _connected(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The port is chosen as it connects: one that leads to another member may be the same.
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((f"127.0.1.{1 + len(self.kept) // PER_ADDRESS}", 0))
        sock.connect(self.to)
        self.kept.append(sock)
        return sock

    def _request(self, path: str, body: dict[str, Any]) -> bytes:
        text = json.dumps(body).encode()
        return (f"POST {path} HTTP/1.1\r\nHost: {self.to[0]}:{self.to[1]}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                ).encode() + text

    def _key(self, key: str) -> str:
        return base64.b64encode((self.prefix + key).encode()).decode()

    # ------------------------------------------------------------- joining

    def join(self, document: bytes) -> None:
        """Each one's lease, name and document, some at once."""
        for at in range(0, len(self.numbers), AT_ONCE):
            some = [(f"n{number}", Asker(self._connected()))
                    for number in self.numbers[at:at + AT_ONCE]]
            for _, one in some:
                one.lease = str(secrets.randbits(62) + 1)
                one.sock.sendall(self._request(
                    "/v3/lease/grant", {"TTL": str(int(NAME_S)), "ID": one.lease}))
            for _, one in some:
                self._answer(one)
            for name, one in some:
                puts = ({"key": self._key(f"lease/{NAME}{name}"), "lease": one.lease,
                         "value": base64.b64encode(b"x" * 150).decode()},
                        {"key": self._key(f"node/{name}"),
                         "value": base64.b64encode(document).decode()})
                one.sock.sendall(self._request(
                    "/v3/kv/txn", {"success": [{"request_put": put} for put in puts]}))
            for _, one in some:
                self._answer(one)
                self.askers[one.sock.fileno()] = one
                self._renew_soon(one)

    def _renew_soon(self, one: Asker) -> None:
        """The leases of those that are there are kept while the others join."""
        now_s = time.monotonic()
        one.sock.setblocking(False)
        self.poll.register(one.sock, select.EPOLLIN)
        heapq.heappush(self.due, (now_s + random.uniform(0.0, NAME_S / 3), one.sock.fileno(),
                                  0.0))
        self.turn(0.0)

    def _answer(self, one: Asker) -> None:
        one.sock.settimeout(WAIT_S)
        while not self._is_whole(one):
            got = one.sock.recv(65536)
            if not got:
                raise ConnectionError("etcd ended a connection")
            one.got += got
        if b" 200 " not in one.got[:16]:
            raise ConnectionError(one.got[:300].decode("utf-8", "replace"))
        one.got = b""
        self.asked += 1

    @staticmethod
    def _is_whole(one: Asker) -> bool:
        head, found, body = one.got.partition(b"\r\n\r\n")
        if not found:
            return False
        _, said, length = head.lower().partition(b"content-length:")
        if said:
            return len(body) >= int(length.split(b"\r\n")[0])
        return body.endswith(b"0\r\n\r\n")  # in chunks

    def watch(self, at: int, count: int) -> None:
        """Watches for so many of them, from this one on."""
        begin = self.prefix.encode()
        text = self._request("/v3/watch", {"create_request": {
            "key": base64.b64encode(begin).decode(),
            "range_end": base64.b64encode(after(begin)).decode(), "fragment": True}})
        for _ in range(at, min(at + count, len(self.numbers))):
            sock = self._connected()
            sock.sendall(text)
            sock.setblocking(False)
            self.watches[sock.fileno()] = [0, 0]
            self.poll.register(sock, select.EPOLLIN)

    # ------------------------------------------------------------- going on

    def turn(self, wait_s: float) -> None:
        """What came is read, and the questions that are due are asked."""
        now_s = time.monotonic()
        if self.due:
            wait_s = max(0.0, min(wait_s, self.due[0][0] - now_s))
        for descriptor, _ in self.poll.poll(wait_s, 4096):
            if descriptor in self.watches:
                self._heard(descriptor)
            else:
                self._answered(descriptor)
        now_s = time.monotonic()
        while self.due and self.due[0][0] <= now_s:
            _, descriptor, renewed_s = heapq.heappop(self.due)
            self._ask(descriptor, renewed_s, now_s)

    def _heard(self, descriptor: int) -> None:
        sock = socket.socket(fileno=descriptor)
        try:
            got = sock.recv_into(self.spacious)
        except BlockingIOError:
            return
        finally:
            sock.detach()
        if not got:
            self.lost += 1
            self.poll.unregister(descriptor)
            return
        counts = self.watches[descriptor]
        counts[0] += got
        counts[1] += got
        self.heard_s = time.monotonic()

    def _ask(self, descriptor: int, renewed_s: float, now_s: float) -> None:
        """As EtcdStore: the cluster's key, and a name's lease in its time."""
        one = self.askers[descriptor]
        every_s = self.look_s * random.uniform(0.9, 1.1)
        if one.sent_s:  # not answered yet
            self.slowest_s = max(self.slowest_s, now_s - one.sent_s)
            heapq.heappush(self.due, (now_s + every_s, descriptor, renewed_s))
            return
        text = self._request("/v3/kv/range", {"key": self._key(CLUSTER)})
        if now_s - renewed_s > NAME_S / 3:
            text = self._request("/v3/lease/keepalive", {"ID": one.lease})
            heapq.heappush(self.due, (now_s + 0.1, descriptor, now_s))
        else:
            heapq.heappush(self.due, (now_s + every_s, descriptor, renewed_s))
        one.sock.sendall(text)
        one.sent_s = now_s

    def _answered(self, descriptor: int) -> None:
        one = self.askers[descriptor]
        got = one.sock.recv(65536)
        if not got:
            self.lost += 1
            self.poll.unregister(descriptor)
            return
        one.got += got
        if self._is_whole(one):
            self.slowest_s = max(self.slowest_s, time.monotonic() - one.sent_s)
            one.got, one.sent_s = b"", 0.0
            self.asked += 1

    # ------------------------------------------------------------- what is asked of it

    def said(self, wanted: int) -> Said:
        return Said(sum(all_ > 0 for _, all_ in self.watches.values()),
                    sum(since < wanted for since, _ in self.watches.values()),
                    self.heard_s, self.asked, self.slowest_s, self.lost)

    def mark(self) -> None:
        self.slowest_s = 0.0
        for counts in self.watches.values():
            counts[0] = 0


def _serve(pipe: Connection, given: tuple[str, str, range, int]) -> None:
    crowd = Crowd(*given)
    while True:
        crowd.turn(TURN_S)
        while pipe.poll():
            name, arguments = pipe.recv()
            if name == "end":
                return
            pipe.send(getattr(crowd, name)(*arguments))


class Beside:
    """A crowd in its process."""

    def __init__(self, address: str, prefix: str, numbers: range, agents: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, (address, prefix, numbers, agents)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the crowd's method returns.  EOFError where it failed, which it has printed."""
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
