"""A run whose own agent has ended: answers as that agent would, from the journal that it left.

Owns which routes are answered so.  Reading is agent/history/past_runs.py's.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ..core.node import NOT_DONE
from ..history import past_runs
from ..history.journal import WAITING, Asked
from ..store.base import StoreError
from .client import owned, state_folder
from .text import Failure

NAME = re.compile(r"[A-Za-z0-9._-]{1,48}")
ONE = "/api/v1/incidents/"


class EndedRun(NamedTuple):
    """A run of this machine that has ended, and what its journal holds."""

    name: str
    past: past_runs.Past

    def get(self, route: str) -> Any:
        if route == "/api/v1/ledger":
            return self._ledger()
        if route == "/api/v1/refusals":
            return [one._asdict() for one in reversed(self.past.refused)]
        if route == "/api/v1/requests":
            return [_settled(one)._asdict() for one in reversed(self.past.asked)]
        listed = [past_runs.as_json(one, self.past.attempts) for one in self.past.incidents]
        if not route.startswith(ONE):
            return listed
        wanted = unquote(route.removeprefix(ONE))
        return next(one for one in listed if one["id"] == wanted)

    def _ledger(self) -> dict[str, Any]:
        ledger, runs = self.past.ledger, dict[str, dict[str, float]]()
        for run, category, seconds in ledger.run_rows():
            runs.setdefault(run, {})[category] = seconds
        categories = {name: seconds for name, seconds in ledger.node_rows() if seconds}
        return {"categories": categories, "wall_s": sum(categories.values()), "runs": runs,
                "attempts": {run: len(self.past.attempts) for run in runs}}


def _settled(one: Asked) -> Asked:
    """A request as it stands for good: no agent is left that could carry it out."""
    return one if one.state != WAITING else one._replace(state="refused", text=NOT_DONE)


def ended_run(
    name: str, environ: Mapping[str, str] = os.environ, folder: Path | None = None
) -> tuple[EndedRun, dict[str, Any]] | None:
    """The run and a status of it, by default from where its agent kept its state; None where it
    left no journal.  Raises Failure for one that cannot be read."""
    if not NAME.fullmatch(name) or name in (".", ".."):
        return None
    try:
        folder = folder or state_folder(environ, name)
        owned(folder, environ)
        owned(folder / "journal.db", environ)
        past = past_runs.read(Path(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, StoreError) as error:
        raise Failure(f"run {name} has ended, and its journal cannot be read: {error}") from error
    status = {"node": socket.gethostname(), "runs": [{"run": name, "state": "done"}]}
    return EndedRun(name, past), status
