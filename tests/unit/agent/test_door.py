"""Whom a request is counted for, and who is let in, made to wait or refused at the door."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from holdfast.agent.config.tokens import OPERATOR, READ
from holdfast.agent.web import auth

STRANGER = 4711
WAITS_S = 12.3


def request(method: str = "GET", path: str = "/api/v1/ledger", remote: str = "10.0.0.9",
            resource: str = "", cert: str = "") -> Any:
    route = SimpleNamespace(resource=SimpleNamespace(canonical=resource) if resource else None)
    names = {"subject": ((("commonName", cert),),)} if cert else None
    info = {"peercert": names}
    return SimpleNamespace(
        method=method, path=path, remote=remote, headers={"Host": f"{remote}:9477"},
        transport=SimpleNamespace(get_extra_info=info.get),
        match_info=SimpleNamespace(route=route, get=lambda name, default: default))


class Door:
    """An authorizer whose clients have to wait for so long, and what it wrote down."""

    def __init__(self, wait_s: float = 0.0, loopback_only: bool = False) -> None:
        self.noted: list[tuple[Any, ...]] = []
        tokens: Any = SimpleNamespace(role=lambda header: "")
        audit: Any = SimpleNamespace(refused=lambda *what: self.noted.append(what))
        rates: Any = SimpleNamespace(wait_s=lambda *what: wait_s)
        self.roles = auth.Roles(tokens, ("op",))
        self.auth = auth.Authorizer(self.roles, loopback_only, lambda run: None, audit, rates)

    def answer(self, request: Any) -> tuple[int, str]:
        async def handler(request: Any) -> web.Response:
            return web.Response(status=204)

        answer = asyncio.run(self.auth.check(request, handler))
        return answer.status, answer.headers.get("Retry-After", "")


@pytest.mark.parametrize(("remote", "uid", "counted"), [
    ("10.0.0.9", STRANGER, "10.0.0.9"),  # another machine's numbers are not this one's
    ("127.0.0.1", STRANGER, f"uid {STRANGER}"), ("", STRANGER, f"uid {STRANGER}"),
    ("127.0.0.1", -1, "127.0.0.1"), ("127.0.0.1", 0, ""), ("", os.getuid(), "")])
def test_a_client_is_a_user_of_this_machine_or_an_address_beyond(
    remote: str, uid: int, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "uid_of", lambda request: uid)
    assert auth.client_of(request(remote=remote)) == counted


@pytest.mark.parametrize(("method", "path", "status", "hurried"), [
    ("GET", "/api/v1/ledger", 401, 429),  # a token could be guessed
    ("POST", "/api/v1/alerts", 401, 503),  # Alertmanager gives up what 429 answered
    ("GET", "/healthz", 204, 429)])
def test_who_asks_too_often_is_told_when_to_ask_again(
    method: str, path: str, status: int, hurried: int
) -> None:
    assert Door().answer(request(method, path)) == (status, "")
    assert Door(WAITS_S).answer(request(method, path)) == (hurried, "13")


@pytest.mark.parametrize("wait_s", [0.0, WAITS_S])
def test_what_is_refused_for_who_asks_is_said_and_written_down_however_often(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "peer_of", lambda request: (0, STRANGER))  # the number of a process
    door = Door(wait_s)
    assert door.answer(request("POST", "/x", "", "/api/v1/runs/{run}/{verb}")) == (403, "")
    assert door.answer(request("POST", "/x", "")) == (403, "")
    why = f"uid {STRANGER} may change its own runs only"
    assert door.noted == [(STRANGER, "POST /api/v1/runs/{run}/{verb}", why, "/x"),
                          (STRANGER, "POST elsewhere", why, "/x")]
    assert door.answer(request("GET", "/x", "")) == ((204, "") if not wait_s else (429, "13"))


@pytest.mark.parametrize(("cert", "role"), [("op", OPERATOR), ("somebody", READ), ("", "")])
def test_a_certificate_proves_an_operator_or_a_reader(cert: str, role: str) -> None:
    door = Door()
    assert door.roles.of(request(cert=cert)) == role
    assert door.answer(request("POST", cert=cert))[0] == (204 if role == OPERATOR else 401)
    assert door.answer(request("GET", cert=cert))[0] == (204 if role else 401)
