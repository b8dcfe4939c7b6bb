"""Incidents of conditions: open while a verdict about the node stands, closed when it has gone.

Owns the open incidents of detectors that show what is so rather than what happened: full, stuck,
leaking.  Says each once, and again only when it grows worse or more is known.  Orders nothing: the
detectors behind it observe.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from . import incidents
from .detect.kernel import pci_of
from .memory import Context
from .model import SEVERITIES, Incident, Runbook, Verdict

OPEN_MAX = 32
NUMBERS_MAX = 64
GONE_S = 60.0  # a reading may be missed, and a level may waver around its limit
QUIET_S = 600.0  # clears = "quiet_10m"


class Stood(msgspec.Struct):
    """An open incident, and when its verdict was last there."""

    incident: Incident
    boot_id: str
    last_boot_s: float


class StandingMemory(msgspec.Struct):
    """Survives a restart of the agent, and a reboot."""

    open: dict[str, Stood] = {}  # "fault|subject" ->
    numbers: dict[str, int] = {}


class StandingCase:
    """See the module."""

    def __init__(self, name: str, memory: StandingMemory) -> None:
        self.name = name
        self.memory = memory

    def incidents(self) -> dict[str, Incident]:
        opened = (self.memory.open[key] for key in sorted(self.memory.open))
        return {one.incident.id: one.incident for one in opened}

    def step(
        self, ctx: Context, verdicts: Iterable[Verdict], told: Container[str] = ()
    ) -> None:
        """Opens, keeps and closes; `verdicts` are all of those that stand now, `told` the addresses
        (pci_of) of devices that have an incident already."""
        here = {f"{one.fault}|{one.subject}": one for one in verdicts}
        for key in sorted(self.memory.open):
            self._gone(ctx, key, here)
        new = [key for key in sorted(here) if key not in self.memory.open]
        for key in sorted(here.keys() & self.memory.open.keys()):
            self._again(ctx, self.memory.open[key], here[key])
        new.sort(key=lambda key: -SEVERITIES.index(here[key].severity))  # or it soon makes room
        for key in new:
            if _address(here[key]) not in told and self._room(ctx, here[key].severity):
                self._open(ctx, key, here[key])

    def _room(self, ctx: Context, severity: str) -> bool:
        """Whether one more may be open; the mildest makes room for what is worse than it."""
        if len(self.memory.open) < OPEN_MAX:
            return True
        rank = {key: SEVERITIES.index(one.incident.severity)
                for key, one in self.memory.open.items()}  # fmt: skip
        mildest = min(sorted(rank), key=lambda key: rank[key])
        if rank[mildest] >= SEVERITIES.index(severity):
            return False
        self._close(ctx, mildest, "made room for something worse")
        return True

    def _open(self, ctx: Context, key: str, verdict: Verdict) -> None:
        number = self.memory.numbers.get(verdict.fault, 0) + 1
        kept = list(self.memory.numbers.items())[-NUMBERS_MAX:]
        self.memory.numbers = {**dict(kept), verdict.fault: number}
        tail = verdict.subject.removeprefix(f"node/{self.name}").strip("/")
        where = f"{tail.replace('/', ' ', 1)} of {self.name}" if tail else self.name
        incident = Incident(
            id=f"node-{self.name}-{verdict.fault}-{_plain(tail)}-{number}", fault=verdict.fault,
            subject=verdict.subject, severity=verdict.severity, run="", generation=0,
            opened_wall_s=ctx.now.wall_s, opened_boot_s=ctx.now.boot_s, reason=verdict.reason,
            culprit=where, evidence=verdict.evidence[: incidents.EVIDENCE_MAX],
            timeline=((ctx.now.wall_s, f"seen: {verdict.reason}"),),
            would_have=_would_have(ctx.runbooks.get(verdict.fault)),
        )  # fmt: skip
        self.memory.open[key] = Stood(incident, ctx.now.boot_id, ctx.now.boot_s)
        ctx.changed[incident.id] = incident

    def _again(self, ctx: Context, item: Stood, verdict: Verdict) -> None:
        """Worse, or with evidence of a kind that was not there: said anew.  Numbers that merely
        move are not."""
        item.last_boot_s = ctx.now.boot_s
        before = item.incident
        worse = SEVERITIES.index(verdict.severity) > SEVERITIES.index(before.severity)
        more = {what for what, _ in verdict.evidence} - {what for what, _ in before.evidence}
        if not worse and not more:
            return
        severity = verdict.severity if worse else before.severity
        kinds = {what for what, _ in verdict.evidence}
        old = tuple(row for row in before.evidence if row[0] not in kinds)
        changed = msgspec.structs.replace(
            before, severity=severity, reason=verdict.reason,
            evidence=(*verdict.evidence, *old)[: incidents.EVIDENCE_MAX],
        )  # fmt: skip
        item.incident = incidents.noted(changed, ctx.now, f"now: {verdict.reason}")
        if item.incident != before:
            ctx.changed[before.id] = item.incident

    def _gone(self, ctx: Context, key: str, here: dict[str, Verdict]) -> None:
        item = self.memory.open[key]
        if item.boot_id != ctx.now.boot_id:
            self._close(ctx, key, "the machine was rebooted")
            return
        if key in here:
            return
        wider = [one for one in here.values() if item.incident.fault in one.explains]
        if wider:
            self._close(ctx, key, f"belongs to another: {wider[0].reason}")
            return
        book = ctx.runbooks.get(item.incident.fault)
        wait_s = QUIET_S if book is not None and book.clears == "quiet_10m" else GONE_S
        if ctx.now.boot_s - item.last_boot_s > wait_s:
            self._close(ctx, key, f"not so any more for {wait_s:.0f} s")

    def _close(self, ctx: Context, key: str, text: str) -> None:
        item = self.memory.open.pop(key)
        closed = incidents.ended(item.incident, ctx.now, incidents.CLOSED, text)
        ctx.changed[closed.id] = closed


def _would_have(book: Runbook | None) -> str:
    rungs = book.ladder if book is not None else ()
    return "ask_person: a person's part" if "ask_person" in rungs else ""


def _address(verdict: Verdict) -> str:
    return pci_of(dict(verdict.evidence).get("pci", ""))


def _plain(subject: str) -> str:
    text = "".join(c if c.isalnum() else "-" for c in subject)
    return text[:80] or "host"
