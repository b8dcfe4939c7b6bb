"""The store of the virtual cluster: compare-and-set and leases, with an etcd's ways to fail.

Owns documents, versions and leases.  Must not know what a document means.  The network between a
node and the store (delays, lost requests, lost acknowledgements) is the edge's; here live only
what the store itself decides: versions, the lease clock, being unavailable, and how far behind a
serializable read may be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..core.model import Doc, Documents, StoreWrite
from ..core.model.subject import LEASE, subject_of
from .loop import Loop

HISTORY = 64  # snapshots kept for stale reads


class Answer:
    """What became of one write.  `error` opens with conflict, lease or unavailable."""

    __slots__ = ("error", "ok")

    def __init__(self, ok: bool, error: str = "") -> None:
        self.ok = ok
        self.error = error


class MemoryStore:
    """One linearizable store.  `compare`, `check_lease` are True except in mutants."""

    def __init__(self, loop: Loop, lease_s: float, clock_rate: float = 1.0) -> None:
        self.loop, self.lease_s, self.clock_rate = loop, lease_s, clock_rate
        self.available = True
        self.compare = True
        self.check_lease = True
        self.docs: dict[str, Doc] = {}
        self.leases: dict[str, tuple[str, float]] = {}  # run -> (holder, end on the store's clock)
        self.on_accept: Callable[[str, StoreWrite, Doc | None], None] = lambda *_: None
        self.on_change: Callable[[], None] = lambda: None
        self._past: deque[tuple[float, Documents, tuple[tuple[str, str], ...]]] = deque(
            maxlen=HISTORY)
        self._listing = Documents()

    def clock_s(self) -> float:
        """The store's own clock: nobody else's, and not exactly true."""
        return self.loop.now_s * self.clock_rate

    def holder(self, run: str) -> str:
        """Who holds the lease of `run` now, "" for nobody."""
        held = self.leases.get(run)
        return held[0] if held is not None and held[1] > self.clock_s() else ""

    def write(self, node: str, write: StoreWrite) -> Answer:
        """One transaction: compare, then set.  Linearizable; all or nothing."""
        if not self.available:
            return Answer(False, "unavailable: the store has no leader")
        kind, run, _ = subject_of(write.key)
        if kind == LEASE:
            return self._grant(node, run, write)
        old = self.docs.get(write.key)
        version = old.version if old is not None else 0
        if self.compare and version != write.expect_version:
            return Answer(False, f"conflict: version {version}, expected {write.expect_version}")
        if write.lease and self.check_lease and self.holder(write.lease) != node:
            return Answer(False, f"lease: {self.holder(write.lease) or 'nobody'} holds it")
        self.on_accept(node, write, old)
        self.docs[write.key] = Doc(key=write.key, version=version + 1, body=write.body)
        self._remember()
        return Answer(True)

    def seed(self, key: str, body: bytes) -> None:
        """A document that is there before the storm begins; nobody judges it."""
        self.docs[key] = Doc(key=key, version=1, body=body)
        self._remember()

    def _grant(self, node: str, run: str, write: StoreWrite) -> Answer:
        holder = self.holder(run)
        wanted = write.body.decode()
        if holder and holder != wanted:
            return Answer(False, f"lease: {holder} holds it")
        if wanted != node:
            return Answer(False, f"lease: {node} asked in the name of {wanted}")
        self.leases[run] = (node, self.clock_s() + self.lease_s)
        if not holder:
            self._remember()
        return Answer(True)

    def _remember(self) -> None:
        self._listing = Documents(self.docs.values())
        self._past.append((self.loop.now_s, self._listing, self._holders()))
        self.on_change()

    def _holders(self) -> tuple[tuple[str, str], ...]:
        now = self.clock_s()
        return tuple((run, who) for run, (who, end) in self.leases.items() if end > now)

    def read(self, behind_s: float = 0.0) -> tuple[Documents, tuple[tuple[str, str], ...]]:
        """Documents and lease holders; `behind_s` > 0 is a serializable read from a member that
        far behind (never newer than asked for, never a mix of two moments)."""
        if behind_s <= 0.0:
            return self._listing, self._holders()
        then = self.loop.now_s - behind_s
        for time_s, docs, holders in reversed(self._past):
            if time_s <= then:
                return docs, holders
        return Documents(), ()
