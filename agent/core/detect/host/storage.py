"""File systems: which are nearly full, will be full soon, or became read-only.

Owns the limits and the forecast.  What was writable once in this boot is in the node's memory, so
that a restart of the agent forgets no remount.  Shown, never acted on.  Pure.
"""

from __future__ import annotations

from collections.abc import Container

from ...model import DEGRADED, WARN, Verdict
from ...series.trend import EVERY_S, POINTS_MIN, Trend
from ..detector import Detector, NodeView

PREFIX = "host_filesystem_"
MOUNTS_MAX = 128
# Of a small file system the share counts, of a large one the amount: 10 % of 30 TB is no want.
LOW_SHARE, LOW_BYTES = 0.10, 10e9
FULL_SHARE, FULL_BYTES = 0.02, 1e9
LOW_INODES, FULL_INODES = 0.05, 0.01
FULL_SOON_S = 4 * 3600.0
FORECAST_S = EVERY_S * POINTS_MIN  # from the first reading to a forecast
STILL_SOON = 1.5  # a forecast once made stays until it is this many times as far away
NAMES = frozenset(PREFIX + one for one in (
    "size_bytes", "available_bytes", "inodes", "free_inodes", "readonly"
))
Finding = tuple[str, str]  # severity, why


class Storage(Detector):
    """The verdicts on this node's file systems.  Windows begin anew with the agent; the mounts that
    were writable in this boot are its memory."""

    name = "storage"
    reads = (PREFIX,)
    warm_s = FORECAST_S
    memory = list[str]

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._trends: dict[tuple[str, str], Trend] = {}
        self._soon: set[tuple[str, str]] = set()

    def look(self, view: NodeView) -> list[Verdict]:
        writable: list[str] = view.memory
        values: dict[str, dict[str, float]] = {}
        read_s: dict[str, float] = {}
        for name, subject, value, boot_s in view.rows:
            if name in NAMES and len(values) < MOUNTS_MAX:
                mount = subject.removeprefix("mount=")
                values.setdefault(mount, {})[name[len(PREFIX) :]] = value
                read_s[mount] = boot_s
        self._forget(values)
        found = []
        for mount, of in values.items():
            if of.get("readonly", 0.0) > 0.0:
                if mount in writable:
                    found.append(self.node_verdict(
                        "filesystem_readonly", f"mount{mount}", DEGRADED,
                        f"{mount} was writable in this boot and is read-only now",
                        (("mount", mount),)))
                continue  # what cannot be written cannot be filled
            if mount not in writable:
                _remember(writable, mount, values)
            found += self._space(mount, of, read_s[mount])
        return found

    def _forget(self, seen: dict[str, dict[str, float]]) -> None:
        for key in [one for one in self._trends if one[0] not in seen]:
            del self._trends[key]
            self._soon.discard(key)

    def _space(self, mount: str, of: dict[str, float], boot_s: float) -> list[Verdict]:
        """One verdict for everything that runs out on this mount; none when nothing does."""
        size, left = of.get("size_bytes", 0.0), of.get("available_bytes", 0.0)
        inodes, free = of.get("inodes", 0.0), of.get("free_inodes", 0.0)
        findings: list[Finding] = []
        if size > 0.0:
            full = left < min(FULL_SHARE * size, FULL_BYTES)
            low = left < min(LOW_SHARE * size, LOW_BYTES)
            findings += _short(full, low, f"{amount(left)} of {amount(size)} left")
            findings += self._forecast((mount, "space"), boot_s, left)
        if inodes > 0.0:  # some types have no fixed number of them
            full, low = free < FULL_INODES * inodes, free < LOW_INODES * inodes
            findings += _short(full, low, f"{free:.0f} of {inodes:.0f} inodes left")
            findings += self._forecast((mount, "inodes"), boot_s, free)
        if not findings:
            return []
        severity = DEGRADED if any(one == DEGRADED for one, _ in findings) else WARN
        return [self.node_verdict(
            "disk_space_low", f"mount{mount}", severity,
            f"{mount}: {'; '.join(why for _, why in findings)}",
            (("mount", mount), ("available_bytes", f"{left:.0f}"),
             ("free_inodes", f"{free:.0f}")))]

    def _forecast(self, key: tuple[str, str], boot_s: float, left: float) -> list[Finding]:
        trend = self._trends.setdefault(key, Trend())
        trend.add(boot_s, left)
        falls = trend.falls_per_s()
        limit_s = FULL_SOON_S * (STILL_SOON if key in self._soon else 1.0)
        if falls <= 0.0 or left / falls > limit_s:
            self._soon.discard(key)
            return []
        self._soon.add(key)
        what = "inodes are used up" if key[1] == "inodes" else "full"
        return [(WARN, f"{what} in {left / falls / 60:.0f} min if it goes on as in the last "
                       f"{trend.covers_s() / 60:.0f} min")]


def _remember(writable: list[str], mount: str, seen: Container[str]) -> None:
    """When there is no room left, the oldest that is not mounted any more goes."""
    if len(writable) >= MOUNTS_MAX:
        oldest = next((one for one in writable if one not in seen), None)
        if oldest is None:
            return
        writable.remove(oldest)
    writable.append(mount)


def _short(full: bool, low: bool, why: str) -> list[Finding]:
    return [(DEGRADED if full else WARN, why)] if full or low else []


def amount(size: float) -> str:
    """Bytes for people, in decimal units as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000.0
    return f"{size:.3g} TB"
