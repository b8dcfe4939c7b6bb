"""Everything below a prefix of etcd, page by page and of one revision.

Owns the size of a page: most documents are some hundred bytes, and a plan may have a megabyte.
"""

from __future__ import annotations

from .base import StoreError
from .etcd_answers import KeyValue, after, b64
from .etcd_gateway import Gateway, Json, Refused, TooLong

PAGE = 64  # documents in the first answer
PAGE_MOST, PAGE_BYTES = 512, 1 << 20  # of 16,384 nodes there are some 50,000
GROWS, SHRINKS = 4, 8


async def everything(
    gateway: Gateway, prefix: str, limit_s: float
) -> tuple[list[KeyValue], int]:
    """What the store held at one revision, and that.  `limit_s`: for each question."""
    rows: list[KeyValue] = []
    begin, end, revision, page = prefix.encode(), after(prefix.encode()), 0, PAGE
    most = PAGE_MOST
    while True:
        asked: Json = {"key": b64(begin), "range_end": b64(end), "limit": str(page)}
        if revision:
            asked["revision"] = str(revision)
        try:
            answer = await gateway.ask("/v3/kv/range", asked, limit_s)
        except TooLong:
            if page == 1:
                raise
            page = most = max(1, page // SHRINKS)
            continue
        except Refused:
            raise
        except StoreError:
            if page <= PAGE:
                raise
            page = most = PAGE  # plans lie behind thousands of short ones: it may take too long
            continue
        revision = revision or answer.header.revision
        rows += answer.kvs
        if not answer.more or not answer.kvs:
            return rows, revision
        begin = answer.kvs[-1].key + b"\0"
        mean_bytes = max(1, sum(len(row.value) for row in answer.kvs) // len(answer.kvs))
        page = max(1, min(most, GROWS * page, PAGE_BYTES // mean_bytes))
