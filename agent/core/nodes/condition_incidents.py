"""Incidents of conditions: open while a verdict about the node stands, closed when it has gone.

Owns the open incidents of detectors that show what is so rather than what happened: full, stuck,
leaking.  Says each once, and again only when it grows worse or more is known.  An incident from
before this start of the agent stands until its detector could have found it again.  Orders nothing:
the detectors behind it observe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from .. import ladder
from ..actions import ACTIONS, ASK_PERSON
from ..detect import registry
from ..incidents import values
from ..incidents.book import Entry, IncidentBook, plain, worse
from ..model import SEVERITIES, Incident, Runbook, Verdict, subject_of
from ..parse.kernel_line import pci_of
from ..run.state import Context

OPEN_MAX = 32
SUBJECT_MAX = 80  # characters of an id
GONE_S = 60.0  # a reading may be missed, and a level may waver around its limit
QUIET_S = 600.0  # clears = "quiet_10m"
UNSEEN_MAX_S = 86_400.0  # a source may be silent for good, and have nothing to do with it


class Stood(Entry):
    """An open incident, and when its verdict was last there."""

    boot_id: str
    last_boot_s: float
    detector: str = ""


class ConditionMemory(msgspec.Struct):
    """Survives a restart of the agent, and a reboot."""

    book: IncidentBook[Stood] = msgspec.field(default_factory=IncidentBook)  # "fault|subject" ->


class ConditionIncidents:
    """Opens, notes and closes one incident for each condition of the node."""

    def __init__(self, name: str, memory: ConditionMemory) -> None:
        self.name = name
        self.book = memory.book
        self._silent_s: dict[str, float] = {}  # detector -> when a source of it was silent last

    def step(
        self, ctx: Context, verdicts: Iterable[Verdict], devices: Mapping[str, str] | None = None
    ) -> None:
        """Opens, keeps and closes; `verdicts` are all of those that stand now, `devices` maps the
        addresses and subjects of devices that have an incident already to its severity."""
        here = {f"{one.fault}|{one.subject}": one for one in verdicts}
        silent = ctx.observed.samples.silent
        for kind in registry.of_node() if silent else ():
            if any(one.startswith(kind.reads + kind.beside) for one in silent):
                self._silent_s[kind.name] = ctx.now.boot_s
        for key in sorted(self.book.open):
            self._gone(ctx, key, here)
        new = [key for key in sorted(here) if key not in self.book.open]
        for key in sorted(here.keys() & self.book.open.keys()):
            self._again(ctx, self.book.open[key], here[key])
        new.sort(key=lambda key: -SEVERITIES.index(here[key].severity))  # or it soon makes room
        for key in new:
            by_key, severity = sorted(self.book.open), here[key].severity
            if not _is_known(here[key], devices or {}) and self.book.room(
                ctx, severity, by_key, OPEN_MAX
            ):
                self._open(ctx, key, here[key])

    def _open(self, ctx: Context, key: str, verdict: Verdict) -> None:
        number = self.book.number(verdict.fault)
        tail = subject_of(verdict.subject).part.strip("/")
        where = f"{tail.replace('/', ' ', 1)} of {self.name}" if tail else self.name
        incident = Incident(
            id=f"node-{self.name}-{verdict.fault}-{plain(tail, SUBJECT_MAX)}-{number}",
            fault=verdict.fault, subject=verdict.subject, severity=verdict.severity,
            run="", generation=0, opened_wall_s=ctx.now.wall_s, opened_boot_s=ctx.now.boot_s,
            reason=verdict.reason, culprit=where, evidence=verdict.evidence[: values.EVIDENCE_MAX],
            timeline=((ctx.now.wall_s, f"seen: {verdict.reason}"),),
            would_have=_would_have(ctx.runbooks.get(verdict.fault)),
        )
        item = Stood(incident, ctx.now.boot_id, ctx.now.boot_s, verdict.detector)
        self.book.add(ctx, key, item)

    def _again(self, ctx: Context, item: Stood, verdict: Verdict) -> None:
        """Worse, or with evidence of a kind that was not there: said anew.  Numbers that merely
        move are not."""
        item.last_boot_s, item.detector = ctx.now.boot_s, verdict.detector
        before = item.incident
        grown = worse(verdict.severity, before.severity)
        more = {what for what, _ in verdict.evidence} - {what for what, _ in before.evidence}
        if not grown and not more:
            return
        severity = verdict.severity if grown else before.severity
        kinds = {what for what, _ in verdict.evidence}
        old = tuple(row for row in before.evidence if row[0] not in kinds)
        changed = msgspec.structs.replace(
            before, severity=severity, reason=verdict.reason,
            evidence=(*verdict.evidence, *old)[: values.EVIDENCE_MAX])
        changed = values.noted(changed, ctx.now, f"now: {verdict.reason}")
        if changed != before:
            self.book.change(ctx, item, changed)

    def _gone(self, ctx: Context, key: str, here: dict[str, Verdict]) -> None:
        item = self.book.open[key]
        if item.boot_id != ctx.now.boot_id:
            self.book.close(ctx, key, "the machine was rebooted")
            return
        if key in here:
            return
        wider = [one for one in here.values() if item.incident.fault in one.explains]
        if wider:
            self.book.close(ctx, key, f"belongs to another: {wider[0].reason}")
            return
        detector = registry.named(item.detector)
        book = ctx.runbooks.get(item.incident.fault)
        wait_s = QUIET_S if book is not None and book.clears == "quiet_10m" else GONE_S
        since_s = item.last_boot_s
        earlier = since_s < ctx.since_boot_s  # seen by an earlier life of the agent, not by this
        if earlier:
            silent_s = self._silent_s.get(item.detector, 0.0)
            since_s = max(ctx.since_boot_s, min(silent_s, ctx.since_boot_s + UNSEEN_MAX_S))
            wait_s += detector.warm_s if detector is not None else 0.0
        if ctx.now.boot_s - since_s > wait_s:
            seen = detector is None or not detector.reads or ctx.observed.samples.under(
                *detector.reads, *detector.beside)
            self.book.close(ctx, key, f"not so any more for {wait_s:.0f} s" if seen
                        else "nobody looks at it any more")
        elif earlier:
            ctx.verdicts.append(_not_seen_yet(item))


def _would_have(book: Runbook | None) -> str:
    asked = ladder.first(book, (ASK_PERSON,))
    return ACTIONS[asked].withheld(()) if asked else ""


def _is_known(verdict: Verdict, devices: Mapping[str, str]) -> bool:
    """Whether an incident of the same device says as much already; a milder one does not."""
    keys = verdict.subject, pci_of(dict(verdict.evidence).get("pci", ""))
    rank = SEVERITIES.index
    return any(rank(devices[key]) >= rank(verdict.severity) for key in keys if devices.get(key))


def _not_seen_yet(item: Stood) -> Verdict:
    """What was so when the agent ended, for as long as nobody could find out that it is not."""
    one = item.incident
    return Verdict(
        fault=one.fault, subject=one.subject, severity=one.severity, confidence=1.0,
        reason=f"{one.reason} (seen before this start of the agent, not looked at for long enough "
        "since)", evidence=one.evidence, detector=item.detector)
