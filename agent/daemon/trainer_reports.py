"""What trainers report of themselves that does not stop training: shown and counted.

Owns what may be reported, how much of one user's is kept, and for how long.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ..actions.performer import Performer
from ..core.model import WARN, Verdict, rank_subject
from ..history.journal import Count, Journal
from ..launchers import protocol
from ..launchers.run_session import RunSession

REPORTED = ("checkpoint_bad", "checkpoint_failed", "snapshot_off")  # faults of a trainer's own
REPORTED_TEXT = ", ".join(REPORTED)
REPORTS_MAX = 512
REPORTS_PER_UID = 128  # one user never leaves the others without a word
REPORT_KEPT_S = 600.0


class Report(NamedTuple):
    """What a rank said of itself."""

    text: str
    latest_s: float  # CLOCK_MONOTONIC
    uid: int


class TrainerReports:
    """The reports of the last minutes, by run, fault and rank."""

    def __init__(self, journal: Journal, performer: Performer) -> None:
        self._journal, self._performer = journal, performer
        self.kept: dict[tuple[str, str, int], Report] = {}

    def take(self, session: RunSession, packet: protocol.Report) -> bool:
        """Keeps one; False where there is nothing to show.  ValueError for what a trainer cannot
        know: any user's process may say this."""
        if not packet.fault:
            return False  # for the run's own terminal alone
        if packet.fault not in REPORTED:
            raise ValueError(
                f"a report of {packet.fault[:64]!r}: a rank reports {REPORTED_TEXT} only")
        nproc = session.hello.nproc
        if not -1 <= packet.rank < nproc:
            raise ValueError(f"a report of rank {packet.rank}: the run has {nproc} ranks")
        key = (session.hello.run, packet.fault, packet.rank)
        if key not in self.kept:
            own = sum(report.uid == session.uid for report in self.kept.values())
            if own >= REPORTS_PER_UID or len(self.kept) >= REPORTS_MAX:
                return False
            count = Count("events", ("trainer", packet.fault, WARN, ""))
            self._journal.append(count)
            self._performer.count(count)
        self.kept[key] = Report(packet.text[:500], time.monotonic(), session.uid)
        return True

    def verdicts(self) -> tuple[Verdict, ...]:
        """What was reported lately.  Shown, never acted on."""
        since_s = time.monotonic() - REPORT_KEPT_S
        self.kept = {key: report for key, report in self.kept.items() if report.latest_s >= since_s}
        return tuple(
            Verdict(fault, rank_subject(run, rank), WARN, 1.0,
                    report.text, detector="trainer", run=run)
            for (run, fault, rank), report in self.kept.items())
