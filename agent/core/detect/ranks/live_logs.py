"""The log child's findings in a live run's logs, as a verdict and as rows of an incident.

Owns the meaning and the words of its answer.  The verdict is shown and never acted on: a line of a
log is what a process noticed, and an error of the job's own must cost no node its place.  When to
ask is agent/core/run/log_questions.py's; the answer is made by agent/logs/child.py.  Pure.
"""

from __future__ import annotations

import msgspec

from ...model import UNREADABLE, WARN, Verdict, run_subject
from ...parse.logs.signatures import ABOUT

DETECTOR = "logs"
FAULT = "log_root_cause"
TEXT_MAX = 300  # characters of a log's line that are shown
WORD_MAX = 64  # of a name: the child's word is input from outside
OTHERS_MAX = 6
FIRM, WEAK = 0.8, 0.5  # a weak root is one that a dying peer can cause as well
FAMILY = 0.4  # known by vocabulary or class alone, by no signature
FAINT = 0.2  # by no rule: placed by the things that it names
LOOK_AT = {
    "node": "the node: its kernel log and accelerators should say the same",
    "link": "the network between ranks: see the peer or port in the line",
    "job": "the job, not the node it ran on",
}


class Line(msgspec.Struct, frozen=True):
    """The line that began it."""

    signature: str
    culprit: str
    rank: int = -1
    line: str = ""
    retryable: str = ""
    weak: bool = False
    family: bool = False
    path: str = ""
    offset: int = 0


class Kind(msgspec.Struct, frozen=True):
    """Another kind of line that was there, and who printed it."""

    signature: str
    role: str
    ranks: tuple[int, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """One look at the end of every rank's logs."""

    root: Line | None = None
    blames: str = ""  # node | link | job
    hint: str = ""  # where to look when there is no root
    note: str = ""
    others: tuple[Kind, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: int = 0  # lines over the limits


class Asked(msgspec.Struct, frozen=True):
    """A look that is wanted, and then under way."""

    incident: str
    generation: int
    since_boot_s: float
    sent: bool = False
    node: str = ""  # whose ranks' logs; "" = this node's


class LogLook(msgspec.Struct, frozen=True):
    """What a run's case remembers of its logs."""

    asked: Asked | None = None
    last: str = ""  # what was asked for last: once each
    suspected_boot_s: float = -1e9  # when a suspicion was looked into last
    incident: str = ""  # that the verdict belongs to
    verdict: Verdict | None = None


def read(detail: str) -> Answer | None:
    """None for what is no answer: the child runs as the job's user."""
    try:
        return msgspec.json.decode(detail.encode(), type=Answer)
    except UNREADABLE:
        return None


def root_text(root: Line) -> str:
    """`nccl_system_error on rank 3 (infra): the line`."""
    who = f" on rank {root.rank}" if root.rank >= 0 else ""
    return f"{_word(root.signature)}{who} ({_word(root.culprit)}): {plain(root.line)}"


def plain(text: str) -> str:
    """A log's own words without what could move a person's cursor."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 2 * TEXT_MAX])
    return " ".join(shown.split())[:TEXT_MAX]


def _word(text: str) -> str:
    return plain(text)[:WORD_MAX]


def rows(answer: Answer) -> tuple[tuple[str, str], ...]:
    """For an incident's evidence: the root first, or where to look without one."""
    found = [("root", root_text(answer.root))] if answer.root else []
    if answer.root is None and answer.hint:
        found.append(("logs", f"no root: {plain(answer.hint)}"))
    found += [("logs not read", plain(text)) for text in answer.problems[:2]]
    return tuple(found)


def _known_by(root: Line) -> str:
    if root.signature.startswith(ABOUT):
        return "the things that it names alone"
    return "its family alone" if root.family else ""


def _confidence(root: Line) -> float:
    if root.family:
        return FAINT if root.signature.startswith(ABOUT) else FAMILY
    return WEAK if root.weak else FIRM


def verdict_of(answer: Answer, run: str, generation: int) -> Verdict | None:
    """About the run's logs, not about a node or a rank: those have verdicts of their own."""
    root = answer.root
    if root is None:
        return None
    also = "; ".join(_kind(one) for one in answer.others[:OTHERS_MAX])
    evidence = (
        ("culprit", _word(root.culprit)), ("look at", LOOK_AT.get(answer.blames, "")),
        ("retry", _word(root.retryable)), ("where", f"{plain(root.path)}, byte {root.offset}"),
        ("known by", _known_by(root)),
        ("meaning", plain(answer.note)), ("also there", also),
    )
    return Verdict(
        fault=FAULT, subject=run_subject(run, "logs"), severity=WARN,
        confidence=_confidence(root),
        reason=f"root: {root_text(root)}", evidence=tuple(row for row in evidence if row[1]),
        act=False, detector=DETECTOR, run=run, generation=generation,
    )


def _kind(one: Kind) -> str:
    ranks = ", ".join(str(rank) for rank in one.ranks[:8])
    who = f" on {'rank' if len(one.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
    return f"{_word(one.signature)} ({_word(one.role)}){who}"
