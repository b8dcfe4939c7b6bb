"""Reads runbooks/*.md: TOML between two +++ lines for the machine, prose for the person.

Owns finding, parsing and checking them, the rule that a file of the operator's shadows the machine
part of a shipped one, and the site's own words as the agent serves them: within bounds, without
control characters and secrets.  An error names file, line and key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.worker import toml_text
from holdfast.worker.redact import redacted

from ..checks.table import BY_NAME, NOT_A_ROUND
from ..core.actions import ACTIONS, rungs
from ..core.model import SEVERITIES, Runbook
from ..system.regular import read_regular

FENCE = "+++"
FILE_MAX_BYTES = 256 * 1024
FILES_MAX = 1000
# Of words that are kept to be served: a page of a person's is a few thousand characters.  What a
# reading child may answer has room for all of them, quotes and line ends escaped.
PAGE_MAX_CHARS = 32 * 1024
PAGES_MAX_CHARS = 256 * 1024
LADDER_MAX = 12
COUNT_MAX = 1000
WINDOW_H_MAX = 8784  # a year: longer than the journal of any node goes back
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


class InForce(NamedTuple):
    """What an agent keeps of them all: the machine parts, and a page for each file of the site's
    own that is no shipped one's or has words, both by fault."""

    runbooks: dict[str, Runbook]
    site_pages: dict[str, str]


def load_in_force(directory: Path) -> InForce:
    """Reads the shipped ones and those of the site.  RunbookError names every error."""
    shipped, documents = load_documents(), load_documents(directory)
    pages: dict[str, str] = {}
    room = PAGES_MAX_CHARS
    for fault, (runbook, prose) in documents.items():
        before = shipped.get(fault)
        if before is not None and prose == before.prose:
            continue
        page = _page(runbook, prose, min(room, PAGE_MAX_CHARS))
        room -= len(page) if prose.strip() else 0
        pages[fault] = page
    return InForce({fault: one.runbook for fault, one in documents.items()}, pages)


def _page(runbook: Runbook, prose: str, most: int) -> str:
    """The site's own words, or what to do where there are none to be served."""
    there = f"Read it on the node: `holdfast explain {runbook.fault}`.\n"
    if not prose.strip():
        return (f"{runbook.fault} is a runbook of this site's own, and has no words for a person "
                f"so far.\nWrite them below the second {FENCE} of {runbook.path}, then "
                f"`systemctl reload holdfast`.\nWhat Holdfast does about it says "
                f"`holdfast explain {runbook.fault}` on the node.\n")
    if len(prose) > most:
        return (f"{runbook.fault} is a runbook of this site's own, and is too long to be served: "
                f"{PAGE_MAX_CHARS} characters are, and {PAGES_MAX_CHARS} of all files in its "
                f"directory.\n{there}")
    return redacted(shown(prose))


def shown(prose: str) -> str:
    """The same without control characters: a terminal would act on them."""
    return "".join(one for one in prose if one.isprintable() or one in "\n\t")


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
        table = toml_text.parse(tomllib.loads, toml)
    except ValueError as error:
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
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= COUNT_MAX:
            yield "budget", f"count = {count!r}: set a whole number of 0 to {COUNT_MAX}"
        is_number = isinstance(window_h, (int, float)) and not isinstance(window_h, bool)
        if not is_number or not 0 < window_h <= WINDOW_H_MAX:  # nan would count nothing as spent
            yield "budget", f"window_h = {window_h!r}: set hours > 0 and <= {WINDOW_H_MAX}"
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
