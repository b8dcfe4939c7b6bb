"""The store of the virtual cluster: the one in memory, on a virtual clock and with a past to read.

Owns how far behind a serializable read may be, what a store that lost its disk holds or was
restored to, and what mutants take out.  Documents, versions and
leases are agent/store/memory.py's, which the stores' conformance suite holds; the network between a
node and the store (delays, lost requests, lost acknowledgements) is in outgoing.py.
"""

from __future__ import annotations

import math
from collections import deque

from ..core.model import Doc, Documents
from ..store.identity import refusal
from ..store.memory import MemoryServer
from .loop import Loop

HISTORY = 64  # snapshots kept for stale reads
OWN_ID = "the cluster's own"


class VirtualStore(MemoryServer):
    """One linearizable store.  `compare`, `check_lease` are True except in mutants."""

    def __init__(self, loop: Loop, lease_s: float, clock_rate: float = 1.0) -> None:
        super().__init__(lambda: loop.now_s * clock_rate, lease_s)
        self.loop = loop
        self.cluster_id = OWN_ID
        self._backup: dict[str, Doc] = {}
        self.lost_s = -math.inf  # when its disk was lost last
        self._left: dict[str, Doc] | None = None  # of a lost disk, once somebody restores it
        self.compare = True
        self.check_lease = True
        self._past: deque[tuple[float, Documents, tuple[tuple[str, str], ...]]] = deque(
            maxlen=HISTORY)
        self._listing = Documents()
        self.watchers.append(self._remember)

    def seed(self, key: str, body: bytes) -> None:
        """A document that is there before the storm begins; nobody judges it."""
        self.docs[key] = Doc(key=key, version=1, body=body)
        self._changed()

    def replace(self, other_id: str) -> None:
        """It comes back empty, or is another cluster's by now (`other_id`)."""
        self._backup, self.docs, self.leases, self.cluster_id = self.docs, {}, {}, other_id
        self._changed()

    def restore(self) -> None:
        """What it held is there again; leases do not come out of a backup."""
        if self.cluster_id != OWN_ID:
            self.docs, self.leases, self.cluster_id = self._backup, {}, OWN_ID
            self._past.clear()
            self._past.append((0.0, Documents(self.docs.values()), ()))  # nothing older is shown
            self._changed()

    def lose(self, behind_s: float) -> None:
        """Its disk is gone, and with it what it held since so long ago: the age of the backup, or
        of the oldest state that is remembered; all, where that is infinite."""
        then = self.loop.now_s - behind_s
        older = [docs for time_s, docs, _ in self._past if time_s <= then]
        docs = older[-1] if older else self._past[0][1]
        self._left = {} if math.isinf(behind_s) else {doc.key: doc for doc in docs}
        self.available, self.lost_s = False, self.loop.now_s

    def come_back(self) -> None:
        """A person has restored the backup, or seeded an empty one."""
        if self._left is None:
            return
        self.docs, self.leases, self._left = self._left, {}, None
        self._past.clear()
        self.available = True
        self._changed()

    def refused(self, known_id: str) -> str:
        """Why an agent that knows this cluster is to have nothing to do with the store."""
        return refusal(known_id, self.cluster_id, not known_id, "store: virtual")

    def _compare(self, key: str, expect_version: int) -> None:
        if self.compare:
            super()._compare(key, expect_version)

    def _check_lease(self, node: str, run: str) -> None:
        if self.check_lease:
            super()._check_lease(node, run)

    def _remember(self) -> None:
        self._listing = Documents(self.docs.values())
        self._past.append((self.loop.now_s, self._listing, self._holders()))

    def _holders(self) -> tuple[tuple[str, str], ...]:
        return tuple((run, who) for run in self.leases if (who := self.holder(run)))

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
