"""`holdfast jobs`: attempts of runs that are here, or were.

Owns where they are looked for: agents that answer, and the journals that private ones left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ..history.job_log import as_found, job_row
from ..system import procfs
from . import report
from .client import RUNS_MAX, asking, reach, states
from .ended import ended_run
from .text import Failure, print_json, show


@asking
def jobs(options: argparse.Namespace) -> int:
    rows = [one for one in all_jobs() if options.run in (None, one["run"])
            and options.team in (None, one["team"])]
    rows.sort(key=lambda one: -float(one["begun_wall_s"]))
    rows = rows[: options.limit]
    if options.json:
        print_json(rows)
    elif not rows:
        raise Failure("no attempt of a run is known here" + (
            " by that name or team" if options.run or options.team else ""))
    else:
        show(report.jobs(rows))
    return 0


def all_jobs(environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Of all agents that answer, and of all ended runs of this user."""
    try:
        living = reach(environ)
    except Failure:
        living = []
    rows = [one for agent, _ in living for one in agent.get("/api/v1/jobs")]
    here = {(one["run"], one["begun_wall_s"]) for one in rows}
    now_s, boot = time.time(), procfs.boot_id()
    for folder in _folders(environ):
        try:
            found = ended_run(folder.name.partition("@")[0], environ, folder)
        except Failure:
            continue  # of another's, or of no release that this one can read
        quiet_s = now_s - _written_s(folder)
        for job in found[0].past.jobs if found is not None else ():
            row = job_row(as_found(job, boot, quiet_s), now_s)
            if (job.run, job.begun_wall_s) not in here:
                rows.append(row)
    return rows


def _folders(environ: Mapping[str, str]) -> list[Path]:
    """Of this node: a home that nodes share has each node's account of a run over them."""
    try:
        with os.scandir(states(environ)) as listing:
            return [Path(one.path) for one in islice(listing, RUNS_MAX)
                    if one.name.partition("@")[2] in ("", socket.gethostname())]
    except OSError:
        return []


def _written_s(folder: Path) -> float:
    """When its journal was last written, by the clock of who keeps the files."""
    times = [0.0]
    for name in ("journal.db", "journal.db-wal"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)
