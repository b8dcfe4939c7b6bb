"""The open incidents of one run: who opened them, what was done, when they closed and at what cost.

Owns RunMemory.incidents, what is said of a run that was stopped, and the counting of suspicions.
It judges nothing: causes come from causes.py, plans and effects from case.py.
"""

from __future__ import annotations

import msgspec

from ..detect.ranks import ended as ends
from ..detect.ranks.ended import Cause
from ..effects.in_flight import Settled
from ..incidents import values
from ..model import (
    FATAL,
    OPAQUE,
    TRAINER,
    Effect,
    Now,
    Plan,
    RankView,
    TakeEvidence,
    Verdict,
)
from .state import Context, OpenIncident, RunMemory, Stopped

OPEN_MAX = 32
QUARANTINE_MAX = 64
EVIDENCE_KEPT = 64
FINISHED_S = 600.0  # a run that is no longer here leaves the page after this


class Where(msgspec.Struct):
    """The part of an evidence child's answer that the core reads."""

    where: str = ""
    state: str = ""
    wchan: str = ""


class Casebook:
    """Incidents of one run, kept in its memory."""

    def __init__(self, memory: RunMemory) -> None:
        self.memory = memory
        self.book = memory.incidents

    # ------------------------------------------------------------ opening

    def open_cause(self, ctx: Context, cause: Cause) -> None:
        """The cause becomes an incident: the open suspicion of the same, or a new one."""
        m = self.memory
        self._count(ctx, cause.detector, "true")
        suspected = self.book.open.get(m.suspicion)
        m.suspicion = ""
        subject = ends.subject_of(m.run, cause.rank)
        if suspected is not None:
            same = suspected.incident.fault == cause.fault and suspected.incident.subject == subject
            if same:
                suspected.suspicion, suspected.seen_boot_s = False, ctx.now.boot_s
                m.cause_id = suspected.incident.id
                changed = values.upgraded(suspected.incident, cause, ctx.now)
                return self.book.change(ctx, suspected, changed)
            self.book.close(ctx, suspected.incident.id, f"overtaken: {cause.reason}")
        m.cause_id = self._open(ctx, cause, acted=True, suspicion=False)

    def open_side(self, ctx: Context, fault: str, cause: Cause, reason: str) -> None:
        """A fault that follows from another and ends the run: crash_loop, budget_spent.

        The verdict outlives the run: nobody who looks every 15 s would see one of a single step.
        It then has no owner any more, so it holds no word of the job's; the incident does."""
        m = self.memory
        side = msgspec.structs.replace(cause, fault=fault, reason=reason, severity=FATAL)
        opened = self._open(ctx, side, acted=True, suspicion=False)
        verdict = msgspec.structs.replace(
            ends.verdict_of(side, m.run), evidence=(("incident", opened),),
            reason=f"the run {m.run} was stopped: holdfast incidents {opened}",
        )
        m.stopped = Stopped(verdict, ctx.now.boot_s)

    def stopped(self, now: Now) -> tuple[Verdict, ...]:
        """That the run was stopped, for as long as it stays on the page."""
        m = self.memory
        if m.stopped is not None and not 0.0 <= now.boot_s - m.stopped.boot_s < FINISHED_S:
            m.stopped = None
        return (m.stopped.verdict,) if m.stopped is not None else ()

    def suspect(self, ctx: Context, cause: Cause, would_have: str) -> None:
        """Shown as a warning, once for a subject and fault; a change of either is a new one."""
        m = self.memory
        item = self.book.open.get(m.suspicion)
        subject = ends.subject_of(m.run, cause.rank)
        if item and (item.incident.subject, item.incident.fault) == (subject, cause.fault):
            return self._would_have(ctx, would_have)
        self.take_back(ctx, "somebody else is suspected now")
        m.suspicion = self._open(ctx, cause, acted=False, suspicion=True)
        self._would_have(ctx, would_have)

    def take_back(self, ctx: Context, why: str) -> None:
        """The open suspicion was wrong; it counts as false."""
        m = self.memory
        item = self.book.open.get(m.suspicion)
        m.suspicion = ""
        if item is None:
            return
        self._count(ctx, "hang", "false")
        self.book.close(ctx, item.incident.id, f"taken back: {why}", values.TAKEN_BACK)

    # ------------------------------------------------------------ noting

    def note_all(self, ctx: Context, text: str, effect_id: str) -> None:
        """One line and one action on every incident that waits for the run to go on."""
        for item in self._waiting():
            noted = values.noted(item.incident, ctx.now, text)
            self.book.change(ctx, item, values.with_action(noted, effect_id))

    def note_action(self, ctx: Context, effect: Effect) -> None:
        item = self.book.open.get(self.memory.cause_id)
        if item is not None:
            noted = values.noted(item.incident, ctx.now, f"{effect.kind}: {effect.reason}")
            self.book.change(ctx, item, values.with_action(noted, effect.id))

    def planned(self, ctx: Context, plan: Plan, effect_id: str) -> None:
        """The plan's line, and how many finished steps it gives up."""
        unseen = ctx.view.grade != TRAINER  # a script's own checkpoint is not ours to read
        for item in self._waiting():
            lost = max(0, item.base_step - plan.resume.step, item.incident.lost_steps)
            changed = msgspec.structs.replace(item.incident, lost_steps=-1 if unseen else lost)
            changed = values.noted(changed, ctx.now, values.plan_line(plan))
            self.book.change(ctx, item, values.with_action(changed, effect_id))

    def effect_settled(self, ctx: Context, done: Settled) -> None:
        """Evidence joins the open incidents of its rank; a failure is a line."""
        m = self.memory
        if done.effect.kind == "finish":
            m.left = m.left or done.ok
        if done.effect.kind != "evidence":
            if not done.ok:
                text = f"{done.effect.kind} failed: {done.error}"
                self.note_all(ctx, text, done.effect.id)
            return
        body = done.effect.body
        if not isinstance(body, TakeEvidence):
            return
        rank, generation = body.rank, body.generation
        found = read_where(done.detail) if done.ok else Where()
        step = next((r.step for r in ctx.view.ranks if r.rank == rank), 0)
        m.evidence[f"{generation}/{rank}/{step}"] = found.where
        m.evidence = dict(list(m.evidence.items())[-EVIDENCE_KEPT:])
        rows = tuple((k, v) for k, v in (
            ("where", found.where), ("kernel state", found.state), ("wait channel", found.wchan),
        ) if v)
        subjects = (ends.subject_of(m.run, rank), ends.subject_of(m.run, -1))
        for item in self.book.open.values():
            if item.incident.generation == generation and item.incident.subject in subjects:
                self.book.change(ctx, item, values.with_evidence(item.incident, rows))

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

    def close_recovered(
        self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...]
    ) -> None:
        """Close what waits once every rank has finished a step that was never finished before."""
        m = self.memory
        if plan is None or not m.recovering or m.cause is not None:
            return
        if not ranks or len(ranks) < len(plan.ranks) or not new_step(ctx, m, ranks):
            return
        first_s = max(ctx.now.boot_s - r.still_s for r in ranks)
        step = min(r.step for r in ranks)
        m.recovering = False
        m.history.add_restart(max(0.0, first_s - m.cause_boot_s))
        for item in self._waiting():
            again_s = max(first_s, item.seen_boot_s)
            closed = values.recovered(
                item.incident, ctx.now, step, max(0.0, again_s - item.last_step_boot_s),
                again_s - item.seen_boot_s,
            )
            self.book.end(ctx, item.incident.id, closed)

    def close_all(self, ctx: Context, text: str) -> None:
        for incident_id in sorted(self.book.open):
            self.book.close(ctx, incident_id, text)
        self.memory.suspicion = ""

    def quarantined(self, ctx: Context, plan: Plan | None) -> tuple[str, ...]:
        """Paths that must not be used: known before, found bad since, or just refused."""
        cause = self.memory.cause
        paths = list(plan.quarantined) if plan else []
        paths += [c.path for c in ctx.view.commits if c.bad]
        if cause and plan and cause.fault == "checkpoint_bad" and plan.resume.path:
            paths.append(plan.resume.path)
        return tuple(dict.fromkeys(paths))[-QUARANTINE_MAX:]

    # ------------------------------------------------------------ within

    def _open(self, ctx: Context, cause: Cause, acted: bool, suspicion: bool) -> str:
        m = self.memory
        number = self.book.number(cause.fault)
        incident = values.opened(cause, m.run, number, ctx.now, acted)
        if len(self.book.open) < OPEN_MAX:
            self.book.add(ctx, incident.id, OpenIncident(
                incident, m.base_step if acted else m.peak_step,
                self._last_step_s(cause), ctx.now.boot_s, suspicion,
            ))
        ctx.changed[incident.id] = incident
        return incident.id

    def _last_step_s(self, cause: Cause) -> float:
        """The last finished step before: never later than the fault itself."""
        peak_s = self.memory.peak_boot_s
        if peak_s <= 0.0:  # no step was ever seen: it costs from the fault on
            return cause.boot_s if cause.boot_s > 0 else self.memory.cause_boot_s
        return min(peak_s, cause.boot_s) if cause.boot_s > 0 else peak_s

    def _waiting(self) -> list[OpenIncident]:
        return [item for item in self.book.entries() if not item.suspicion]

    def _would_have(self, ctx: Context, text: str) -> None:
        item = self.book.open.get(self.memory.suspicion)
        if item is not None and text and text != item.incident.would_have:
            changed = msgspec.structs.replace(item.incident, would_have=text)
            self.book.change(ctx, item, changed)

    def _count(self, ctx: Context, detector: str, outcome: str) -> None:
        key = f"{detector}/{outcome}"
        ctx.counts[key] = ctx.counts.get(key, 0) + 1


def read_where(detail: str) -> Where:
    try:
        return msgspec.json.decode(detail.encode(), type=Where) if detail else Where()
    except (msgspec.DecodeError, RecursionError):
        return Where()


def new_step(ctx: Context, memory: RunMemory, ranks: tuple[RankView, ...]) -> bool:
    """Training goes on: on every rank a step that nobody had finished before.

    A script's step counter may begin anew in each process, so its first finished step counts; an
    opaque job shows no steps, so its running does.
    """
    if all(r.ended is not None and ends.ended_well(r.ended) for r in ranks):
        return True
    if any(r.state != "running" and r.ended is None for r in ranks):
        return False
    if ctx.view.grade == OPAQUE:
        return True
    if ctx.view.grade != TRAINER:
        return all(r.step >= 1 for r in ranks)
    return all(r.step > memory.base_step for r in ranks)
