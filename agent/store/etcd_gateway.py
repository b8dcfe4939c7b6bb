"""Talks to etcd's own HTTP gateway: one request to one member, the next member where one fails.

Owns endpoints, deadlines, the login and its token, TLS, what is counted, and what an answer of
etcd's means for a person.  Knows no key and no document: that is etcd.py's.  Why no client library
stands here: docs/decisions/011-etcd-by-its-gateway.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

import aiohttp

from holdfast.worker.addresses import host_of

from ..config import settings
from ..config import store as address
from .base import StoreError, Traffic
from .etcd_answers import Answer, Result, decode, error_of

Json = dict[str, Any]
OLDEST = (3, 4)  # its gateway is at /v3 and knows every call that is made here
CONNECT_S = 0.7  # a member that takes longer is passed by; below TRY_S, to be told from a slow one
TRY_S = 0.8  # of a question to one member, where there are others; longer where all are slow
LOST_TRY_S = 0.25  # the same just after a member's host was lost: perhaps etcd's leader with it
ELECTION_S = 5.0  # which has another by then, with its usual timers too
TRY_MOST_S = 3.0
SLOW_TIMES = 1.5  # so many times what such a question took, or was waited for in vain
ANSWER_MAX = 16 << 20  # bytes; etcd takes 1.5 MB a document
LINE_MAX = 16 << 20  # of a watch: what changed in one transaction
HEADER_BYTES = 4  # ": " and the line's end
VERSION, LOG_IN = "/version", "/v3/auth/authenticate"
# gRPC's codes, as etcd uses them.
PERMISSION_DENIED, EXHAUSTED = 7, 8
OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = 11, 14, 16
LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old", "auth token is not provided")
# The request was not proposed: another member may take it.
NOT_TAKEN = ("no leader", "too many requests", "server stopped", "not capable")


class Refused(StoreError):
    """etcd answered, and it was no.  `code` is gRPC's."""

    def __init__(self, text: str, code: int, message: str) -> None:
        super().__init__(text)
        self.code, self.message = code, message
        self.is_repeated = False  # an earlier try of the same may have been taken

    @property
    def is_compacted(self) -> bool:
        return self.code == OUT_OF_RANGE and "compacted" in self.message

    @property
    def is_full(self) -> bool:
        return self.code == EXHAUSTED and "space exceeded" in self.message

    @property
    def is_not_taken(self) -> bool:
        return any(words in self.message for words in NOT_TAKEN)

    @property
    def is_passing(self) -> bool:
        """Of this member or this moment: somebody else may answer better."""
        return self.code == UNAVAILABLE or self.is_not_taken


class TooLong(StoreError):
    """An answer that is longer than is taken: less is to be asked for."""


class Written(NamedTuple):
    answer: Answer
    is_repeated: bool  # an earlier try, whose answer was lost, may have been taken


class NoAnswer(StoreError):
    """No member answered; `why` has each one's reason."""

    def __init__(self, failed: Mapping[str, str], name: str) -> None:
        self.why = failed
        said = "; ".join(f"{one.partition('://')[2]}: {why}" for one, why in failed.items())
        super().__init__(f"store: no member of etcd answers ({said or name}): start etcd there, "
                         "or set store.url to where it is")


class Login(NamedTuple):
    user: str = ""
    password: str = ""


def trace_of(traffic: Traffic) -> aiohttp.TraceConfig:
    """Counts what is sent on every connection, the watch's own too."""
    trace = aiohttp.TraceConfig()

    async def headers(_: Any, __: Any, params: aiohttp.TraceRequestHeadersSentParams) -> None:
        traffic.sent_bytes += len(params.method) + len(str(params.url.path)) + 12
        traffic.sent_bytes += _size(params.headers)

    async def chunk(_: Any, __: Any, params: aiohttp.TraceRequestChunkSentParams) -> None:
        traffic.sent_bytes += len(params.chunk)

    trace.on_request_headers_sent.append(headers)
    trace.on_request_chunk_sent.append(chunk)
    return trace


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) + HEADER_BYTES for name, value in headers.items())


class Gateway:
    """One agent's connections.  Every call ends within its limit, whatever the members do."""

    def __init__(self, endpoints: tuple[str, ...], tls: ssl.SSLContext | None = None,
                 login: Login | None = None) -> None:
        # Each agent begins elsewhere, so that no member carries all of them.
        self.endpoints = tuple(random.sample(endpoints, len(endpoints)))
        self.traffic = Traffic()
        self._tls, self._login = tls, login or Login()
        self._token = ""
        self._first = 0  # whom the next question goes to
        self._took_s: dict[str, float] = {}  # call -> its last answer, or the wait for none
        self._avoided: frozenset[str] = frozenset()  # hosts that are known to be lost
        self._lost_s = -math.inf  # when the last of the members came to it
        self._asked: set[tuple[str, asyncio.Timeout]] = set()  # who has not answered yet
        self._streaming: tuple[str, aiohttp.ClientResponse] | None = None  # endpoint, its answer
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        """For people: the members, in one order."""
        return ",".join(sorted(one.partition("://")[2] for one in self.endpoints))

    def only(self, endpoint: str) -> Gateway:
        """One to a single member, to be closed as well."""
        return Gateway((endpoint,), self._tls, self._login)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------- questions and writes

    async def ask(self, path: str, body: Json, limit_s: float) -> Answer:
        """A question: the next member is asked where one fails.  StoreError when none answered
        well, naming each."""
        try:
            return (await self.write(path, body, limit_s)).answer
        except TimeoutError as error:
            raise StoreError(str(error)) from error

    async def write(self, path: str, body: Json, limit_s: float) -> Written:
        """A change that has its effect once however often it is sent: a transaction that compares
        the version which it moves.  TimeoutError when it is not known whether it was taken,
        StoreError when it was not.

        A member that lost its leader keeps a request for seconds, and its proposal may be lost:
        the next member is asked soon, sooner where a host is known to be lost (agents know it
        before etcd does), or later where such calls take long.  What that answers is
        told with `is_repeated`: a comparison that fails then may have failed for the first try's
        success.  Once each was asked, the next gets all the time that is left."""
        deadline_s = time.monotonic() + limit_s
        failed: dict[str, str] = {}
        unsure = False
        turns, electing = 2 * len(self.endpoints), self._is_electing()
        for turn in range(turns):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                break
            endpoint = self.endpoints[self._first]
            # An election of a second may outlast a round of short tries: the last is kept for it.
            shared = turn < (turns - 1 if electing else len(self.endpoints))
            alone_s = self._patience_s(path, left_s) if shared else left_s
            try:
                return Written(await self._authorised(endpoint, path, body, alone_s), unsure)
            except Refused as error:
                if not error.is_passing:
                    error.is_repeated = unsure
                    raise
                failed[endpoint] = error.message
                unsure |= not error.is_not_taken
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                failed[endpoint] = _why(error)  # nothing was sent
            except (TimeoutError, aiohttp.ClientError) as error:
                failed[endpoint] = _why(error)
                unsure = True
            self._next()
            if turn == len(self.endpoints) - 1:
                await asyncio.sleep(min(0.1, max(0.0, deadline_s - time.monotonic())))
        lost = NoAnswer(failed, self.name)
        if unsure:
            raise TimeoutError(str(lost)) from lost
        raise lost

    def _patience_s(self, path: str, left_s: float) -> float:
        """How long one member is waited for before the next one is asked, of the time that is left.

        Where one alone is ill the next answers, and that is soon again.  Where all are slow each
        wait in vain makes the next one longer, until it is as long as they need."""
        if len(self.endpoints) == 1:
            return left_s
        known_s = self._took_s.get(path, max(self._took_s.values(), default=0.0))
        least_s = LOST_TRY_S if self._is_electing() else TRY_S
        return min(left_s, TRY_MOST_S, max(least_s, SLOW_TIMES * known_s))

    def _is_electing(self) -> bool:
        return time.monotonic() - self._lost_s < ELECTION_S

    def _waited(self, path: str, since_s: float, error: BaseException) -> None:
        """Nobody answered.  Without a connection that says nothing of how long an answer takes."""
        is_silent = isinstance(error, TimeoutError)
        if is_silent and not isinstance(error, aiohttp.ConnectionTimeoutError):
            took_s = time.monotonic() - since_s
            self._took_s[path] = max(took_s, self._took_s.get(path, 0.0))

    def _next(self) -> None:
        for _ in self.endpoints:
            self._first = (self._first + 1) % len(self.endpoints)
            if _host(self.endpoints[self._first]) not in self._avoided:
                return
        self._first = (self._first + 1) % len(self.endpoints)  # better a lost one than nobody

    def avoid(self, hosts: frozenset[str]) -> None:
        """Members on these hosts are passed by while another is left: a machine without power ends
        no connection, and a question to it, or a watch, would wait for its whole time."""
        if any(_host(one) in hosts - self._avoided for one in self.endpoints):
            self._lost_s = time.monotonic()
        self._avoided = hosts
        if _host(self.endpoints[self._first]) in hosts:
            self._next()
        if all(_host(one) in hosts for one in self.endpoints):
            return
        for endpoint, limit in self._asked:
            if _host(endpoint) in hosts and not limit.expired():
                limit.reschedule(0.0)  # as if it had been waited for: the next member is asked
        if self._streaming is not None and _host(self._streaming[0]) in hosts:
            self._streaming[1].close()

    async def _authorised(self, endpoint: str, path: str, body: Json, limit_s: float) -> Answer:
        """With a token, and with another one where it has run out; nothing was done then."""
        begun_s = time.monotonic()
        if self._login.user and not self._token:
            await self._log_in(endpoint, limit_s)
        try:
            return await self._post(endpoint, path, body, limit_s)
        except Refused as error:
            if not self._login.user or not _wants_login(error):
                raise
        limit_s -= time.monotonic() - begun_s
        await self._log_in(endpoint, limit_s)
        return await self._post(endpoint, path, body, limit_s)

    async def _log_in(self, endpoint: str, limit_s: float) -> None:
        self._token = ""
        user, password = self._login
        answer = await self._post(
            endpoint, LOG_IN, {"name": user, "password": password}, limit_s)
        self._token = answer.token

    async def _post(self, endpoint: str, path: str, body: Json, limit_s: float) -> Answer:
        begun_s = time.monotonic()
        try:
            async with self._waits_for(endpoint), self._open().post(
                endpoint + path, data=json.dumps(body).encode(), headers=self._headers(),
                timeout=_timeout(limit_s),
            ) as response:
                text = await self._read(response)
                status = response.status
        except (TimeoutError, aiohttp.ClientError) as why:
            self._waited(path, begun_s, why)
            self.traffic.count(path, "failed")
            raise
        self._took_s[path] = time.monotonic() - begun_s
        self.traffic.answered(self._took_s[path])
        answer = _decoded(endpoint, path, text)
        error = error_of(answer)
        if status != 200 or error is not None:
            self.traffic.count(path, "refused")
            raise self._refused(endpoint, error or answer, status)
        self.traffic.count(path, "ok")
        return answer

    @contextlib.asynccontextmanager
    async def _waits_for(self, endpoint: str) -> AsyncGenerator[None]:
        """TimeoutError once its host is to be avoided."""
        async with asyncio.timeout(None) as limit:
            self._asked.add((endpoint, limit))
            try:
                yield
            finally:
                self._asked.discard((endpoint, limit))

    async def version(self, limit_s: float) -> tuple[str, str]:
        """(endpoint, version) of the member whom the next question goes to.  StoreError when it is
        older than this client, or none answers."""
        failed: dict[str, str] = {}
        deadline_s = time.monotonic() + limit_s
        for _ in self.endpoints:
            endpoint, begun_s = self.endpoints[self._first], time.monotonic()
            left_s = deadline_s - begun_s
            if left_s <= 0.0:
                break
            timeout = _timeout(self._patience_s(VERSION, left_s))
            try:
                async with self._open().get(endpoint + VERSION, timeout=timeout) as response:
                    text = await self._read(response)
            except (TimeoutError, aiohttp.ClientError) as error:
                self._waited(VERSION, begun_s, error)
                failed[endpoint] = _why(error)
                self._next()
                continue
            self._took_s[VERSION] = time.monotonic() - begun_s
            said = _decoded(endpoint, VERSION, text).etcdserver
            parts = said.split(".")
            if len(parts) < 2 or not (parts[0] + parts[1]).isdecimal():
                raise StoreError(f"store: {endpoint} is no etcd (/version says {text[:100]!r}): "
                                 "set store.url to etcd's client port, 2379 by default")
            if (int(parts[0]), int(parts[1])) < OLDEST:
                raise StoreError(f"store: {endpoint} is etcd {said}: install 3.4 or newer there")
            return endpoint, said
        raise NoAnswer(failed, self.name)

    # ------------------------------------------------------------- what goes on coming

    async def stream(self, path: str, requests: list[Json]) -> AsyncGenerator[Result]:
        """Results as they come, from one member, until it ends.  Raises Refused for what etcd
        says is wrong, TimeoutError or aiohttp.ClientError where the connection is lost."""
        if self._login.user and not self._token:
            await self._log_in(self.endpoints[self._first], self._patience_s(LOG_IN, TRY_MOST_S))
        endpoint = self.endpoints[self._first]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        # A member that loses its leader would go on in silence: it shall say so and end.
        headers = self._headers() | {"Grpc-Metadata-hasleader": "true"}
        body = b"".join(json.dumps(one).encode() for one in requests)
        try:
            async with self._open().post(
                endpoint + path, data=body, headers=headers, timeout=timeout
            ) as response:
                self.traffic.received_bytes += _raw_size(response)
                self._streaming = endpoint, response
                rest = bytearray()
                async for chunk in response.content.iter_any():
                    self.traffic.received_bytes += len(chunk)
                    rest += chunk
                    if len(rest) > LINE_MAX:
                        raise StoreError(f"store: {endpoint} sends a line of more than "
                                         f"{LINE_MAX} bytes")
                    *lines, last = rest.split(b"\n")
                    rest = bytearray(last)
                    for line in lines:
                        yield self._result(endpoint, path, bytes(line))
                if rest.strip():
                    yield self._result(endpoint, path, bytes(rest))
        except (TimeoutError, aiohttp.ClientError, Refused):
            self.traffic.count(path, "failed")
            if self.endpoints[self._first] == endpoint:
                self._next()
            raise
        finally:
            self._streaming = None

    def _result(self, endpoint: str, path: str, line: bytes) -> Result:
        answer = _decoded(endpoint, path, line)
        error = error_of(answer)
        if error is not None:
            refused = self._refused(endpoint, error, 0)
            if _wants_login(refused):
                self._token = ""
            raise refused
        return answer.result

    # ------------------------------------------------------------- details

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self._tls if self._tls is not None else True, limit=16, keepalive_timeout=60.0)
            self._session = aiohttp.ClientSession(
                connector=connector, trace_configs=[trace_of(self.traffic)],
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                headers={"Content-Type": "application/json"}, trust_env=False)
        return self._session

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        found = bytearray()
        self.traffic.received_bytes += _raw_size(response)
        async for chunk in response.content.iter_any():
            self.traffic.received_bytes += len(chunk)
            found += chunk
            if len(found) > ANSWER_MAX:
                raise TooLong(f"store: etcd answers with more than {ANSWER_MAX} bytes")
        return bytes(found)

    def _refused(self, endpoint: str, error: Answer, status: int) -> Refused:
        """With the sentence that says what to do."""
        code = error.grpc_code or error.code
        message = str(error.message or error.error or f"HTTP {status}")[:300]
        if not code and status in (502, 503, 504):
            code = UNAVAILABLE
        return Refused(f"store: etcd at {endpoint.partition('://')[2]} says: {message}"
                       f"{self._remedy(code, message)}", code, message)

    def _remedy(self, code: int, message: str) -> str:
        user = self._login.user
        if "authentication failed" in message:
            return f": set store.user and store.password_file to what etcd has for {user!r}"
        if code == PERMISSION_DENIED or "permission denied" in message:
            return (f": let {user!r} read and write the cluster's keys: etcdctl role "
                    "grant-permission ROLE readwrite --prefix=true /holdfast/")
        if "authentication is not enabled" in message:
            return (": take store.user out, or run etcdctl auth enable; an etcd that lost its data "
                    "has lost its users as well, see docs/cluster.md")
        if "user name is empty" in message or "auth token" in message:
            return ": it wants a user: set store.user and store.password_file"
        if "space exceeded" in message:
            return (": it has no space left: etcdctl compact and defrag, then etcdctl alarm "
                    "disarm; see docs/cluster.md")
        return ""


def _timeout(limit_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=max(0.01, limit_s), sock_connect=CONNECT_S)


def _host(endpoint: str) -> str:
    return host_of(endpoint.partition("://")[2])


def _wants_login(error: Refused) -> bool:
    return error.code == UNAUTHENTICATED or any(one in error.message for one in LOGIN_AGAIN)


def _raw_size(response: aiohttp.ClientResponse) -> int:
    return 15 + sum(len(name) + len(value) + HEADER_BYTES for name, value in response.raw_headers)


def _decoded(endpoint: str, path: str, text: bytes) -> Answer:
    try:
        return decode(text)
    except ValueError as error:
        why = f"answers as no etcd does ({text[:80]!r}): set store.url to etcd's client port, 2379"
        if text.startswith(b"CommonName"):  # of a client's certificate, once there are users
            why = "takes no certificate that has a common name: set store.cert_file to one of none"
        raise StoreError(f"store: {endpoint}{path} {why}") from error


def _why(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return f"{error}: set store.ca_file to the certificates that signed its own"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # a name that cannot be resolved has one below zero
        said = os.strerror(number) if number and number > 0 else error.os_error.strerror
        return said or str(error.os_error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def open_gateway(settings: settings.Store) -> Gateway:
    """By these settings.  StoreError names the one, or the file, that is not as it must be."""
    try:
        endpoints = address.parse(settings.url).endpoints
        tls = address.tls_context(settings)
        password = address.read_password(settings.password_file) if settings.user else ""
    except ValueError as error:
        raise StoreError(str(error)) from error
    return Gateway(endpoints, tls, Login(settings.user, password))
