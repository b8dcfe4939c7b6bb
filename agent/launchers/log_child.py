"""The ranks' logs of live runs, as the agent knows them: what is wanted, and what it costs.

Owns what launchers are told about reading logs (the operator's signatures, the sample's rate) and
the metrics of what their children report.  It reads no log: that is agent/logs/child.py's, in a
child of the launcher that runs as the job's user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..catalog.load import log_signatures
from ..core.detect.ranks.live_logs import plain
from ..core.parse.logs.signatures import CULPRITS, ROLES
from ..metrics.names import LOG_CHILD

if TYPE_CHECKING:
    from ..config.load import Loaded
    from .run_session import RunSession

COUNTS_MAX = 128  # signatures of one run that are shown
NAME_MAX = 64
UNKNOWN = ("other", "", "")  # what another release's launcher knows, or none does
Row = tuple[tuple[str, ...], float]  # label values, value


def order(loaded: Loaded) -> dict[str, Any]:
    """What a launcher is told when it comes, and after each reload."""
    return {
        "t": "logs", "read": loaded.config.logs.read,
        "sample_bytes_s": loaded.config.logs.sample_bytes_s, "own": list(loaded.signatures)}


def tell(sessions: Iterable[RunSession], loaded: Loaded) -> None:
    packet = order(loaded)
    for session in sessions:
        if session.connection is not None:
            session.connection.send(packet)


def rows(sessions: Iterable[RunSession], loaded: Loaded) -> dict[str, list[Row]]:
    """Everything that launchers said of their log children, by metric.  Their word is bounded
    here: names that no signature has are one row, or any user could make series without end."""
    found: dict[str, list[Row]] = {metric.name: [] for metric in LOG_CHILD}
    own = {row["id"] for row in loaded.signatures}
    for session in sessions:
        logs, run = session.levels.logs, session.hello.run
        if logs is None:
            continue
        for name, value in (
            ("log_read_bytes_total", logs.read_bytes),
            ("log_skipped_bytes_total", logs.skipped_bytes),
            ("log_child_cpu_seconds_total", logs.cpu_s),
            ("log_child_resident_memory_bytes", logs.rss_bytes),
            ("log_child_failures_total", logs.failures),
        ):
            found[name].append(((run,), max(0.0, float(value))))
        counts: Counter[tuple[str, str, str]] = Counter()
        for signature, role, culprit, count in logs.lines[:COUNTS_MAX]:
            known = signature in own or signature in log_signatures()
            known = known and role in ROLES and culprit in CULPRITS
            counts[(signature, role, culprit) if known else UNKNOWN] += max(0, count)
        found["log_lines_total"] += [((run, *key), count) for key, count in counts.items()]
    return found


def status(session: RunSession | None) -> dict[str, Any] | None:
    """The same for people: None where no log is read."""
    logs = session.levels.logs if session is not None else None
    if logs is None:
        return None
    return {
        "read_bytes": logs.read_bytes, "skipped_bytes": logs.skipped_bytes,
        "cpu_s": round(logs.cpu_s, 3), "rss_bytes": logs.rss_bytes,
        "problem": plain(logs.problem),
        "seen": [
            {"signature": _name(one.signature), "role": _name(one.role),
             "culprit": _name(one.culprit), "rank": one.rank, "line": plain(one.text),
             "wall_s": one.wall_s}
            for one in logs.seen[-8:]
        ],
    }


def _name(text: str) -> str:
    """A name that a launcher said, for people."""
    return "".join(c if c.isprintable() else "_" for c in text[:NAME_MAX])
