"""The conversation with EC2's instance metadata service, version 2: a token first, then questions.

Owns the connection, the token and the bounds of an answer.  Version 1, which needs no token, is
never spoken: it hands an instance's secrets to any program on this node that can be made to fetch
an address.  No proxy is used and no redirection followed.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from ..contract import NoData

if TYPE_CHECKING:
    import http.client

ADDRESS = "169.254.169.254:80"
TIMEOUT_S = 1.0  # of one read; a healthy service answers in 2 ms
TOTAL_S = 1.8  # of one reading: a service that drips a byte at a time ends here
ANSWER_MAX_BYTES = 64 << 10
TOKEN_MAX_BYTES = 1024
TOKEN_S = 21600
NO_TOKENS = (404, 405, 501)  # to the question for a token: version 1 alone, or another service
REFUSED = 403


class Refused(OSError):
    """The service answered with something else than the document; the message names what to set."""


class Metadata:
    """One service.  `with` it ask; the connection lives as long as the block, the token longer."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._token = ""
        self._renew_s = 0.0  # CLOCK_MONOTONIC
        self._until_s = 0.0
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Metadata:
        import http.client  # here, for the agent imports this module to know the metrics

        self._until_s = time.monotonic() + TOTAL_S
        self._connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str) -> str | None:
        """The text at /latest/PATH; None when there is none.  Refused or another OSError when the
        service does not answer the question; NoData when it knows no tokens."""
        for attempt in range(2):
            if not self._token or time.monotonic() >= self._renew_s:
                self._ask_token()
            status, text = self._ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status != 401 or attempt:
                break
            self._token = ""  # it was taken back, as after a stop and start of the instance
        if status == 404:
            return None
        if status != 200:
            raise Refused(f"instance metadata: status {status} for {path}")
        return text

    def _ask_token(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        status, token = self._ask("PUT", "api/token", headers)
        if status in NO_TOKENS:
            raise NoData(f"{self._host} knows no tokens: only version 2 of instance metadata is "
                         "spoken here")
        if status == REFUSED:
            raise Refused("instance metadata is switched off for this instance: set "
                          "HttpEndpoint=enabled or put ec2 into collectors.disable")
        good = token.isascii() and token.isprintable() and 0 < len(token) <= TOKEN_MAX_BYTES
        if status != 200 or not good or " " in token:
            raise Refused(f"instance metadata: status {status} instead of a token")
        self._token, self._renew_s = token, time.monotonic() + TOKEN_S / 2

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and text of one answer.  OSError for all that can go wrong with it."""
        import http.client

        connection = self._connection
        assert connection is not None, "asked outside of its block"
        try:
            connection.request(method, f"/latest/{path}", headers=headers)
            response = connection.getresponse()
            parts, size = [], 0
            while part := response.read1(16384):
                parts.append(part)
                size += len(part)
                if size > ANSWER_MAX_BYTES:
                    raise Refused(f"instance metadata: {path} is longer than {ANSWER_MAX_BYTES} "
                                  "bytes")
                if time.monotonic() > self._until_s:
                    raise Refused(f"instance metadata: {path} took longer than {TOTAL_S:g} s")
            if response.length:  # cut short: what follows on this connection means nothing
                connection.close()
            response.close()
        except http.client.HTTPException as error:
            raise Refused(f"instance metadata: {path}: {error!r}") from error
        except TimeoutError as error:
            raise Refused(
                f"instance metadata: {self._host} does not answer; in a container the instance's "
                "hop limit must be 2"
            ) from error
        return response.status, b"".join(parts).decode("utf-8", "replace")
