"""`holdfast drift`: which nodes of a run differ from most, and in what.

Owns what is asked, how it reads and the exit code.  What differs is found by
agent/core/nodes/identity.py: in the agent, or here of what several agents said (drift_files.py).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from holdfast.worker import exits

from .client import asking, choose, reach
from .text import (
    CARE,
    FAINT,
    GOOD,
    Cell,
    Failure,
    Line,
    Span,
    clock,
    count,
    field,
    line,
    print_json,
    show,
    table,
)

SAME, DIFFERENT, UNKNOWN = exits.DONE, exits.FAILED, exits.NOT_KNOWN
ROWS_MAX = 64
NODES_SHOWN = 12
CHANGES_SHOWN = 8
NONE = "none"
Json = Mapping[str, Any]


@functools.partial(asking, code=UNKNOWN)
def drift(options: argparse.Namespace) -> int:
    """0 when all are the same, or there is one node alone; 1 when some differ; 3 when a node's
    identity is not known and no difference was found, or no agent could be asked; 2 for a file
    that is not what an agent said."""
    answer = _given(options.file) if options.file else _asked(options.run)
    if options.json:
        print_json(answer)
    else:
        show(said(answer))
    return code(answer)


def _given(files: Sequence[str]) -> Any:
    from . import drift_files

    return drift_files.compared(files)


def _asked(name: str | None) -> Any:
    try:
        found = reach()
        runs = {one["run"] for _, answer in found for one in answer["runs"]}
        agent, run = found[0][0], ""
        if name or runs:
            agent, _, run = choose(found, name)
        return agent.get(f"/api/v1/drift?run={quote(run, safe='')}" if run else "/api/v1/drift")
    except Failure as failure:
        raise Failure(str(failure), UNKNOWN) from failure


def code(answer: Json) -> int:
    if answer["differences"]:
        return DIFFERENT
    return UNKNOWN if answer["unknown"] or answer["unread"] else SAME


def said(answer: Json) -> list[Line]:
    """Nodes, differences and recent changes; the values themselves where there is one node."""
    nodes = answer["nodes"]
    of = f" of run {answer['run']}" if answer["run"] else ""
    lines = field("nodes", f"{len(nodes)}{of}: {_listed(nodes)}")
    if len(nodes) == 1:
        lines += _alone(answer)
    elif answer["differences"]:
        odd = {node for one in answer["differences"] for node, _ in one["nodes"]}
        text = f"{count(len(odd), 'node')}, in {len(answer['differences'])} of {_values(answer)}"
        lines += [*field("differ", Span(text, CARE)), (), *_table(answer["differences"])]
    elif len(answer["unknown"]) + 1 < len(nodes):
        lines += field("differ", Span(f"none, in {_values(answer)}", GOOD))
    if answer["unknown"] and len(nodes) > 1:
        text = f"nothing is known of {_listed(answer['unknown'])}: no agent there has written it"
        lines += field("unknown", Span(text, CARE))
    for node, source in answer["unread"][:NODES_SHOWN]:
        lines += field("unread", Span(f"{node} has not said {source}, others have", CARE))
    return lines + _changes(answer["changes"])


def _values(answer: Json) -> str:
    return count(answer["compared"], "value")


def _listed(nodes: list[str]) -> str:
    more = len(nodes) - NODES_SHOWN
    return ", ".join(nodes[:NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _alone(answer: Json) -> list[Line]:
    text = ("one node: there is no other to compare it with; several are, when `holdfast drift` is "
            "given what `holdfast drift --json` says on each")
    lines = field("differ", text)
    if not answer["values"]:
        return lines + field("unknown", Span("nothing was read of it yet", CARE))
    rows: list[list[Cell]] = [[key, value] for key, value in sorted(answer["values"].items())]
    return [*lines, (), *table(("key", "value"), rows[:ROWS_MAX], indent=2, wrap=True)]


def _table(differences: list[Json]) -> list[Line]:
    """One row for each node that differs; a key without a majority has a row for every node."""
    rows: list[list[Cell]] = []
    for one in differences:
        most = f"{one['most'] or NONE} ({one['agree']} of {one['of']})" if one["agree"] else "-"
        for node, value in one["nodes"]:
            rows.append([one["key"], most, node, Span(value or NONE, CARE)])
            one, most = {**one, "key": ""}, ""
    lines = table(("key", "most say", "node", "says"), rows[:ROWS_MAX], indent=2, wrap=True)
    if len(rows) > ROWS_MAX:
        lines.append(line(f"  and {len(rows) - ROWS_MAX} more (--json has all)"))
    return lines


def _changes(changes: list[Json]) -> list[Line]:
    if not changes:
        return []
    newest = sorted(changes, key=lambda one: -one["wall_s"])[:CHANGES_SHOWN]
    lines = [(), line(Span("changed since an agent first saw it, newest first", FAINT))]
    for one in newest:
        text = f"{one['key']}: {one['before'] or NONE} -> {one['after'] or NONE}"
        lines += field(f"  {clock(one['wall_s'])}", f"{one['node']}, {text}", indent=22)
    return lines
