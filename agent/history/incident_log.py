"""Turns changes of incidents into journal records, counters and lines for the run's terminal.

Owns which incidents are known and the last state of each, so that nothing is counted or shown
twice, also across restarts.  Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from ..core.detect.ranks import ended as ends
from ..core.incidents.values import redone
from ..core.model import Decision, Effect, Incident, Verdict, subject_of
from .journal import Count, Happened, Review

INCIDENTS_MAX = 1000
NODE = -1  # the owner of incidents without a run or with an unknown owner
RECOVERY_BUCKETS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
PHASES = ("total", "detection", "decision", "restart")  # the last three come to the first
LINE_MAX = 500
PLANNED = "planned generation "  # as incidents/values.py writes it


class Line(NamedTuple):
    """One line for the terminal of a run."""

    run: str
    text: str
    level: str  # info | warn | error
    fault: str
    rank: int  # -1 where no rank is meant


class Changes(NamedTuple):
    """What follows from one decision."""

    records: tuple[Happened, ...]
    lines: tuple[Line, ...]
    forgotten: tuple[Incident, ...] = ()  # incidents for which there is no room any more


class IncidentLog:
    """Remembers the incidents of this node, newest last."""

    def __init__(
        self, incidents: tuple[Incident, ...], owners: Mapping[str, int] | None = None,
        owner_of: Callable[[str], int] = lambda run: NODE, reviews: Iterable[Review] = (),
    ) -> None:
        """`owners`: the uid behind each of `incidents`; `owner_of`: that behind a run."""
        self.incidents: OrderedDict[str, Incident] = OrderedDict(
            (incident.id, incident) for incident in reversed(incidents)
        )
        self._owners = {id: (owners or {}).get(id, NODE) for id in self.incidents}
        self._owner_of = owner_of
        self._detectors: dict[str, str] = {}  # incident id -> detector that opened it
        self.reviews = {review.id: review for review in reviews if review.id in self.incidents}

    def follow(self, decision: Decision) -> Changes:
        """Compares a decision's incidents with what is known; only changes come out."""
        records: list[Happened] = []
        lines: list[Line] = []
        for incident in decision.incidents:
            before = self.incidents.get(incident.id)
            if before == incident:
                continue
            if before is not None and before.opened_wall_s != incident.opened_wall_s:
                # The run's name was used before: another incident, and maybe another user's.
                del self.incidents[incident.id]
                self.reviews.pop(incident.id, None)
                before = None
            if before is None:
                self._note_detector(incident, decision.verdicts)
                self._owners[incident.id] = self._owner_of(incident.run) if incident.run else NODE
            self.incidents[incident.id] = incident
            changed = before is None or before.state != incident.state
            counts = self._counts(incident, before) if changed else ()
            records.append(Happened(incident, counts, self._owners[incident.id]))
            if incident.run:
                lines.extend(_lines(incident, before, changed))
        forgotten = tuple(self._forget_oldest(decision))
        return Changes(tuple(records), tuple(_plans_once(lines)), forgotten)

    def _forget_oldest(self, decision: Decision) -> list[Incident]:
        """Forgets the oldest of whoever has most: nobody's runs push out what others, or the node,
        went through.  What the core still tells of stays beside that: it would come back as new."""
        still_told = {incident.id for incident in decision.incidents}
        too_many = len(self.incidents) - len(still_told) - INCIDENTS_MAX
        if too_many <= 0:
            return []
        past: dict[int, deque[str]] = {}  # owner -> ids, oldest first
        for id in self.incidents:
            if id not in still_told:
                past.setdefault(self._owners[id], deque()).append(id)
        forgotten = []
        for _ in range(too_many):
            oldest = max(past.values(), key=len).popleft()
            forgotten.append(self.incidents.pop(oldest))
            del self._owners[oldest]
            self.reviews.pop(oldest, None)
            self._detectors.pop(oldest, None)
        return forgotten

    def owner(self, incident: str) -> int:
        """The uid of the user whose run it is about; NODE where it is nobody's."""
        return self._owners.get(incident, NODE)

    def with_fault(self, effect: Effect) -> Effect:
        """The effect with the fault it answers: that of its run's newest incident that is open."""
        run = getattr(effect.body, "run", "")
        if effect.fault or not run:
            return effect
        for incident in reversed(self.incidents.values()):
            if incident.run == run and incident.state in ("open", "acted"):
                return msgspec.structs.replace(effect, fault=incident.fault)
        return effect

    def acknowledge(self, incident: str, by: str, reason: str, wall_s: float) -> Review:
        """Somebody sees to it: for other people to read."""
        review = self.reviews.get(incident, Review(incident))._replace(
            acked_by=by, acked_wall_s=wall_s, counts=())
        return self._review(review._replace(reason=reason or review.reason))

    def label(self, incident: str, right: bool, by: str, reason: str, wall_s: float) -> Review:
        """Somebody says whether it was right.  Said once: a counter cannot take back.  ValueError
        where the opposite was said before."""
        label = str(right).lower()
        review = self.reviews.get(incident, Review(incident))
        if review.label and review.label != label:
            raise ValueError(f"{review.labelled_by} labelled it {review.label}")
        one = self.incidents[incident]
        detector = self._detectors.get(incident) or ends.detector_of(one.fault)
        counts = () if review.label else (Count("labels", (detector, label)),)
        return self._review(review._replace(
            label=label, labelled_by=by, labelled_wall_s=wall_s, reason=reason or review.reason,
            counts=counts))

    def _review(self, review: Review) -> Review:
        self.reviews[review.id] = review._replace(counts=())
        return review

    def _note_detector(self, incident: Incident, verdicts: tuple[Verdict, ...]) -> None:
        for verdict in verdicts:
            if (verdict.fault, verdict.subject) == (incident.fault, incident.subject):
                self._detectors[incident.id] = verdict.detector

    def _counts(self, incident: Incident, before: Incident | None) -> tuple[Count, ...]:
        counts: list[Count] = []
        detector = self._detectors.get(incident.id, "")
        if before is None:
            counts.append(Count("incidents", (detector, incident.fault, incident.severity)))
        if incident.state == "closed":
            if incident.lost_steps > 0:
                counts.append(Count("lost_steps", (incident.run,), float(incident.lost_steps)))
            phases = (incident.detection_s, incident.decision_s, incident.restart_s)
            if incident.lost_s > 0.0 and any(phases):  # a compile that was waited for has none
                for phase, seconds in zip(PHASES, (incident.lost_s, *phases), strict=True):
                    counts.extend(recovery_counts(phase, seconds))
        return tuple(counts)


def recovery_counts(phase: str, seconds: float) -> list[Count]:
    """One observation of the recovery histogram, as counters (cumulative buckets)."""
    counts = [
        Count("recovery_bucket", (phase, f"{bound:g}"))
        for bound in RECOVERY_BUCKETS_S
        if seconds <= bound
    ]
    counts.append(Count("recovery_bucket", (phase, "+Inf")))
    counts.append(Count("recovery_sum", (phase,), seconds))
    return counts


def _lines(incident: Incident, before: Incident | None, changed: bool) -> list[Line]:
    """What a person at the terminal reads of one change: who, why, what is done, its cost."""
    rank = subject_of(incident.subject).rank
    lines: list[tuple[str, str]] = []
    if before is None:
        level = "error" if incident.severity == "fatal" else "warn"
        named = incident.reason.startswith(_who(incident))
        lines.append((level, incident.reason if named else f"{_who(incident)}: {incident.reason}"))
    known_texts = {text for _, text in before.timeline} if before is not None else set()
    planned = [t for _, t in incident.timeline if t.startswith(PLANNED) and t not in known_texts]
    lines.extend(("info", f"{incident.fault}: {text}") for text in planned[-1:])
    roots = [t for _, t in incident.timeline if t.startswith("root: ") and t not in known_texts]
    lines.extend(("warn", f"{incident.fault}: {text}") for text in roots[-1:])
    if not changed:
        pass
    elif incident.state == "closed" and incident.lost_s > 0.0:
        cost = f"{incident.lost_s:.2f} s"
        if incident.lost_steps >= 0:
            text = f"goes on after {incident.fault}: {cost} and {_steps(incident.lost_steps)} lost"
        else:
            text = f"again {cost} after the last step before {incident.fault}"
        if incident.redo_s > 0:
            text += f"; {redone(incident)}"
        lines.append(("info", f"training {text}"))
    elif incident.state == "closed" and _latest(incident).startswith("the run is over"):
        pass  # the launcher's own last lines show it, once
    elif incident.state in ("closed", "taken_back"):
        word = "closed" if incident.state == "closed" else "taken back"
        lines.append(("info", f"{incident.fault} of {_who(incident)} {word}: {_latest(incident)}"))
    return [
        Line(incident.run, text[:LINE_MAX], level, incident.fault, rank) for level, text in lines
    ]


def _plans_once(lines: list[Line]) -> list[Line]:
    """A plan answers every incident that waits; a person reads it once."""
    told: set[tuple[str, str]] = set()
    kept = []
    for line in lines:
        plan = (line.run, line.text.partition(": ")[2])
        if plan[1].startswith(PLANNED):
            if plan in told:
                continue
            told.add(plan)
        kept.append(line)
    return kept


def _who(incident: Incident) -> str:
    return incident.culprit or incident.subject


def _latest(incident: Incident) -> str:
    return incident.timeline[-1][1] if incident.timeline else incident.reason


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
