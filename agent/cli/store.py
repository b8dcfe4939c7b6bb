"""`holdfast store`: looks at the store of many nodes, seeds an empty one, has this node forget one.

Owns the words for a person.  What is looked at and changed is agent/store/examine.py's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.worker.exits import CONFIGURATION, FAILED

from .doctor_node import HAVE, LACK, NEED, Finding
from .policy import _load
from .text import Failure, Line, field, line, print_json, show, size, table

if TYPE_CHECKING:
    from holdfast.agent.store.examine import Report


def store(options: argparse.Namespace) -> int:
    config = _load(options.config).config
    if not config.store.url:
        raise Failure("store.url is not set: one node keeps its state in SQLite, and there is "
                      "nothing to look at; docs/cluster.md says how many nodes share one",
                      CONFIGURATION)
    from holdfast.agent.store.base import StoreError

    try:
        return _done(options, config)
    except StoreError as error:
        raise Failure(str(error)) from error


def _done(options: argparse.Namespace, config: Any) -> int:
    from holdfast.agent.store import examine

    node, directory = config.agent.node or "store", Path(config.agent.state_dir)
    if options.what == "show":
        report = examine.look(config.store, node, directory)
        if options.json:
            print_json({**report._asdict(), "members": [one._asdict() for one in report.members],
                        "warnings": report.warnings})
        else:
            show(told(report))
        return FAILED if report.problem else 0
    if options.what == "seed":
        id = examine.seed(config.store, node, directory)
        text = (f"cluster {config.store.cluster} has the id {id}: every node that knew it goes on "
                "by itself")
    else:
        id = examine.forget(directory)
        text = (f"this node knew {id}, and joins the cluster that it finds next" if id else
                "this node knew no cluster yet")
    if options.json:
        print_json({"id": id, "cluster": config.store.cluster})
    else:
        show([line(text)])
    return 0


def findings(config_file: str | None) -> list[Finding]:
    """For `holdfast doctor`; nothing for one node, and nothing for a configuration that is bad,
    which another finding says."""
    what, cost = "store of the nodes", "no plan is made for a run, and no lost rank comes back"
    try:
        config = _load(config_file).config
    except Failure:
        return []
    if not config.store.url:
        return []
    from holdfast.agent.store import examine
    from holdfast.agent.store.base import StoreError

    try:
        report = examine.look(config.store, config.agent.node or "store",
                              Path(config.agent.state_dir))
    except StoreError as error:
        return [Finding(what, NEED, str(error), cost)]
    if report.problem:
        return [Finding(what, NEED, report.problem, cost)]
    silent = [f"{one.address}: {one.error}" for one in report.members if one.error]
    said = f"{len(report.members) - len(silent)} of {len(report.members)} members answer"
    if silent or report.warnings:
        return [Finding(what, LACK, said, "; ".join([*silent, *report.warnings]))]
    return [Finding(what, HAVE, f"{said}, cluster {report.cluster} {report.known_id}")]


def told(report: Report) -> list[Line]:
    lines: list[Line] = [
        *field("store", report.url),
        *field("cluster", f"{report.cluster} {report.known_id}".strip()),
        *field("holds", f"{report.documents} documents, {size(report.document_bytes)}; "
                        f"{report.leases} leases"),
    ]
    if report.members:
        lines += [(), *table(("member", "etcd", "leads", "data", "answers in", "problem"), [
            [one.address, one.version or "-", "yes" if one.is_leader else "", size(one.db_bytes),
             f"{1000 * one.answer_s:.1f} ms" if one.version else "-", one.error]
            for one in report.members], wrap=True)]
    lines += [row for text in report.warnings for row in field("mind", text)]
    return [*lines, (), *field("problem", report.problem or "none")]
