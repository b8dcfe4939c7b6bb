"""Incidents and their bundles in evidence.store, which outlives this node.

A file an incident, written at each of its changes, and a bundle when it closes and before an order
that the node may not survive.  Owns their writing, beside everything else, for a shared folder may
hang: one write at a time, and of what waits the newest state of each incident.  The journal has
every incident in any case.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..config.load import flatten
from ..core.model import UNREADABLE, Incident
from ..daemon.state import AgentState
from ..evidence import bundle
from ..system.side_thread import SideThread
from ..web import status

FORGOTTEN_MAX = 4096
FILE_MAX_BYTES = 1 << 20  # of an incident
HUNG_S = 5.0  # for a few kilobytes


class EvidenceStore:
    """The folder that evidence.store names now, if it names one."""

    def __init__(self, state: AgentState) -> None:
        self._state = state
        self._forgotten: deque[Incident] = deque(maxlen=FORGOTTEN_MAX)  # to go from there
        self.side_thread = SideThread("evidence")

    @property
    def folder(self) -> str:
        return self._state.config.evidence.store

    def write(self, incident: Incident, whole: bool = False) -> asyncio.Future[None]:
        """Writes one file, and with `whole` or when the incident is closed its bundle; the future
        gives OSError or ValueError, or is cancelled."""
        whole = whole or incident.state == "closed"
        parts = around(self._state, incident) if whole else None
        work = functools.partial(write_incident, Path(self.folder), incident, parts)
        return self.side_thread.do(incident.id, work)

    def keep(self, incident: Incident) -> None:
        """The same without anybody who waits: what goes wrong is counted."""
        if self.folder:
            self._report(functools.partial(self.write, incident))

    def forget(self, incidents: Iterable[Incident]) -> None:
        """Takes files away that the history holds no longer."""
        if self.folder:
            self._forgotten.extend(incidents)
            work = functools.partial(remove, Path(self.folder), self._forgotten)
            self._report(lambda: self.side_thread.do("forgotten", work))

    def _report(self, begin: Callable[[], asyncio.Future[None]]) -> None:
        folder, report = self.folder, functools.partial(self._state.errors, "evidence")
        if self.side_thread.busy_s > HUNG_S:
            report(f"{folder} does not answer: what happens now is written later")

        def ended(done: asyncio.Future[None]) -> None:
            if done.cancelled():
                return report(f"{folder}: too much waits, the oldest is left out")
            error = done.exception()
            if error is not None:
                report(error)

        begin().add_done_callback(ended)


def remove(folder: Path, forgotten: deque[Incident]) -> None:
    """Takes their files away, as long as there are any.  Only those of these very incidents:
    another node's may have the same name there."""
    while forgotten:
        incident = forgotten.popleft()
        path = folder / f"{bundle.file_name(incident.id)}.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                kept = msgspec.json.decode(file.read(FILE_MAX_BYTES), type=Incident)
            if kept.opened_wall_s == incident.opened_wall_s:
                path.unlink()
                path.with_suffix(".tar.gz").unlink(missing_ok=True)
        except (FileNotFoundError, *UNREADABLE):
            continue  # it never came there, or is somebody else's


def around(state: AgentState, incident: Incident) -> dict[str, Any]:
    """The documents of its bundle, as they are now."""
    told: dict[str, Any] = msgspec.to_builtins(incident)
    return bundle.parts_of(
        told, status.status(state), status.incidents(state, True), checks=status.checks(state),
        ledger=status.ledger(state), configuration=dict(flatten(state.config)))


def write_incident(
    folder: Path, incident: Incident, parts: dict[str, Any] | None = None
) -> None:
    """One file an incident, replaced whole at each change; and its bundle of these parts."""
    folder.mkdir(parents=True, exist_ok=True)
    name = bundle.file_name(incident.id)
    told = bundle.clean(msgspec.to_builtins(incident))
    _replace(folder, f"{name}.json", msgspec.json.encode(told))
    if parts is not None:
        _replace(folder, f"{name}.tar.gz", bundle.pack(incident.id, parts, {}))


def _replace(folder: Path, name: str, content: bytes) -> None:
    draft = folder / f".{name}.new"
    draft.unlink(missing_ok=True)
    bundle.write(draft, content)  # never through a link that somebody put there
    draft.replace(folder / name)
