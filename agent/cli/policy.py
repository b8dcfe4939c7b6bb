"""Commands about the policy: explain, config.

Owns how runbooks and configuration are said to a person.  What they mean is decided in
agent/core/run/policy.py; the files are read by agent/config/runbooks.py and agent/config/load.py.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent.core.actions import ACTIONS, needing_alone
from holdfast.agent.core.model import Runbook
from holdfast.runbooks import prose
from holdfast.worker.exits import CONFIGURATION

from .text import (
    FAINT,
    STRONG,
    Cell,
    Failure,
    Line,
    Span,
    count,
    field,
    line,
    paragraphs,
    print_json,
    show,
    table,
)

if TYPE_CHECKING:
    from ..config.runbooks import Document
    from .client import Agent

ALONE = "this node sees no fleet that would open the breaker; actions.alone = true allows it"
CLEARS = {
    "reboot": "with the node's next boot",
    "quiet_10m": "after ten minutes without it; what a line of the kernel's calls fatal with the "
                 "next boot, or by `holdfast close`",
    "check": "as soon as what was watched is good again",
    "operator": "by a person's hand",
}


def runbooks() -> dict[str, Document]:
    """The runbooks in force with their prose, shadows included.  Raises Failure for a bad one."""
    return _runbooks(_load(None).config)


def _runbooks(configuration: Any) -> dict[str, Document]:
    from holdfast.agent.config.runbooks import load_documents

    try:
        return load_documents(Path(configuration.runbooks.directory))
    except (OSError, ValueError) as error:
        raise Failure(str(error), CONFIGURATION) from error


# ------------------------------------------------------------------------------------- explain


def explain(options: argparse.Namespace) -> int:
    books = runbooks()
    if not options.fault:
        return _list({fault: one.runbook for fault, one in books.items()}, options.json)
    found = books.get(options.fault)
    if found is None:
        import difflib

        near = difflib.get_close_matches(options.fault, books, 1)
        hint = f"did you mean {near[0]}?" if near else "`holdfast explain` lists all"
        raise Failure(f"no fault {options.fault!r}: {hint}")
    book, sections = found.runbook, prose.sections(found.prose)
    now = _now(book)
    if options.json:
        print_json({**_as_json(book), "now": now, "text": sections})
        return 0
    show(explained(book, sections, now))
    return 0


def explained(book: Runbook, sections: dict[str, str], now: list[str]) -> list[Line]:
    """The runbook for a person, the machine's part first."""
    lines = [
        line(Span(book.fault, STRONG), f": {book.severity}, about a {book.scope}"),
        *field("written in", book.path or "the shipped runbook"),
        *field("alert", book.alert or "none"),
        *field("clears", CLEARS.get(book.clears, book.clears)),
    ]
    budget = f"each {count(book.budget_count, 'time')} in {book.budget_window_h:g} h per subject:"
    lines += field("done", budget if book.ladder else "nothing by itself")
    for number, action in enumerate(book.ladder, 1):
        lines += field(f"  {number} {action}", ACTIONS[action].text, indent=20)
    lines += [row for text in now for row in field("now", text)]
    for title, body in sections.items():
        lines += [(), line(Span(title, FAINT)), *paragraphs(body)]
    return lines


def _now(book: Runbook) -> list[str]:
    """What would happen if the fault came now, from the agents that answer."""
    from .client import asking, reach

    try:
        found = reach()
    except Failure:
        return ["no agent answers here; this is what the next run would do"]
    return asking(_now_of)(book, found)


def _now_of(book: Runbook, found: Sequence[tuple[Agent, dict[str, Any]]]) -> list[str]:
    said = []
    for agent, answer in found:
        where = answer["node"]
        if answer.get("paused"):
            said.append(f"{where}: paused, it would be shown and nothing done")
        elif answer.get("breaker_open"):
            said.append(f"{where}: the breaker is open, nothing disruptive would be done")
        else:
            recent = _recent(agent.get("/api/v1/incidents?all=1"), book)
            rows = agent.get(f"/api/v1/explain/{book.fault}")
            paused = ", ".join(one["run"] for one in answer["runs"] if one.get("paused"))
            said += [f"{where}: {text}" for text in outlook(rows, book)]
            said.append(
                f"{where}: {count(recent, 'incident')} of it in the last "
                f"{book.budget_window_h:g} h{f'; nothing for {paused}: paused' if paused else ''}")
    return said


def outlook(rows: list[dict[str, Any]], book: Runbook) -> list[str]:
    """What the core said that it would do, subjects with the same answer in one line."""
    if not rows:
        return ["no run goes on, so nothing would be done" if book.ladder else "only shown"]
    groups: dict[str, list[str]] = {}
    for row in rows:
        rung, reason = row.get("rung", ""), row.get("reason", "")
        code = row.get("code", -1)
        text = rung or "nothing"
        if code >= 0:
            text = f"{text}: the run would end with {code} ({reason})"
        elif not rung:
            text = f"nothing: {reason or 'it is only shown'}"
        groups.setdefault(text, []).append(row["subject"])
    return [f"{text}; for {', '.join(subjects[:4])}"
            f"{f' and {len(subjects) - 4} more' if len(subjects) > 4 else ''}"
            for text, subjects in groups.items()]


def _recent(incidents: list[dict[str, Any]], book: Runbook) -> int:
    since = time.time() - book.budget_window_h * 3600
    return sum(one["fault"] == book.fault and one["opened_wall_s"] > since for one in incidents)


def _list(books: dict[str, Runbook], as_json: bool) -> int:
    if as_json:
        print_json([_as_json(book) for _, book in sorted(books.items())])
        return 0
    rows: list[list[Cell]] = [
        [name, book.severity, book.scope, ", ".join(book.ladder) or "shown only"]
        for name, book in sorted(books.items())]
    show(table(("fault", "severity", "scope", "what is done"), rows, wrap=True))
    return 0


def _as_json(book: Runbook) -> dict[str, Any]:
    return {name: getattr(book, name) for name in book.__struct_fields__}


# -------------------------------------------------------------------------------------- config


def _load(file: str | None, serves: bool = False) -> Any:
    """agent.config's Loaded.  Raises Failure (78) with every error on its own line."""
    from holdfast.agent.config import load as configuration

    path: Path | None = Path(file) if file else configuration.DEFAULT_FILE
    if path is not None and not file and not os.access(path, os.R_OK):
        path = None
    try:
        with configuration.within_limit("holdfast config", path):
            return configuration.load_all(path)[0] if serves else configuration.load(path)
    except configuration.ConfigError as error:
        lines = "\n  ".join(error.errors)
        raise Failure(f"{count(len(error.errors), 'error')}:\n  {lines}", CONFIGURATION) from error


def _where(file: str | None) -> str:
    """What was checked: nothing is not good."""
    from holdfast.agent.config.load import DEFAULT_FILE

    if file or os.access(DEFAULT_FILE, os.R_OK):
        return f"good: {file or DEFAULT_FILE}"
    return f"no readable {DEFAULT_FILE}"


def config(options: argparse.Namespace) -> int:
    """check: 0, or 78 with all errors.  show: every value and the file that it comes from."""
    from holdfast.agent.config.load import flatten

    loaded = _load(options.config, serves=options.what == "check")
    values = {key: (value, loaded.origins[key]) for key, value in flatten(loaded.config)}
    if options.json:
        print_json({key: {"value": value, "origin": origin}
                    for key, (value, origin) in values.items()})
        return 0
    if options.what == "check":
        changed = sum(origin != "default" for _, origin in values.values())
        own = len(loaded.signatures)
        more = f", {count(own, 'own signature')}" if own else ""
        allow, many = loaded.config.actions.allow, bool(loaded.config.store.url)
        held = [f"{one}: {ALONE}"
                for one in needing_alone(allow, loaded.config.actions.alone or many)]
        show([line(f"{_where(options.config)}: {count(changed, 'value')} set, "
                   f"{len(values) - changed} by default{more}"),
              *(row for one in held for row in field("not done", one))])
        return 0
    show(configured(values))
    return 0


def configured(values: dict[str, tuple[object, str]]) -> list[Line]:
    """TOML that could be loaded again, each value with its origin."""
    lines: list[Line] = []
    section = ""
    for key, (value, origin) in values.items():
        here, _, name = key.partition(".")
        if here != section:
            lines += [*([()] if section else []), line(Span(f"[{here}]", STRONG))]
            section = here
        note = "" if origin == "default" else f"  # {origin}"
        lines.append(line(f"{name} = {_toml(value)}", Span(note, FAINT)))
    return lines


def _toml(value: object) -> str:
    import json

    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    return json.dumps(value)
