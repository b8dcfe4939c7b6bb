"""Incidents as values: opened by a verdict, noted, closed with their cost.

Owns the wording of timelines and the arithmetic of cost.  It decides nothing and keeps nothing;
agent/core/incidents/book.py holds the open ones.
"""

from __future__ import annotations

import msgspec

from ..detect.ranks.ended import Cause
from ..model import Incident, Now, Plan, Resume, rank_subject, rank_words

TIMELINE_MAX = 64
EVIDENCE_MAX = 64  # a row of each of 12 ranks that stand still, and what is seen of them

OPEN, ACTED, CLOSED, TAKEN_BACK = "open", "acted", "closed", "taken_back"


def opened(
    cause: Cause, run: str, number: int, now: Now, acted: bool, node: str = ""
) -> Incident:
    """`node`: who opens it, where another node may open one of the same number."""
    rank = f"r{cause.rank}" if cause.rank >= 0 else "r-"
    whose = f"-{node}" if node else ""
    return Incident(
        id=f"{run}-g{cause.generation}-{cause.fault}-{rank}-{number}{whose}", fault=cause.fault,
        subject=rank_subject(run, cause.rank), severity=cause.severity, run=run,
        generation=cause.generation, opened_wall_s=now.wall_s, opened_boot_s=now.boot_s,
        reason=cause.reason, culprit=_culprit(cause), evidence=cause.evidence[:EVIDENCE_MAX],
        timeline=((now.wall_s, f"{'seen' if acted else 'suspected'}: {cause.reason}"),),
        state=ACTED if acted else OPEN,
    )


def _culprit(cause: Cause) -> str:
    """The rank, else the node; "" where the ranks are stopped though nothing is broken."""
    if cause.rank >= 0:
        return rank_words(cause.rank, cause.pid, cause.node, cause.place)
    return cause.node or ("culprit unknown" if cause.charged else "")


def noted(incident: Incident, now: Now, text: str) -> Incident:
    """With one more line, once: the same line twice in a row is said once."""
    if incident.timeline and incident.timeline[-1][1] == text:
        return incident
    timeline = (*incident.timeline[: TIMELINE_MAX - 1], (now.wall_s, text))
    return msgspec.structs.replace(incident, timeline=timeline)


def with_evidence(incident: Incident, rows: tuple[tuple[str, str], ...]) -> Incident:
    new = tuple(row for row in rows if row not in incident.evidence)
    evidence = (*incident.evidence, *new)[:EVIDENCE_MAX]
    return msgspec.structs.replace(incident, evidence=evidence) if new else incident


def with_first(incident: Incident, rows: tuple[tuple[str, str], ...]) -> Incident:
    """These rows before all others, and instead of older ones of the same names."""
    names = {what for what, _ in rows}
    rest = tuple(row for row in incident.evidence if row[0] not in names)
    return msgspec.structs.replace(incident, evidence=(*rows, *rest)[:EVIDENCE_MAX])


def with_action(incident: Incident, effect_id: str) -> Incident:
    if effect_id in incident.actions or len(incident.actions) >= TIMELINE_MAX:
        return incident
    return msgspec.structs.replace(incident, actions=(*incident.actions, effect_id))


def upgraded(incident: Incident, cause: Cause, now: Now) -> Incident:
    """A suspicion that became a verdict to act on."""
    changed = msgspec.structs.replace(
        incident, state=ACTED, severity=cause.severity, reason=cause.reason
    )
    return with_evidence(noted(changed, now, f"seen: {cause.reason}"), cause.evidence)


def ended(incident: Incident, now: Now, state: str, text: str) -> Incident:
    changed = noted(incident, now, text)
    return msgspec.structs.replace(changed, state=state, closed_wall_s=now.wall_s)


def plan_line(plan: Plan) -> str:
    kept = f"; kept {_ranks(plan.keep)}" if plan.keep else ""
    return f"planned generation {plan.generation} from {source_of(plan.resume)}{kept}"


def source_of(resume: Resume) -> str:
    """Where a generation's state comes from, in words."""
    if resume.kind == "survivor":
        return f"the survivors' memory at step {resume.step}"
    if resume.kind == "snapshot":
        return f"the snapshot of step {resume.step}"
    if resume.kind == "disk":
        return f"the checkpoint of step {resume.step}"
    return "the script's own checkpoint" if resume.kind == "own" else "the beginning"


def redone(incident: Incident) -> str:
    """What is known of the work that a job with checkpoints of its own does again."""
    return ("what the script redoes is its own checkpoint's affair, "
            f"at most {incident.redo_s:.1f} s of training")


def _ranks(numbers: tuple[int, ...]) -> str:
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(str(number) for number in numbers)}"


def recovered(
    incident: Incident, now: Now, step: int, lost_s: float, phases_s: tuple[float, float],
    after_s: float,
) -> Incident:
    """Closed on the first step never finished before, with what it cost.  `phases_s`: detection and
    decision; with the restart they come to `lost_s`, which the next fault may have cut short."""
    lost = incident.lost_steps
    cost = f"cost {lost_s:.2f} s"
    where = f"training goes on at step {step}" if step else "the job runs again"
    if lost >= 0:
        cost += f" and {lost} {'step' if lost == 1 else 'steps'} redone"
    elif incident.redo_s > 0:
        where, cost = "training again", f"{cost}; {redone(incident)}"
    text = f"{where}, {after_s:.2f} s after the verdict; {cost}"
    closed = ended(incident, now, CLOSED, text)
    detection_s = min(max(0.0, phases_s[0]), lost_s)
    decision_s = min(phases_s[1], lost_s - detection_s)
    return msgspec.structs.replace(
        closed, lost_s=lost_s, detection_s=detection_s, decision_s=decision_s,
        restart_s=max(0.0, lost_s - detection_s - decision_s))
