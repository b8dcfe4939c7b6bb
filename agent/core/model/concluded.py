"""What a step concludes: verdicts, incidents, requests.

Owns the types that people and metrics read.
"""

from __future__ import annotations

from .time import Value

# What an incident tells of without a fault behind it: there is no runbook.
WISHES = OPERATOR_REQUEST, WORLD_GROWS = "operator_request", "world_grows"
SEVERITIES = OK, UNKNOWN, WARN, DEGRADED, FATAL = "ok", "unknown", "warn", "degraded", "fatal"


class Verdict(Value, frozen=True, omit_defaults=False):
    """A detector's conclusion about one subject, with what it rests on."""

    fault: str  # name of a runbook
    subject: str  # as model/subject.py writes it: "run/NAME/rank/1", "node/NAME", "store", ...
    severity: str
    confidence: float  # 1.0 = proof
    reason: str  # one sentence for a person
    evidence: tuple[tuple[str, str], ...] = ()  # (what, value)
    act: bool = False  # True: proof or cost allows acting; False: shown only
    detector: str = ""
    run: str = ""
    generation: int = 0
    explains: tuple[str, ...] = ()  # faults of the same node that are only its consequence


class Incident(Value, frozen=True, omit_defaults=False):
    """A fault over its lifetime: opened by a verdict, acted on, closed."""

    id: str
    fault: str
    subject: str
    severity: str
    run: str
    generation: int
    opened_wall_s: float
    opened_boot_s: float
    reason: str
    culprit: str  # "rank 1 (pid 4711) on node-a", "node-a"; "" = nobody is to blame
    evidence: tuple[tuple[str, str], ...] = ()
    timeline: tuple[tuple[float, str], ...] = ()  # (wall_s, what happened)
    state: str = "open"  # open | acted | closed | taken_back
    actions: tuple[str, ...] = ()  # effect ids
    closed_wall_s: float = 0.0
    lost_steps: int = 0  # -1: unknown, the job keeps its own checkpoints
    lost_s: float = 0.0  # from the last finished step before to the first new one after
    detection_s: float = 0.0  # ... of it until the verdict; known when training goes on
    decision_s: float = 0.0  # ... from there to the first plan
    restart_s: float = 0.0  # ... and from there on
    redo_s: float = 0.0  # a job that keeps its own checkpoints redoes at most this much
    would_have: str = ""  # what acting would have done, for observe-only detectors


class Request(Value, frozen=True):
    """An action that a ladder, an operator or an alert asks for (agent/core/actions.py)."""

    id: str
    action: str  # restart_ranks | take_evidence | run_check | exclude_node | ...
    subject: str
    reason: str
    run: str = ""
    fault: str = ""
    by: str = ""  # who, for people
    checks: tuple[str, ...] = ()  # of run_check
    until_wall_s: float = 0.0  # of pause: its end, by the taker's clock; 0 = a person ends it


class Answer(Value, frozen=True):
    """What became of a request: done, or refused and why."""

    id: str
    ok: bool
    text: str
