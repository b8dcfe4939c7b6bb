"""Whose answers the command line believes, and what it says of an answer that is none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli import client, main
from holdfast.worker import peers

from .test_commands import StandIn, agents  # noqa: F401  (a fixture)

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Agents = dict[str, StandIn]
STRANGER = 4242


def owned_by(path: Path, uid: int, patch: Patch) -> None:
    """Makes `path` look as if it were another user's."""
    true = os.lstat

    def lstat(which: str | os.PathLike[str], **given: Any) -> os.stat_result:
        found = list(true(which, **given))
        if Path(which) == path:
            found[4] = uid
        return os.stat_result(found)

    patch.setattr(client.os, "lstat", lstat)


@pytest.mark.parametrize("place", ["", "m5", "m5/api.sock"])
def test_a_place_of_another_user_is_passed_by(
    place: str, agents: Agents, tmp_path: Path, monkeypatch: Patch, capsys: Captured,  # noqa: F811
) -> None:
    owned_by(tmp_path / "r" / place, STRANGER, monkeypatch)
    assert main(["status", "--run", "m5"]) == 1
    said = capsys.readouterr()
    assert not said.out and f"belongs to uid {STRANGER}" in said.err
    assert main(["status", "--run", "other"]) == (0 if place else 1)


def test_a_peer_of_another_user_is_passed_by(
    agents: Agents, monkeypatch: Patch, capsys: Captured,  # noqa: F811
) -> None:
    monkeypatch.setattr(peers.struct, "unpack", lambda *_: (1, STRANGER, 1))
    assert main(["status"]) == 1
    said = capsys.readouterr()
    assert not said.out and f"is served by uid {STRANGER}" in said.err
    monkeypatch.setenv("HOLDFAST_AGENT_USER", str(STRANGER))
    assert main(["status"]) == 0


def test_a_folder_that_everybody_may_write_is_passed_by(
    agents: Agents, tmp_path: Path, capsys: Captured,  # noqa: F811
) -> None:
    (tmp_path / "r").chmod(0o777)
    assert main(["status"]) == 1
    assert "chmod o-w" in capsys.readouterr().err


class Raw:
    """Encodes to whatever text it was given."""

    def __init__(self, text: bytes) -> None:
        self.text = text


@pytest.fixture
def raw(agents: Agents, monkeypatch: Patch) -> Iterator[Agents]:  # noqa: F811
    class Body(str):
        def encode(self, *_: str, **__: str) -> bytes:
            return self.text  # type: ignore[attr-defined, no-any-return]

    def dumps(value: object, **given: Any) -> str:
        if isinstance(value, Raw):
            body = Body("")
            body.text = value.text  # type: ignore[attr-defined]
            return body
        return true(value, **given)

    true = json.dumps
    monkeypatch.setattr(json, "dumps", dumps)
    yield agents


@pytest.mark.parametrize("text", [
    b"[" * 200_000, b'{"a":' * 100_000, b"{", b"\xff\xfe", b"7", b"[]", b'{"runs": 7}', b"1" * 5000,
    b'{"node": "n", "runs": [7]}', b'{"node": 7, "runs": []}', b'"' + b"x" * (17 << 20) + b'"',
    b'{"node": "n", "runs": [{"run": "m5"}]}', b'{"node": "n", "runs": [{"run": "m5", "ranks": 3}]}'
], ids=range(13))
@pytest.mark.parametrize("command", [["status"], ["why"], ["explain", "rank_hung"], ["ledger"],
                                     ["inject", "kill"]])
def test_an_answer_that_is_none_ends_in_a_sentence(
    text: bytes, command: list[str], raw: Agents, capsys: Captured
) -> None:
    for one in raw.values():
        one.answers["/api/v1/status"] = Raw(text)
    code = main(command)
    said = capsys.readouterr().err
    assert code in (0, 1)
    if command in (["status"], ["why"]):
        assert code == 1
        # Two agents, each with the path of its socket.
        assert any(one.startswith("holdfast: ") and len(one) < 800 for one in said.splitlines())


@pytest.mark.parametrize("text", [b"7", b"[7]", b"{}", b"[{}]", b"[[[]]]", b'[{"id": 7}]'])
def test_so_does_any_other_answer(text: bytes, raw: Agents, capsys: Captured) -> None:
    for route in ("/api/v1/incidents", "/api/v1/incidents?all=1", "/api/v1/ledger",
                  "/api/v1/incidents/i-16", "/api/v1/drift?run=m5"):
        raw["m5"].answers[route] = Raw(text)
    for command in (["incidents", "--run", "m5"], ["incidents", "i-1"], ["ledger", "--run", "m5"],
                    ["explain", "rank_hung"], ["close", "i-1", "--reason", "x"]):
        assert main(command) in (0, 1)
    assert main(["drift", "--run", "m5"]) in (1, 3)
    assert "holdfast: " in capsys.readouterr().err


def test_a_fifo_in_the_place_of_the_address_holds_nobody_up(
    agents: Agents, tmp_path: Path,  # noqa: F811
) -> None:
    os.mkfifo(tmp_path / "r/m5/address")
    assert main(["status", "--run", "m5"]) == 0
