"""The ranks' logs of live runs, as the agent knows them: what is wanted, and what it costs.

Owns what launchers are told about reading logs (the operator's signatures, the sample's rate) and
the metrics of what their children report.  It reads no log: that is agent/evidence/logs.py's, in a
child of the launcher that runs as the job's user.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.collectors.sample import Metric, Sample

from .core.detect.livelogs import plain

if TYPE_CHECKING:
    from .config import Loaded
    from .session import Session

COUNTS_MAX = 128  # signatures of one run that are shown
NAME_MAX = 64
_RUN = ("run",)
metrics = (
    Metric("log_read_bytes_total", "counter",
           "Bytes of the ranks' logs that the log child read.", _RUN),
    Metric("log_skipped_bytes_total", "counter",
           "Bytes of the ranks' logs that the sample of a live run left out.", _RUN),
    Metric("log_lines_total", "counter", "Lines of the ranks' logs that a signature knows.",
           ("run", "signature", "role", "culprit")),
    Metric("log_child_cpu_seconds_total", "counter",
           "Processor time of the log child, which the agent's own leaves out.", _RUN),
    Metric("log_child_resident_memory_bytes", "gauge",
           "Resident memory of the log child; 0 while there is none.", _RUN),
    Metric("log_child_failures_total", "counter",
           "Log children that died, or did not answer in time.", _RUN),
)  # fmt: skip


def order(loaded: Loaded) -> dict[str, Any]:
    """What a launcher is told when it comes, and after each reload."""
    return {
        "t": "logs", "read": loaded.config.logs.read,
        "sample_bytes_s": loaded.config.logs.sample_bytes_s, "own": list(loaded.signatures),
    }  # fmt: skip


def tell(sessions: Iterable[Session], loaded: Loaded) -> None:
    packet = order(loaded)
    for session in sessions:
        if session.link is not None:
            session.link.send(packet)


def samples(sessions: Iterable[Session]) -> list[Sample]:
    """Everything that launchers said of their log children; their word is bounded here."""
    found: list[Sample] = []
    for session in sessions:
        said = session.levels.logs
        if said is None:
            continue
        subject = f"run={_label(session.hello.run)}"
        values = (
            ("log_read_bytes_total", said.read_bytes),
            ("log_skipped_bytes_total", said.skipped_bytes),
            ("log_child_cpu_seconds_total", said.cpu_s),
            ("log_child_resident_memory_bytes", said.rss_bytes),
            ("log_child_failures_total", said.failures),
        )
        found += [Sample(name, subject, max(0.0, float(value)), 0.0) for name, value in values]
        counts: dict[str, int] = {}
        for signature, role, culprit, count in said.lines[:COUNTS_MAX]:
            labels = f"signature={_label(signature)},role={_label(role)},culprit={_label(culprit)}"
            key = f"{subject},{labels}"
            counts[key] = counts.get(key, 0) + max(0, count)
        found += [Sample("log_lines_total", key, count, 0.0) for key, count in counts.items()]
    return found


def status(session: Session | None) -> dict[str, Any] | None:
    """The same for people: None where no log is read."""
    said = session.levels.logs if session is not None else None
    if said is None:
        return None
    return {
        "read_bytes": said.read_bytes, "skipped_bytes": said.skipped_bytes,
        "cpu_s": round(said.cpu_s, 3), "rss_bytes": said.rss_bytes,
        "problem": plain(said.problem),
        "seen": [
            {"signature": _label(one.signature), "role": _label(one.role),
             "culprit": _label(one.culprit), "rank": one.rank, "line": plain(one.text),
             "wall_s": one.wall_s}
            for one in said.seen[-8:]
        ],
    }  # fmt: skip


def _label(text: str) -> str:
    """A label's value: a comma or an equals sign would end it."""
    return "".join("_" if c in ",=" or not c.isprintable() else c for c in text[:NAME_MAX])
