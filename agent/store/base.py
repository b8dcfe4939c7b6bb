"""What a store is: documents with versions, written by compare-and-set, and leases.

Owns the interface alone.  sqlite.py implements it for one node, etcd.py for many, memory.py for
tests; tests/unit/agent/test_store_conformance.py holds all three to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from ..core.model import Doc, StoreView, StoreWrite


class StoreError(Exception):
    """The store cannot be used; the text names the file or address and what to set."""


class InUse(StoreError):
    """Another process has it: it may let go by itself."""


class Conflict(Exception):
    """A compare-and-set found another version than expected, or the lease is another's; nothing
    was changed."""


RECENT_S = 10.0
RECENT_MAX = 256


class Traffic:
    """What went to a store elsewhere and came back, as HTTP; without TCP's own."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {}  # by call and outcome
        self.sent_bytes = 0
        self.received_bytes = 0
        self.latest_answer_s = 0.0
        self.answers_s = 0.0  # of all together
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_MAX)  # when, how long

    def count(self, path: str, outcome: str) -> None:
        key = path.rpartition("/")[2], outcome
        self.requests[key] = self.requests.get(key, 0) + 1

    def answered(self, seconds: float) -> None:
        self.latest_answer_s = seconds
        self.answers_s += seconds
        self._recent.append((time.monotonic(), seconds))

    def slowest_s(self) -> float:
        """The longest that an answer of the last RECENT_S took; 0.0 where there was none.  Reads
        may be fast where writes wait for a disk."""
        since_s = time.monotonic() - RECENT_S
        return max((took_s for at_s, took_s in self._recent if at_s >= since_s), default=0.0)


class Store(Protocol):
    """Documents with compare-and-set.  Calls return at once or raise; none of them hangs.

    `lease/RUN` is no document: a write of it, whose body is the node's name, takes the run's lease
    or renews it.  It ends by itself `lease_s` after the last renewal was sent, on this node's
    CLOCK_BOOTTIME, and no sooner than that in the store, unless a write with `over` takes it from
    its holder: then what the old one writes below it is a Conflict.
    """

    problem: str  # why this node's disk does not keep what was taken; "" where it does
    traffic: Traffic | None  # None where nothing leaves this node
    living: Callable[[], Collection[str]]  # runs that are here: their documents stay

    def view(self) -> StoreView:
        """What the store said last, and whether it answers."""

    def present(self) -> frozenset[str]:
        """The nodes whose agents hold their names in the store, as it said last."""

    async def put(self, write: StoreWrite) -> int:
        """Writes a document if its version is the expected one; returns the new version.  With
        `lease`, only while that run's lease is this node's, in the same transaction.

        Raises Conflict when it is not, StoreError when the store did not take it, and
        TimeoutError when it is not known whether it did: a refresh, or the watch, finds out.
        """

    async def delete(self, key: str, expect_version: int) -> None:
        """Takes a document away if its version is the expected one; raises as `put` does."""

    async def read(self, key: str) -> Doc:
        """One document as the store has it at this moment, its members agreed; version 0 where it
        has none.  Raises StoreError or TimeoutError where that cannot be known."""

    async def refresh(self) -> None:
        """Finds out again what the store holds and whether it answers."""

    async def watch(self, changed: Callable[[str], None]) -> None:
        """Follows the store until it is cancelled: `view` is right first, then `changed` says
        why it was called.  A store that failed is asked again for ever."""

    def avoid(self, hosts: frozenset[str]) -> None:
        """These hosts are lost: what runs there of the store is not asked while anything else is.
        """

    def close(self) -> Awaitable[None] | None:
        """Lets go of files, locks and connections; connections want to be waited for."""
