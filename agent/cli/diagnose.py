"""`holdfast diagnose LOG...`: what killed a run that is already dead, from its logs alone.

Owns the words.  Reading is agent/logs/files.py's, judging agent/core/parse/logs/root.py's.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.lines import NO_RANK
from holdfast.agent.core.parse.logs.signatures import CASCADE, ROOT, UNPLACED, Match
from holdfast.agent.logs import files
from holdfast.worker import exits
from holdfast.worker.exits import CONFIGURATION, USAGE

from .text import (
    BAD,
    CARE,
    FAINT,
    STRONG,
    Failure,
    Line,
    Span,
    count,
    field,
    line,
    print_json,
    show,
    size,
)

# Of a folder's files: train.log, and train.log.1 or train.log.2.gz, which are older.
LOG_NAME = re.compile(r"(?P<base>.*\.(?:log|out|err|txt))(?:\.(?P<turn>\d{1,6}))?(?:\.gz)?|.*\.gz")
PROBLEMS_MAX = 16
SHOWN_MAX = 12  # kinds of lines
FAMILY_ALONE = "family alone: no signature knows this line, so check it before you act on it"
WORDS_ALONE = "the things it names alone: no rule knows this line, so take the culprit for a guess"
ABOUT = {
    "node": "the node: its kernel log and accelerators should say the same",
    "link": "the network between ranks: see the peer or port in the line",
    "job": "the job, not the node it ran on",
}
LOOK_AT = {
    "unknown": "the kernel log of the rank's node at that time, then the code",
    "storage": "the storage that the line is about, not the node it was read on",
    "policy": "what the scheduler allows this job, not the node it ran on",
}
CULPRITS = {
    "infra": "infrastructure", "network": "network", "user": "the job's own code or setup",
    "data": "data or model", "storage": "storage", "policy": "the scheduler's policy",
}


def diagnose(options: argparse.Namespace) -> int:
    """0 when a root was found, 1 when none; 2 when no file can be read."""
    try:
        report = files.diagnose(_unfolded(options.log), own=_own(options.config))
    except ValueError as error:
        raise Failure(str(error), CONFIGURATION) from error
    if report.unread == len(report.names):
        raise Failure("\n".join(report.problems[:PROBLEMS_MAX]), USAGE)
    if options.json:
        print_json({
            **logroot.as_json(report.diagnosis, report.names), "files": list(report.names),
            "bytes": report.nbytes, "handled": dict(report.handled),
            "lines_skipped": report.skipped, "problems": list(report.problems)})
    else:
        show(said(report))
    return exits.DONE if report.diagnosis.root else exits.FAILED


def _own(file: str | None) -> tuple[dict[str, Any], ...]:
    """The signatures of the node's configuration, where it has one."""
    from holdfast.agent.config import load

    path = Path(file) if file else load.DEFAULT_FILE
    if not file and not os.access(path, os.R_OK):  # not there, or its folder is closed to users
        return ()
    try:
        return load.load(path).signatures
    except load.ConfigError as error:
        raise Failure(f"{error}\n(--config FILE names another configuration)",
                      CONFIGURATION) from error


def _unfolded(given: Sequence[str]) -> list[str]:
    """A folder stands for the files in it, as a run's log directory does."""
    paths: list[str] = []
    for name in given:
        folder = Path(name)
        if name == "-" or not _listed(folder):
            paths.append(name)  # an unreadable folder is reported where files are read
            continue
        found = (str(one) for one in folder.rglob("*") if one.is_file())
        paths += sorted((one for one in found if LOG_NAME.fullmatch(one)), key=_oldest_first)
    if not paths:
        raise Failure(f"no log in {', '.join(given)}", USAGE)
    return paths


def _listed(path: Path) -> bool:
    """Whether it is a folder whose names this user may read."""
    try:
        with os.scandir(path):
            return True
    except OSError:
        return False


def _oldest_first(path: str) -> tuple[str, int]:
    named = LOG_NAME.fullmatch(path)
    assert named is not None
    return named["base"] or path, -int(named["turn"] or 0)


def said(report: files.Report) -> list[Line]:
    """The root and its evidence, or what can be said without one."""
    found = report.diagnosis
    lines = _root(found, report.names) if found.root else [
        *field("root", Span("none found", CARE)), *field("", found.hint)]
    lines += field("meaning", report.note) if report.note else []
    lines += _others(found)
    read = f"{count(len(report.names), 'file')}, {size(report.nbytes)}"
    lines += [(), *field("read", Span(read, FAINT))]
    for name, times in report.handled:
        lines += field("handled", f"{name}, {count(times, 'time')}: the process went on after it")
    if report.skipped:
        lines += field("skipped", f"{count(report.skipped, 'line')} over the limits")
    for problem in report.problems:
        lines += field("problem", Span(problem, CARE))
    return lines


def _root(found: logroot.Diagnosis, names: Sequence[str]) -> list[Line]:
    root = found.root
    assert root is not None
    culprit = CULPRITS.get(root.culprit, "not known from this line alone")
    rank = "not named" if root.rank == NO_RANK else str(root.rank)
    name = names[root.file]
    return [
        *field("root", Span(f"{root.signature} ({root.category})", BAD)),
        *field("culprit", Span(culprit, STRONG)),
        *field("look at", LOOK_AT.get(root.culprit) or ABOUT[found.blames]),
        *field("retry", logroot.RETRY_WORDS[root.retryable]), *field("rank", rank),
        *field("where", f"{'standard input' if name == '-' else name}, line {root.number}"),
        *field("line", root.text[:400]),
        *(field("known by", WORDS_ALONE if root.faint else FAMILY_ALONE) if root.family else ()),
    ]


def _others(found: logroot.Diagnosis) -> list[Line]:
    """Every other kind of line, once, with the ranks that printed it."""
    kinds: dict[tuple[str, str], list[Match]] = {}
    for match in found.matches:
        if match is not found.root:
            role = "mentioned" if match.role == ROOT and match.mention else match.role
            kinds.setdefault((role, match.signature), []).append(match)
    lines: list[Line] = []
    shown = sorted(kinds.items(), key=lambda item: item[0][0] != ROOT)
    for (role, name), matches in shown[:SHOWN_MAX]:
        ranks = sorted({match.rank for match in matches if match.rank != NO_RANK})
        who = f", ranks {', '.join(map(str, ranks[:8]))}" if len(ranks) > 1 else (
            f", rank {ranks[0]}" if ranks else "")
        more = ", …" if len(ranks) > 8 else ""
        kind = {ROOT: "later", UNPLACED: "no rule knows it",
                CASCADE: "follows from it" if found.root else "a consequence"}
        lines += field(f"  {name}", f"{kind.get(role, role)}{who}{more}",
                       indent=max(13, len(name) + 4))
    if len(shown) > SHOWN_MAX:
        lines.append(line(f"  and {len(shown) - SHOWN_MAX} more kinds (--json has all)"))
    return [(), line(Span("also there", FAINT)), *lines] if lines else []
