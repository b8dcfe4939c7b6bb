"""What a launcher tells the agent: who it is, and the full state of everything as one level.

Owns the content of `hello` and `levels`.  Pure reading: nothing here changes anything.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Dict, List

from ..elastic import COMMITS_SENT
from ..wire import LIMIT_BYTES, PROTOCOL, Packet, cut, size_of
from .rank_processes import Crew

if TYPE_CHECKING:
    from .launcher import Launcher



def hello_of(launcher: "Launcher") -> Packet:
    """Who runs what, as the first packet of each connection."""
    options, torch = launcher.spec, sys.modules.get("torch")
    return {
        "t": "hello", "protocol": PROTOCOL, "run": options.run, "node": socket.gethostname(),
        "user": getpass.getuser(), "pid": os.getpid(), "grade": grade_of(launcher),
        "nproc": options.nproc, "max_restarts": options.max_restarts,
        "argv": [cut(a, 200) for a in options.argv[:50]], "cwd": os.getcwd(),
        "python": sys.executable, "torch": getattr(torch, "__version__", ""),
        "log_dir": launcher.log_dir, "checkpoint_dir": launcher.checkpoint_dir,
        "hang_limit_s": options.hang_limit_s, "generation": launcher.crew.generation,
        "started_boot_s": launcher.started_boot_s,
    }


def grade_of(launcher: "Launcher") -> str:
    if launcher.spec.program.trainer:
        return "trainer"
    return "opaque" if launcher.spec.program.kind == "command" else "script"


def levels_of(launcher: "Launcher") -> Dict[str, Any]:
    """Everything that is, now."""
    crew = launcher.crew
    ranks = [
        {"rank": p.rank, "local_rank": p.rank, "pid": p.child.pid, "generation": p.generation,
         "state": p.state, "ended": p.ended, "parked": p.parked, "flight": p.flight[-12:]}
        for _, p in sorted(crew.by_rank().items())
    ]
    return {
        "t": "levels", "generation": crew.generation, "state": state_of(crew, launcher.listed),
        "shutdown": launcher.shutdown, "compiling": launcher.compiling.found, "keep": launcher.keep,
        "checkpoint_dir": launcher.checkpoint_dir,
        "startup_s": launcher.startup(), "logs": launcher.logs.level(),
        "ranks": ranks, "commits": newest_commits(launcher), "snapshot": crew.snapshot_view(),
    }


def fitted(packet: Packet) -> Packet:
    """The same level in one packet's size: with many ranks details go before facts do."""
    for errors, commits in ((500, COMMITS_SENT), (500, 20), (100, 20), (0, 5)):
        ended = [dict(r["ended"], error=r["ended"]["error"][:errors]) if r["ended"] else None
                 for r in packet["ranks"]]
        ranks = [dict(r, ended=e) for r, e in zip(packet["ranks"], ended)]
        if errors < 500:
            ranks = [dict(r, flight=[]) for r in ranks]
        packet = dict(packet, ranks=ranks, commits=packet["commits"][-commits:])
        if errors < 500 and packet.get("logs"):
            packet["logs"] = dict(packet["logs"], lines=[], seen=[])
        if size_of(packet) <= LIMIT_BYTES:
            break
    return packet


def newest_commits(launcher: "Launcher") -> List[Dict[str, Any]]:
    commits = sorted(launcher.commits.values(), key=lambda c: (c["generation"], c["step"]))
    return commits[-COMMITS_SENT:]


def state_of(crew: Crew, listed: bool) -> str:
    """preparing (nothing may be planned yet) | idle | running | done."""
    if crew.generation == 0:
        return "idle" if listed else "preparing"
    ranks = crew.by_rank().values()
    done = bool(ranks) and all(p.ended is not None and p.ended["code"] == 0 for p in ranks)
    return "done" if done else "running"
