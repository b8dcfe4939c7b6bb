"""Locks that a killed compile left in the compile cache.

Owns when such a lock is a fault: no compiler can own it (collectors/compile_cache.py says which),
and it is older than the gap between two stages of a compile, or who held it is seen to be dead.
Shown and counted; its removal is asked for in core/nodes/stale_locks.py.  Pure.
"""

from __future__ import annotations

from ...model import DEGRADED, Verdict
from ..detector import Detector, NodeView

PREFIX = "compile_cache_"
AGE = f"{PREFIX}lock_age_seconds"
STALE_S = 120.0  # a compile's stages follow each other within seconds


class CompileCache(Detector):
    """The verdicts on this node's compile cache: one for each lock that nobody here can own."""

    name = "compile_cache"
    reads = (PREFIX,)

    def look(self, view: NodeView) -> list[Verdict]:
        found = []
        for name, subject, age_s, _ in view.rows:
            if name != AGE:
                continue
            path, _, tail = subject.removeprefix("path=").partition(",uid=")
            uid, _, dead = tail.partition(",dead=")
            if age_s < STALE_S and dead in ("", "0"):
                continue
            why = "no compiler can own it" if dead in ("", "0") else (
                f"process {dead}, which held it, is dead")
            old = f"{age_s / 60:.0f} min" if age_s >= STALE_S else f"{age_s:.0f} s"
            found.append(self.node_verdict(
                "compile_lock_stale", f"lock{path}", DEGRADED,
                f"{path} is {old} old and {why}: whoever wants this program waits for it without "
                "end", (("path", path), ("uid", uid), ("age_s", f"{age_s:.0f}"))))
        return found
