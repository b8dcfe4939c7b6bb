"""Who may ask for what: roles and tokens.

Owns the check of each request before its handler runs.  Reading is free on loopback and on the unix
socket, except for the words of other people's jobs (visibility.py); changing something needs a
role, and over TCP a token.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from ..config import tokens as config_tokens
from ..config.load import ConfigError
from ..config.tls import client_names
from ..config.tokens import OPERATOR, is_loopback, read_tokens
from ..history.audit import Audit
from ..launchers.connection import peer
from .rate_limit import ALERT, CHANGE, READ, WRONG_TOKEN, RateLimit
from .visibility import Owner, Reader, peer_uid, reader

NOBODY = ""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ALWAYS_OPEN = ("/", "/healthz", "/readyz")  # the page itself holds no data
ALERTS = "/api/v1/alerts"
STARTS = "/api/v1/starts/"
RUNBOOKS = "/runbooks"  # no more do these, and who opens an alert's link brings no token


class Tokens:
    """Bearer tokens and their roles, from a file that only its owner may read."""

    def __init__(self, file: str) -> None:
        """Reads FILE ("" = none).  ConfigError names file and what to set."""
        errors: list[str] = []
        self._roles = read_tokens(file, errors)
        if errors:
            raise ConfigError(errors)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def role(self, header: str) -> str:
        """The role of an Authorization header; every token is compared, in constant time."""
        scheme, _, token = header.partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")  # bytes that are no text, too
        found = NOBODY
        for known, role in self._roles:
            if hmac.compare_digest(known, given) and scheme == "Bearer":
                found = role
        return found


def peer_of(request: web.Request) -> tuple[int, int] | None:
    """(pid, uid) of a unix socket's peer; None over TCP."""
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return peer(sock)


def uid_of(request: web.Request) -> int:
    """The user behind a request, as the kernel says; -1 where it came over the network."""
    unix_peer = peer_of(request)
    if unix_peer is not None:
        return unix_peer[1]
    sock = request.transport.get_extra_info("socket") if request.transport else None
    uid = peer_uid(sock) if sock is not None else None
    return uid if uid is not None else -1


class Roles:
    """What a request over TCP proves: a token's role, or that of a client's certificate."""

    def __init__(self, tokens: Tokens, operators: tuple[str, ...]) -> None:
        """`operators`: names of certificates."""
        self.tokens, self._operators = tokens, operators

    def __bool__(self) -> bool:
        """Whether anybody could be an operator."""
        return bool(self.tokens) or bool(self._operators)

    def of(self, request: web.Request) -> str:
        transport = request.transport
        names = client_names(transport.get_extra_info("peercert") if transport else None)
        if any(one in self._operators for one in names):
            return OPERATOR
        role = self.tokens.role(request.headers.get("Authorization", ""))
        return role or (config_tokens.READ if names else NOBODY)


def client_of(request: web.Request) -> str:
    """Whom a request is counted for; "" where it is not counted."""
    address = str(request.remote or "")
    uid = uid_of(request) if not address or is_loopback(address) else -1
    if uid in (0, os.getuid()):
        return ""
    return f"uid {uid}" if uid >= 0 else address


def reader_of(request: web.Request, roles: Roles, of_run: Owner, of_incident: Owner) -> Reader:
    """The reader of a request, by the peer of the socket, by token or certificate."""
    uid = uid_of(request)
    role = roles.of(request)
    return reader(uid if uid >= 0 else None, role, of_run, of_incident)


class Authorizer:
    """The middleware of the web server."""

    def __init__(
        self, roles: Roles, loopback_only: bool, run_owner: Callable[[str], int | None],
        audit: Audit, rates: RateLimit,
    ) -> None:
        self._roles, self._loopback_only, self._run_owner = roles, loopback_only, run_owner
        self._audit, self._rates = audit, rates

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuses or passes on."""
        answer: web.StreamResponse
        wait_s, why_not = self._wait_s(request), self._refusal(request)
        # What is refused for who asks costs nothing, and is counted; a token could be guessed.
        if wait_s and (why_not is None or why_not[0] == 401):
            # Alertmanager sends again what was answered so, and gives up what 429 answered.
            status = 503 if request.path == ALERTS else 429
            answer = refuse(status, "too many requests", f"ask again in {math.ceil(wait_s)} s")
            answer.headers["Retry-After"] = str(math.ceil(wait_s))
        elif why_not is not None:
            answer = refuse(*why_not)
            self._note(request, why_not[1])
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = refuse(error.status, error.reason or "refused", "")
        return answer

    def _note(self, request: web.Request, why: str) -> None:
        """Whoever would change what is not theirs to change is in the journal."""
        if request.method not in ("GET", "HEAD"):
            route = request.match_info.route.resource
            what = f"{request.method} {route.canonical if route is not None else 'elsewhere'}"
            self._audit.refused(uid_of(request), what, why, request.path)

    def _wait_s(self, request: web.Request) -> float:
        """How long whoever asks has to wait, 0.0 for not at all."""
        client = client_of(request)
        if not client:
            return 0.0
        reads = request.method in ("GET", "HEAD")
        kind = READ if reads else ALERT if request.path == ALERTS else CHANGE
        said = request.headers.get("Authorization", "")
        wrong = bool(said) and not self._roles.tokens.role(said)
        return self._rates.wait_s(client, kind, time.monotonic(), WRONG_TOKEN if wrong else 1.0)

    def _refusal(self, request: web.Request) -> tuple[int, str, str] | None:
        peer = peer_of(request)
        changes = request.method not in ("GET", "HEAD")
        if peer is not None:
            own = request.path.startswith(STARTS)  # each starts and accepts what is his own
            return self._peer_refusal(request, peer[1]) if changes and not own else None
        host = request.headers.get("Host", "").rsplit(":", 1)[0]
        if self._loopback_only and not is_loopback(host):
            # DNS rebinding: the name of a foreign page was pointed at this address.
            return 403, f"host {host!r} is not this machine", "ask for 127.0.0.1 or localhost"
        role = self._roles.of(request)
        if changes and not self._roles:
            return (403, "nothing is changed over TCP without tokens",
                    "api.tokens_file, or use the command line on the node")
        if changes and role != OPERATOR:
            return 401, "an operator's token is needed", "Authorization: Bearer TOKEN"
        is_open = request.path in ALWAYS_OPEN or request.path.startswith(RUNBOOKS)
        if not self._loopback_only and not role and not is_open:
            return 401, "a token is needed", "Authorization: Bearer TOKEN"
        return None

    def _peer_refusal(self, request: web.Request, uid: int) -> tuple[int, str, str] | None:
        if uid in (0, os.getuid()):
            return None
        run = request.match_info.get("run", "")
        if run and self._run_owner(run) == uid:
            return None
        return 403, f"uid {uid} may change its own runs only", "ask the node's operator"


def refuse(status: int, error: str, what_to_set: str) -> web.Response:
    """An error as JSON: what is wrong and what to set."""
    return web.json_response({"error": error, "set": what_to_set}, status=status)
