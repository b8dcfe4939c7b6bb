"""`holdfast bundle ID`: an incident and what stood around it, as a tar without secrets.

Owns which answers and which logs are gathered; what goes in and how it is redacted is
agent/evidence/bundle.py's.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from holdfast.worker.peers import user_name

from ..evidence import bundle as bundles
from . import live
from .client import Agent, Answering, asking, state_folder
from .ended import EndedRun
from .text import Failure, field, line, print_json, show

ALSO = {"ledger": "/api/v1/ledger", "checks": "/api/v1/checks", "identity": "/api/v1/drift"}


@asking
def bundle(options: argparse.Namespace) -> int:
    """Writes it; an existing file stays."""
    found = live.of_run(options.run)
    incident = live.one_incident(found, options.id)
    agent, status = next(
        (agent, status) for agent, status in found
        if any(one["id"] == incident["id"] for one in agent.get("/api/v1/incidents?all=1")))
    parts = bundles.parts_of(incident, status, agent.get("/api/v1/incidents?all=1"),
                             **_more(agent))
    logs, left_out = _logs(incident["run"], parts["run"])
    to = Path(options.to or f"holdfast-{bundles.file_name(incident['id'])}.tar.gz")
    content = bundles.pack(incident["id"], parts, logs)
    try:
        bundles.write(to, content)
    except OSError as error:
        raise Failure(f"{to}: {error.strerror}: choose another file with --to") from error
    unrecorded = _recorded(agent, incident["id"], options.reason)
    if options.json:
        print_json({"file": str(to), "bytes": len(content), "logs": sorted(logs),
                    "unrecorded": unrecorded})
        return 0
    show([line(f"{to}: {len(content)} bytes, {len(parts)} documents, {len(logs)} logs"),
          *(row for why in left_out[:5] for row in field("left out", why)),
          *(field("unrecorded", unrecorded) if unrecorded else ()),
          *field("", "passwords, tokens and keys are taken out as far as they can be told; look "
                 "through it before you send it")])
    return 0


def _recorded(agent: Answering, id: str, reason: str) -> str:
    """Has the agent keep in its journal who took the bundle and why; why not, where it does not.
    Whoever may read an incident can take what he read with him: the bundle is his all the same."""
    if not isinstance(agent, Agent):
        return "its agent has ended"
    body = {"reason": reason, "by": user_name(os.getuid())}
    try:
        agent.post(f"/api/v1/incidents/{quote(id, safe='')}/bundle", body)
    except Failure as failure:
        return str(failure)
    return ""


def _more(agent: Answering) -> dict[str, Any]:
    """What an agent that runs can tell; one that has ended left its journal alone."""
    if isinstance(agent, EndedRun):
        return {"ledger": agent.get(ALSO["ledger"])}
    return {name: agent.get(route) for name, route in ALSO.items()}


def _logs(run: str, runs: list[dict[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """The ends of the run's logs, and why some are not there."""
    folder = runs[0].get("log_dir", "") if runs else ""
    if not run:
        return {}, []
    place = Path(folder) if folder else state_folder(os.environ, run) / "logs"
    logs: dict[str, str] = {}
    left_out = []
    try:
        files = sorted(one for one in place.rglob("*") if one.is_file() and not one.is_symlink())
    except OSError as error:
        return {}, [f"{place}: {error.strerror}"]
    for path in files[: bundles.LOGS_MAX]:
        try:
            logs[path.relative_to(place).as_posix()] = bundles.tail(path)
        except OSError as error:
            left_out.append(f"{path}: {error.strerror}")
    if len(files) > bundles.LOGS_MAX:
        left_out.append(f"{len(files) - bundles.LOGS_MAX} more logs in {place}")
    if not files:
        left_out.append(f"no log can be read in {place}: ask as the run's owner")
    return logs, left_out
