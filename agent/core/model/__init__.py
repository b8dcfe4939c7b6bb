"""The nouns of Holdfast: what is observed, what is concluded, what is asked for, what is done.

Owns the types that cross the border between the deterministic core and the edge.  No I/O, no
clock but `Now`, no randomness.  Import them from here.
"""

from __future__ import annotations

from .alert import Alert
from .bounds import Amount, Seconds, Whole
from .checked import CheckVerdict
from .concluded import (
    DEGRADED,
    FATAL,
    OK,
    OPERATOR_REQUEST,
    SEVERITIES,
    UNKNOWN,
    WARN,
    WISHES,
    WORLD_GROWS,
    Answer,
    Incident,
    Request,
    Verdict,
)
from .documents import UNREADABLE, Doc, Documents
from .effects import (
    Decision,
    Delete,
    Effect,
    Finish,
    NodeOrder,
    NodeTests,
    RemoveLock,
    RunCheck,
    Start,
    Stop,
    StoreWrite,
    TakeEvidence,
)
from .events import Escalation, Event
from .observed import (
    EFA_GROUP,
    LEVELS,
    MODEL,
    OPAQUE,
    SCRIPT,
    TRAINER,
    Beat,
    Commit,
    Condition,
    EffectOutcome,
    Ended,
    Gate,
    GradientSum,
    Labels,
    Lease,
    Observed,
    Parked,
    RankView,
    RunView,
    SnapshotView,
    StoreView,
    rank_words,
)
from .plan import Plan, Resume
from .readings import Named, Reading, Readings, Rows, Selection, by_name, labels_of, readings_of
from .settings import GROUPS, MAY_ACT, PEER_TESTS, GateSettings, Runbook, Settings
from .subject import FLEET, STORE, Subject, node_subject, rank_subject, run_subject, subject_of
from .time import Now, Value

__all__ = [
    "Alert", "Amount", "Answer", "Beat", "CheckVerdict", "Commit", "Condition", "DEGRADED",
    "Decision", "Delete", "Doc", "Documents", "EFA_GROUP", "Effect", "EffectOutcome", "Ended",
    "Escalation", "Event", "FATAL", "FLEET", "Finish", "GROUPS", "Gate", "GateSettings",
    "GradientSum", "Incident", "LEVELS", "Labels", "Lease", "MAY_ACT", "MODEL", "Named",
    "NodeOrder", "NodeTests", "Now", "OK", "OPAQUE", "OPERATOR_REQUEST", "Observed", "PEER_TESTS",
    "Parked", "Plan", "RankView", "Reading", "Readings", "RemoveLock", "Request", "Resume", "Rows",
    "RunCheck", "RunView", "Runbook", "SCRIPT", "SEVERITIES", "STORE", "Seconds", "Selection",
    "Settings", "SnapshotView", "Start", "Stop", "StoreView", "StoreWrite", "Subject", "TRAINER",
    "TakeEvidence", "UNKNOWN", "UNREADABLE", "Value", "Verdict", "WARN", "WISHES", "WORLD_GROWS",
    "Whole", "by_name", "labels_of", "node_subject", "rank_subject", "rank_words", "readings_of",
    "run_subject", "subject_of",
]
