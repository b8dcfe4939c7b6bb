"""All that etcd holds below a prefix, in pages of a fit size."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from holdfast.agent.store.base import StoreError
from holdfast.agent.store.etcd_answers import Answer, Header, KeyValue
from holdfast.agent.store.etcd_gateway import Refused, TooLong
from holdfast.agent.store.etcd_listing import PAGE, PAGE_MOST, everything

ANSWER_BYTES = 16 << 20


class Server:
    """Answers as etcd does, and is cut off beyond so many bytes as the gateway cuts it off."""

    def __init__(self, sizes: list[int]) -> None:
        self.rows = [KeyValue(f"/p/{number:06d}".encode(), bytes(size), 1, number + 1)
                     for number, size in enumerate(sizes)]
        self.pages: list[int] = []
        self.in_time = PAGE_MOST  # so many rows are answered before the question is given up
        self.longest = 0

    async def ask(self, path: str, body: dict[str, Any], limit_s: float) -> Answer:
        assert path == "/v3/kv/range" and limit_s == 4.0
        assert body.get("revision", "9") == "9"
        begin, limit = base64.b64decode(body["key"]), int(body["limit"])
        self.pages.append(limit)
        rows = [row for row in self.rows if row.key >= begin]
        found, size = rows[:limit], sum(len(row.value) for row in rows[:limit])
        self.longest = max(self.longest, size)
        if limit > self.in_time:
            raise StoreError("store: no member of etcd answers")
        if size > ANSWER_BYTES:
            raise TooLong("store: etcd answers with more")
        return Answer(header=Header(revision=9), kvs=found, more=len(rows) > limit,
                      count=len(rows))


def listed(sizes: list[int]) -> Server:
    server = Server(sizes)
    rows, revision = asyncio.run(everything(server, "/p/", 4.0))  # type: ignore[arg-type]
    assert [row.key for row in rows] == [row.key for row in server.rows] and revision == 9
    return server


def test_thousands_of_short_documents_take_few_answers() -> None:
    server = listed([300] * 50_000)
    assert server.pages[:4] == [PAGE, 4 * PAGE, PAGE_MOST, PAGE_MOST] and len(server.pages) < 105


@pytest.mark.parametrize("sizes", [[], [300], [1 << 20] * 40, [300] * PAGE])
def test_few_or_long_ones_come_whole(sizes: list[int]) -> None:
    server = listed(sizes)
    assert server.pages[0] == PAGE and len(server.pages) <= len(sizes) + 2


def test_plans_behind_thousands_of_short_ones_are_asked_for_in_smaller_pages() -> None:
    server = listed([100] * 3000 + [1 << 20] * 100)
    assert PAGE_MOST in server.pages and server.pages[-1] == 1 and len(server.pages) < 120


def test_a_document_that_is_too_long_alone_is_an_error() -> None:
    server = Server([100, ANSWER_BYTES + 1])
    with pytest.raises(TooLong):
        asyncio.run(everything(server, "/p/", 4.0))  # type: ignore[arg-type]
    assert server.pages == [PAGE, 8, 1, 1]


def test_what_takes_too_long_is_asked_for_in_the_pages_of_the_start() -> None:
    """Plans lie behind thousands of short documents, and a slow member needs seconds for many."""
    server = Server([300] * 1000)
    server.in_time = 4 * PAGE
    rows, _ = asyncio.run(everything(server, "/p/", 4.0))  # type: ignore[arg-type]
    assert len(rows) == 1000 and server.pages[:4] == [PAGE, 4 * PAGE, PAGE_MOST, PAGE]
    assert set(server.pages[3:]) == {PAGE}
    server.in_time = 0
    with pytest.raises(StoreError):
        asyncio.run(everything(server, "/p/", 4.0))  # type: ignore[arg-type]


def test_an_answer_that_is_no_is_not_asked_for_again() -> None:
    class No(Server):
        async def ask(self, path: str, body: dict[str, Any], limit_s: float) -> Answer:
            if len(self.pages) == 2:
                raise Refused("store: compacted", 11, "compacted")
            return await super().ask(path, body, limit_s)

    server = No([300] * 1000)
    with pytest.raises(Refused):
        asyncio.run(everything(server, "/p/", 4.0))  # type: ignore[arg-type]
    assert len(server.pages) == 2
