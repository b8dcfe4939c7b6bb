"""One process of a launcher, and what it is told.

Owns the record that a launcher keeps of a process and the environment a rank is given.  Starts
nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .. import page as pages
from ..redact import redacted_head
from ..wire import Channel
from .forking import Child
from .spec import Spec

ERROR_LIMIT = 500  # characters
TAIL_BYTES = 8192
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class StartCommand(NamedTuple):
    """One generation as the plan wants it here."""

    generation: int
    ranks: Tuple[int, ...]
    keep: Tuple[int, ...]  # of these ranks, those that the same places here go on as
    world: int
    resume: Dict[str, Any]
    history: List[Any]
    permit_ns: int
    group: int = 0  # this node's place among the generation's; the first hosts its store
    groups: int = 1
    labels: Optional[List[List[str]]] = None  # of this node in the network; None = nobody's is told

    def keeps(self, local_rank: int) -> bool:
        """Whether the process at this place on this node lives on, as whichever rank."""
        return local_rank < len(self.ranks) and self.ranks[local_rank] in self.keep

    def local(self, rank: int) -> int:
        """The rank's place on this node."""
        return self.ranks.index(rank) if rank in self.ranks else 0


class RankProcess:
    """One process: a rank, or a standby (rank -1)."""

    def __init__(self, number: int, home: str, page_fd: int, channel: Channel) -> None:
        self.number = number
        self.home = home  # its error files
        self.folder = home  # where it writes now: a standby that becomes a rank moves
        self.page_fd = page_fd
        self.fields = pages.map_fields(page_fd)
        self.channel = channel
        self.child = Child(0, -1)
        self.rank = -1
        self.local_rank = 0
        self.seat = 0  # among the processes that live on this node: no two have the same
        self.generation = 0
        self.ready = False
        self.assigned = False
        self.by_us = False
        self.parked: Optional[Dict[str, Any]] = None
        self.ended: Optional[Dict[str, Any]] = None
        self.raised: Optional[Dict[str, Any]] = None  # as `ended`, of one that lives on
        self.flight: List[Any] = []
        self.place = ""  # its part in the trainer's strategy, in this generation
        self.rubbish = 0  # packets that made no sense
        self.kill_at_s = 0.0

    @property
    def state(self) -> str:
        if self.ended is not None:
            return "ended"
        if self.parked is not None:
            return "parked"
        return "running" if self.assigned else "starting"

    @property
    def over(self) -> Optional[Dict[str, Any]]:
        """How its part in its generation ended, if it did by its own doing."""
        return self.ended or self.raised

    def close(self) -> None:
        """Of a process that has ended; whoever watches its channel has let go of it."""
        self.channel.close()
        self.fields.release()
        for fd in (self.page_fd, self.child.pidfd):
            if fd >= 0:
                os.close(fd)


class Place(NamedTuple):
    """Where a rank's generation lives: what its environment says of it."""

    world: int
    local_world: int
    host: str  # of the generation's store
    port: int
    restarts: int  # of this launcher so far; scripts log it and some branch on it
    group: int = 0  # this node's among `groups`
    groups: int = 1


def environ_of(
    base: Dict[str, str], spec: Spec, process: RankProcess, place: Place
) -> Dict[str, str]:
    """torchrun's environment for one rank; of a trainer's, whose place is told later
    (place_environ), LOCAL_RANK is its seat until then."""
    environ = dict(base)
    environ.update(
        place_environ(process, place), ROLE_NAME=spec.role,
        TORCHELASTIC_RESTART_COUNT=str(place.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(spec.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id, TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=os.path.join(process.home, "error-%d.json" % process.number),
        HOLDFAST_RUN=spec.run,
    )
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    if spec.program.trainer:
        # It opens its device before it is told its place, and keeps it under whichever rank.
        environ["LOCAL_RANK"] = str(process.seat)
    if spec.nproc_unset_threads:
        environ["OMP_NUM_THREADS"] = "1"
    return environ


def place_environ(process: RankProcess, place: Place) -> Dict[str, str]:
    """The part of it that a process is told anew with each generation."""
    world, rank_text = str(place.world), str(max(process.rank, 0))
    return {
        "RANK": rank_text, "LOCAL_RANK": str(process.local_rank), "ROLE_RANK": rank_text,
        "WORLD_SIZE": world, "ROLE_WORLD_SIZE": world, "LOCAL_WORLD_SIZE": str(place.local_world),
        "GROUP_RANK": str(place.group), "GROUP_WORLD_SIZE": str(place.groups),
        "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port)}


def end_of(code: int, number: int, outcome: str, error: str, by_us: bool) -> Dict[str, Any]:
    """What the agent is told of a process that has ended now (signal `number`), or of a rank."""
    return {"code": code, "signal": number, "outcome": outcome, "error": error, "by_us": by_us,
            "boot_s": time.clock_gettime(time.CLOCK_BOOTTIME), "wall_s": time.time()}


def error_line(process: RankProcess, number: int) -> str:
    """Why a process ended, one line without secrets: from its error file, else from what it said
    last.

    A crash in native code (signal `number`) leaves no error file, but its runtime has usually
    printed the reason: gloo says "collective mismatch" there before it aborts.
    """
    path = os.path.join(process.home, "error-%d.json" % process.number)
    try:
        with open(path) as file:
            message = json.load(file)["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return last_words(process.folder) if number in CRASHES else ""
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    return redacted_head(" ".join(str(text).split()), ERROR_LIMIT)


def last_words(home: str) -> str:
    """The reason that a crashing runtime printed at the end of stderr; "" when there is none."""
    try:
        with open(os.path.join(home, "stderr.log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        text = line.strip()
        if text.startswith(("what():", "Fatal Python error", "terminate called")):
            return redacted_head(text.replace("what():", "", 1).strip(), ERROR_LIMIT)
    return ""
