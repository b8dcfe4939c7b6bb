"""Incident files in evidence.store, which outlives this node.

Owns the files' names and their writing, beside everything else, for a shared folder may hang: one
write at a time, and of what waits the newest state of each incident.  The journal has every
incident in any case.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from ..core.model import Incident
from ..daemon.state import AgentState
from ..system.side_thread import SideThread

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

    def write(self, incident: Incident) -> asyncio.Future[None]:
        """Writes one file; the future gives OSError or ValueError, or is cancelled."""
        work = functools.partial(write_incident, Path(self.folder), incident)
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
        path = folder / f"{file_name(incident.id)}.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                kept = msgspec.json.decode(file.read(FILE_MAX_BYTES), type=Incident)
            if kept.opened_wall_s == incident.opened_wall_s:
                path.unlink()
        except (FileNotFoundError, msgspec.DecodeError):
            continue  # it never came there, or is somebody else's


def write_incident(folder: Path, incident: Incident) -> None:
    """One file an incident, replaced whole at each change."""
    name = file_name(incident.id)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.new"
    draft.unlink(missing_ok=True)
    with open(draft, "xb") as file:  # never through a link that somebody put there
        file.write(msgspec.json.encode(incident))
    draft.replace(folder / f"{name}.json")


def file_name(id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in id)[:200]
