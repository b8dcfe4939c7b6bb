"""The open incidents of one run: who opened them, what was done, when they closed and at what cost.

Owns RunState.incidents: the book, what is said of a run that was stopped, the open suspicion.  It
judges nothing: causes come from causes.py, plans and effects from their own modules.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..detect.ranks import ended as ends
from ..detect.ranks.compiling import DETECTOR as COMPILE
from ..detect.ranks.compiling import RECOMPILED
from ..detect.ranks.ended import Cause
from ..effects.in_flight import EffectResult
from ..incidents import values
from ..model import (
    FATAL,
    TRAINER,
    UNREADABLE,
    Effect,
    Now,
    Plan,
    TakeEvidence,
    Verdict,
    rank_subject,
)
from .state import Context, OpenIncident, RunState, Stopped

OPEN_MAX = 32
FINISHED_S = 600.0  # a run that is no longer here leaves the page after this


class Where(msgspec.Struct):
    """The part of an evidence child's answer that the core reads."""

    where: str = ""
    state: str = ""
    wchan: str = ""
    path: str = ""
    open: tuple[str, ...] = ()


class RunIncidents:
    """Incidents of one run, kept in its state."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.book = state.incidents.book

    # ------------------------------------------------------------ opening

    def open_cause(self, ctx: Context, cause: Cause) -> str:
        """Turns the open suspicion into an incident of this cause, or opens a new one; returns its
        id."""
        self._count(ctx, cause.detector, "true")
        suspected = self._end_suspicion()
        subject = rank_subject(self.state.run, cause.rank)
        if suspected is not None:
            same = suspected.incident.fault == cause.fault and suspected.incident.subject == subject
            if same:
                suspected.suspicion, suspected.seen_boot_s = False, ctx.now.boot_s
                suspected.trained_s = self.state.progress.trained_s
                changed = values.upgraded(suspected.incident, cause, ctx.now)
                self.book.change(ctx, suspected, changed)
                return changed.id
            self.book.close(ctx, suspected.incident.id, f"overtaken: {cause.reason}")
        return self._open(ctx, cause, acted=True, suspicion=False)

    def open_side(self, ctx: Context, fault: str, cause: Cause, reason: str) -> None:
        """A fault that follows from another and ends the run: crash_loop, budget_spent.

        The verdict outlives the run: nobody who looks every 15 s would see one of a single step.
        It then has no owner any more, so it holds no word of the job's; the incident does."""
        side = msgspec.structs.replace(cause, fault=fault, reason=reason, severity=FATAL)
        opened = self._open(ctx, side, acted=True, suspicion=False)
        verdict = msgspec.structs.replace(
            ends.verdict_of(side, self.state.run), evidence=(("incident", opened),),
            reason=f"the run {self.state.run} was stopped: holdfast incidents {opened}",
        )
        self._write(stopped=Stopped(verdict, ctx.now.boot_s))

    def open_note(self, ctx: Context, cause: Cause) -> str:
        """What is to be known of this run, and nobody recovers from; its id."""
        opened = self._open(ctx, cause, acted=False, suspicion=False)
        item = self.book.open.get(opened)
        if item is not None:
            item.is_note, item.detector = True, cause.detector
        return opened

    def close_note(self, ctx: Context, incident_id: str, text: str) -> None:
        if incident_id in self.book.open:
            self.book.close(ctx, incident_id, text)

    def notes_of(self, detector: str) -> tuple[str, ...]:
        """The ids of the open notes of a detector."""
        return tuple(id for id, item in self.book.open.items()
                     if item.is_note and item.detector == detector)

    def keep(self, ctx: Context, cause: Cause) -> None:
        """One note of a detector, for as long as it says so."""
        if not self.notes_of(cause.detector) and len(self.book.open) < OPEN_MAX:
            self.open_note(ctx, cause)

    def close_of(self, ctx: Context, detector: str, text: str) -> None:
        """All notes of a detector: what it said is over, or somebody else's to say."""
        for incident_id in self.notes_of(detector):
            self.book.close(ctx, incident_id, text)

    def stopped(self, now: Now) -> tuple[Verdict, ...]:
        """The verdict that the run was stopped for good, while the run stays on the page."""
        stopped = self.state.incidents.stopped
        if stopped is None:
            return ()
        if 0.0 <= now.boot_s - stopped.boot_s < FINISHED_S:
            return (stopped.verdict,)
        self._write(stopped=None)
        return ()

    def suspect(self, ctx: Context, cause: Cause, would_have: str) -> None:
        """Shown as a warning, once for a subject and fault; a change of either is a new one."""
        item = self.book.open.get(self.state.incidents.suspicion)
        subject = rank_subject(self.state.run, cause.rank)
        if item and (item.incident.subject, item.incident.fault) == (subject, cause.fault):
            return self.would_have(ctx, item.incident.id, would_have)
        self.take_back(ctx, "somebody else is suspected now")
        self._write(suspicion=self._open(ctx, cause, acted=False, suspicion=True))
        self.would_have(ctx, self.state.incidents.suspicion, would_have)

    def take_back(self, ctx: Context, why: str) -> None:
        """The open suspicion was wrong; it counts as false."""
        item = self._end_suspicion()
        if item is None:
            return
        if item.incident.fault == RECOMPILED:
            return self._compiled(ctx, item)
        self._count(ctx, "hang", "false")
        self.book.close(ctx, item.incident.id, f"taken back: {why}", values.TAKEN_BACK)

    def _compiled(self, ctx: Context, item: OpenIncident) -> None:
        """No hang, and none that was suspected: a ticket, with what it cost."""
        self._count(ctx, COMPILE, "true")
        lost_s = max(0.0, ctx.now.boot_s - item.last_step_boot_s)
        text = f"compiled: no step was finished for {lost_s:.1f} s"
        closed = values.ended(item.incident, ctx.now, values.CLOSED, text)
        self.book.end(ctx, item.incident.id, msgspec.structs.replace(closed, lost_s=lost_s))

    # ------------------------------------------------------------ noting

    def note_all(self, ctx: Context, text: str, effect_id: str) -> None:
        """One line and one action on every incident that waits for the run to go on."""
        for item in self._waiting():
            noted = values.noted(item.incident, ctx.now, text)
            self.book.change(ctx, item, values.with_action(noted, effect_id))

    def note(self, ctx: Context, incident_id: str, text: str) -> None:
        item = self.book.open.get(incident_id)
        if item is not None:
            self.book.change(ctx, item, values.noted(item.incident, ctx.now, text))

    def note_action(self, ctx: Context, incident_id: str, effect: Effect) -> None:
        item = self.book.open.get(incident_id)
        if item is not None:
            noted = values.noted(item.incident, ctx.now, f"{effect.kind}: {effect.reason}")
            self.book.change(ctx, item, values.with_action(noted, effect.id))

    def planned(self, ctx: Context, plan: Plan, effect_id: str) -> None:
        """The plan's line, and how many finished steps it gives up."""
        unseen = ctx.view.grade != TRAINER  # a script's own checkpoint is not ours to read
        for item in self._waiting():
            lost = max(0, item.base_step - plan.resume.step, item.incident.lost_steps)
            changed = msgspec.structs.replace(
                item.incident, lost_steps=-1 if unseen else lost,
                redo_s=item.trained_s if unseen else 0.0,
            )
            item.planned_boot_s = item.planned_boot_s or ctx.now.boot_s
            changed = values.noted(changed, ctx.now, values.plan_line(plan))
            self.book.change(ctx, item, values.with_action(changed, effect_id))

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """Evidence joins the open incidents of its rank, and those that name no rank, which say
        whose it is; a failure is a line."""
        body = done.effect.body
        if done.effect.kind != "evidence":
            if not done.ok:
                text = f"{done.effect.kind} failed: {done.error}"
                self.note_all(ctx, text, done.effect.id)
            return
        if not isinstance(body, TakeEvidence):
            return
        rows, run = evidence_rows(done), self.state.run
        whose = tuple((f"rank {body.rank} {what}", value) for what, value in rows)
        by_subject = {rank_subject(run, body.rank): rows, rank_subject(run, -1): whose}
        for item in self.book.open.values():
            more = by_subject.get(item.incident.subject)
            if item.incident.generation == body.generation and more is not None:
                self.book.change(ctx, item, values.with_evidence(item.incident, more))

    def attach(
        self, ctx: Context, incident_id: str, rows: tuple[tuple[str, str], ...], text: str = ""
    ) -> None:
        """Rows in front of an incident's evidence, in place of older ones of their names; a late
        answer still joins the incident that closed last."""
        item, closed = self.book.open.get(incident_id), self.book.closed
        late = closed is not None and closed.id == incident_id and item is None
        incident = item.incident if item is not None else closed if late else None
        if incident is None:
            return
        changed = values.with_first(incident, rows)
        changed = values.noted(changed, ctx.now, text) if text else changed
        if item is not None:
            self.book.change(ctx, item, changed)
        else:
            self.book.closed = ctx.changed[incident_id] = changed

    # ------------------------------------------------------------ closing

    def recovered(self, ctx: Context, step: int, first_boot_s: float) -> None:
        """Training goes on since then: what waited for it closes, with what it cost."""
        waiting = self._waiting()
        for item in waiting:
            again_s = max(first_boot_s, item.seen_boot_s)
            # What came after the next fault is the cost of that one.
            later = [one.last_step_boot_s for one in waiting if one.seen_boot_s > item.seen_boot_s]
            lost_s = min([again_s, *later]) - item.last_step_boot_s
            detection_s = item.seen_boot_s - item.last_step_boot_s
            decision_s = max(0.0, item.planned_boot_s - item.seen_boot_s)
            closed = values.recovered(
                item.incident, ctx.now, step, max(0.0, lost_s), (detection_s, decision_s),
                again_s - item.seen_boot_s,
            )
            self.book.end(ctx, item.incident.id, closed)

    def close_all(self, ctx: Context, text: str) -> None:
        for incident_id in sorted(self.book.open):
            self.book.close(ctx, incident_id, text)
        self._write(suspicion="")

    def new_boot(self) -> None:
        """Another boot's seconds mean nothing here."""
        self._write(stopped=None)

    # ------------------------------------------------------------ within

    def _open(self, ctx: Context, cause: Cause, acted: bool, suspicion: bool) -> str:
        run, now = self.state.run, self.state.progress
        number = self.book.number(cause.fault)
        incident = values.opened(
            cause, run, number, ctx.now, acted,
            "" if ctx.settings.single_node else ctx.view.node)
        if len(self.book.open) < OPEN_MAX:
            self.book.add(ctx, incident.id, OpenIncident(
                incident, now.base_step if acted else now.peak_step,
                self._last_step_s(ctx, cause), ctx.now.boot_s, suspicion, now.trained_s,
            ))
        ctx.changed[incident.id] = incident
        return incident.id

    def _last_step_s(self, ctx: Context, cause: Cause) -> float:
        """Since when the fault costs: the last finished step before it, and never later than the
        fault itself.  Where no step was finished since the fault before, or ever, the fault itself.
        """
        fault_s = cause.boot_s if cause.boot_s > 0 else ctx.now.boot_s
        last_s = self.state.progress.last_step_boot_s
        if last_s <= max([0.0, *(item.seen_boot_s for item in self._waiting())]):
            return fault_s
        return min(last_s, fault_s)

    def _waiting(self) -> list[OpenIncident]:
        return [item for item in self.book.entries() if not (item.suspicion or item.is_note)]

    def would_have(self, ctx: Context, incident_id: str, text: str) -> None:
        """What acting would have done about it, where its detector only observes."""
        item = self.book.open.get(incident_id)
        if item is not None and text and text != item.incident.would_have:
            changed = msgspec.structs.replace(item.incident, would_have=text)
            self.book.change(ctx, item, changed)

    def _write(self, **changed: Any) -> None:
        self.state.incidents = msgspec.structs.replace(self.state.incidents, **changed)

    def _end_suspicion(self) -> OpenIncident | None:
        """Suspects nobody from here on; returns the suspicion that was open."""
        item = self.book.open.get(self.state.incidents.suspicion)
        self._write(suspicion="")
        return item

    def _count(self, ctx: Context, detector: str, outcome: str) -> None:
        key = f"{detector}/{outcome}"
        ctx.counts[key] = ctx.counts.get(key, 0) + 1


def evidence_rows(done: EffectResult) -> tuple[tuple[str, str], ...]:
    """What the evidence child saw of a rank, as an incident tells it; nothing where it failed."""
    found = read_where(done.detail) if done.ok else Where()
    return tuple((what, value) for what, value in (
        ("where", found.where), ("kernel state", found.state), ("wait channel", found.wchan),
        ("waits for", found.path),
    ) if value)


def read_where(detail: str) -> Where:
    try:
        return msgspec.json.decode(detail.encode(), type=Where) if detail else Where()
    except UNREADABLE:
        return Where()
