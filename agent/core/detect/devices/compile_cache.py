"""Locks that a killed compile left in the compile cache.

Owns when such a lock is a fault: no compiler can own it (collectors/compile_cache.py says which),
and it is older than the gap between two stages of a compile.  Shown and counted; its removal is
asked for in core/unlock.py.  Pure.
"""

from __future__ import annotations

from ...model import DEGRADED, Rows, Verdict

DETECTOR = "compile_cache"
PREFIX = "compile_cache_"
AGE = f"{PREFIX}lock_age_seconds"
STALE_S = 120.0  # a compile's stages follow each other within seconds


def verdicts(node: str, samples: Rows) -> list[Verdict]:
    """One for each lock that nobody on this node can own."""
    found = []
    for name, subject, age_s, _ in samples:
        if name != AGE or age_s < STALE_S:
            continue
        path, _, uid = subject.removeprefix("path=").partition(",uid=")
        found.append(Verdict(
            fault="compile_lock_stale", subject=f"node/{node}/lock{path}", severity=DEGRADED,
            confidence=1.0, detector=DETECTOR,
            reason=f"{path} is {age_s / 60:.0f} min old and no compiler can own it: "
            "whoever wants this program waits for it without end",
            evidence=(("path", path), ("uid", uid)),
        ))
    return found
