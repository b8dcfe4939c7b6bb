"""Reads runbooks/*.md: TOML between two +++ lines for the machine, prose for the person.

Owns finding, parsing and checking them, and the rule that a file of the operator's shadows the
machine part of a shipped one.  An error names file, line and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ..checks.table import BY_NAME, NOT_A_ROUND
from ..core.actions import ACTIONS, rungs
from ..core.model import SEVERITIES, Runbook
from ..system.regular import read_regular
from ..system.time_limit import TooSlow, at_most

FENCE = "+++"
FILE_MAX_BYTES = 256 * 1024
FILES_MAX = 1000
PARSE_S = 2.0
LADDER_MAX = 12
SCOPES = ("gpu", "neuron", "nic", "rank", "node", "run", "store")
CLEARS = ("reboot", "quiet_10m", "check", "operator")
KEYS = ("severity", "scope", "ladder", "budget", "clears", "alert", "checks")


class RunbookError(ValueError):
    """One or more runbooks cannot be used; one line each: file:line: key: what to set."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


class Document(NamedTuple):
    """A runbook with its prose."""

    runbook: Runbook
    prose: str


def load_runbooks(shadows: Path | None = None) -> dict[str, Runbook]:
    """Every shipped runbook by its fault, shadowed by files of the same name in `shadows`.
    RunbookError names every error."""
    return {fault: one.runbook for fault, one in load_documents(shadows).items()}


def load_documents(shadows: Path | None = None) -> dict[str, Document]:
    """The same with their prose, by fault.  A shadow without prose keeps the shipped prose."""
    errors: list[str] = []
    found: dict[str, Document] = {}
    for place, fault, text in _texts(shadows, errors):
        try:
            document = parse(fault, text, place)
        except RunbookError as error:
            errors.extend(error.errors)
            continue
        before = found.get(fault)
        if before is not None and not document.prose.strip():
            document = document._replace(prose=before.prose)
        found[fault] = document
    if errors:
        raise RunbookError(errors)
    return dict(sorted(found.items()))


def parse(fault: str, text: str, place: str) -> Document:
    """One file.  RunbookError with every error in it."""
    lines = text.splitlines()
    fences = [number for number, line in enumerate(lines) if line.strip() == FENCE][:2]
    if len(fences) < 2 or any(line.strip() for line in lines[: fences[0]]):
        raise RunbookError([f"{place}:1: begins without TOML between two {FENCE} lines: add it"])
    first, last = fences
    # Empty lines in front keep the parser's line numbers those of the file.
    toml = "\n" * (first + 1) + "\n".join(lines[first + 1 : last])
    try:
        with at_most(PARSE_S):
            table = tomllib.loads(toml)
    except (TooSlow, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunbookError([f"{place}: no valid TOML: {error}"]) from error
    errors = [f"{place}:{_line_of(key, lines)}: {key}: {why}" for key, why in _check(table)]
    if errors:
        raise RunbookError(errors)
    budget = table.get("budget", {})
    runbook = Runbook(
        fault=fault, severity=table["severity"], scope=table["scope"],
        ladder=tuple(table.get("ladder", ())), budget_count=budget.get("count", 3),
        budget_window_h=float(budget.get("window_h", 24.0)), clears=table.get("clears", "check"),
        alert=table.get("alert", ""), path=place, checks=tuple(table.get("checks", ())),
    )
    return Document(runbook, "\n".join(lines[last + 1 :]).strip() + "\n")


def _check(table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong and what to set) of every error in a machine part."""
    for key in table:
        if key not in KEYS:
            yield key, f"is unknown: set only {', '.join(KEYS)}"
    for key, known in (("severity", SEVERITIES), ("scope", SCOPES)):
        if key not in table:
            yield key, f"is missing: set one of {', '.join(known)}"
        elif table[key] not in known:
            yield key, f"{table[key]!r}: set one of {', '.join(known)}"
    if table.get("clears", "check") not in CLEARS:
        yield "clears", f"{table['clears']!r}: set one of {', '.join(CLEARS)}"
    checks = table.get("checks", [])
    makes = [one for one in BY_NAME if one not in NOT_A_ROUND]
    if not isinstance(checks, list) or any(one not in makes for one in checks):
        yield "checks", f"{checks!r}: set a list of {', '.join(makes)}"
    ladder = table.get("ladder", [])
    if not isinstance(ladder, list) or len(ladder) > LADDER_MAX:
        yield "ladder", f"set a list of at most {LADDER_MAX} rungs"
    else:
        for rung in ladder:
            if rung not in rungs():
                is_action = isinstance(rung, str) and rung in ACTIONS
                why = "is performed by nobody" if is_action else "is unknown"
                yield "ladder", f"rung {rung!r} {why}: set some of {', '.join(rungs())}"
    budget = table.get("budget", {})
    if not isinstance(budget, dict) or set(budget) - {"count", "window_h"}:
        yield "budget", "set { count = 3, window_h = 24 }"
    else:
        count, window_h = budget.get("count", 3), budget.get("window_h", 24)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1000:
            yield "budget", f"count = {count!r}: set a whole number of 0 to 1000"
        if isinstance(window_h, bool) or not isinstance(window_h, (int, float)) or window_h <= 0:
            yield "budget", f"window_h = {window_h!r}: set hours > 0"
    alert = table.get("alert", "")
    if not isinstance(alert, str) or (alert and not alert.startswith("Holdfast")):
        yield "alert", f"{alert!r}: set a name that begins with Holdfast"


def _line_of(key: str, lines: list[str]) -> int:
    for number, line in enumerate(lines, 1):
        if line.split("=")[0].strip() == key:
            return number
    return 1


def _texts(shadows: Path | None, errors: list[str]) -> Iterator[tuple[str, str, str]]:
    """(place, fault, text) of every file, shipped ones first."""
    shipped = resources.files("holdfast.runbooks")
    for item in sorted(shipped.iterdir(), key=lambda one: one.name):
        if item.name.endswith(".md"):
            yield f"runbooks/{item.name}", item.name[:-3], item.read_text("utf-8")
    if shadows is None or not shadows.is_dir():
        return
    for path in sorted(shadows.glob("*.md"))[:FILES_MAX]:
        try:
            text = read_regular(path, FILE_MAX_BYTES).decode("utf-8-sig")
        except OSError as error:
            errors.append(f"{path}: {error.strerror}: make it readable, or take it away")
        except ValueError as error:
            errors.append(f"{path}: {error}")
        else:
            yield str(path), path.stem, text
