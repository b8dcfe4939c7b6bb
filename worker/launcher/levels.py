"""What a launcher tells the agent: who it is, and the full state of everything as one level.

Owns the content of `hello` and `levels`.  Pure reading: nothing here changes anything.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, Dict, List, Mapping, Optional

from .. import devices
from ..elastic import COMMITS_SENT
from ..peers import user_name
from ..wire import LIMIT_BYTES, PROTOCOL, Packet, cut, size_of
from .compiling import neuron_caches
from .rank_processes import RankProcesses
from .run_state import RunState

AMD_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def hello_of(state: RunState, generation: int, environ: Dict[str, str]) -> Packet:
    """Who runs what, as the first packet of each connection."""
    options, torch = state.spec, sys.modules.get("torch")
    opaque = options.program.kind == "command"
    return {
        "t": "hello", "protocol": PROTOCOL, "run": options.run, "node": socket.gethostname(),
        "user": user_name(os.getuid()), "pid": os.getpid(),
        "grade": "trainer" if options.program.trainer else "opaque" if opaque else "script",
        "nproc": options.nproc, "max_restarts": options.max_restarts,
        "nnodes": options.nnodes, "nnodes_min": options.nnodes_min, "node_rank": options.node_rank,
        "argv": [cut(a, 200) for a in options.argv[:50]], "cwd": os.getcwd(),
        "python": sys.executable, "torch": getattr(torch, "__version__", ""),
        "log_dir": state.log_dir, "checkpoint_dir": state.checkpoint_dir,
        "hang_limit_s": options.hang_limit_s, "generation": generation,
        "started_boot_s": state.started_boot_s, "compile_caches": neuron_caches(environ)[:4],
        "visible": visible_devices(environ), "devices": devices.taken(environ, options.nproc),
        "ignored_checks": options.ignored_checks[:32],
        "ignore_reason": cut(options.ignore_reason, 500), "wants_checks": options.wants_checks,
        "goal": options.goal, "unit": options.unit, "mixed": options.mixed,
        "gang_limit_s": options.gang_limit_s,
    }


def visible_devices(environ: Mapping[str, str]) -> List[List[str]]:
    """[vendor, list] where the environment says which devices the job may use.  AMD's runtime takes
    several such lists one after the other: with two of them nothing is said."""
    found = [["nvidia", environ[devices.VISIBLE]]] if devices.VISIBLE in environ else []
    amd = [environ[name] for name in AMD_VISIBLE if name in environ]
    found += [["amd", amd[0]]] if len(amd) == 1 else []
    return [[vendor, cut(text, 1000)] for vendor, text in found]


def levels_of(
    state: RunState, processes: RankProcesses, compiling: str, logs: Optional[Dict[str, Any]]
) -> Dict[str, Any]:
    """Everything that is, now."""
    ranks = [
        {"rank": p.rank, "local_rank": p.local_rank, "pid": p.child.pid, "generation": p.generation,
         "state": p.state, "ended": p.over, "parked": p.parked, "flight": p.flight[-12:],
         **({"place": p.place} if p.place else {})}
        for _, p in sorted(processes.by_rank().items())]
    return {
        "t": "levels", "generation": processes.generation, "state": processes.level(),
        "shutdown": state.shutdown, "compiling": compiling, "keep": state.keep,
        "checkpoint_dir": state.checkpoint_dir, "startup_s": processes.startup(), "logs": logs,
        "ranks": ranks, "commits": state.newest_commits(), "snapshot": processes.snapshot_view(),
        "endpoint": processes.endpoint(),
    }


def fitted(packet: Packet) -> Packet:
    """The same level in one packet's size: with many ranks details go before facts do."""
    for errors, commits in ((500, COMMITS_SENT), (500, 20), (100, 20), (0, 5)):
        ended = [dict(r["ended"], error=r["ended"]["error"][:errors]) if r["ended"] else None
                 for r in packet["ranks"]]
        ranks = [dict(r, ended=e) for r, e in zip(packet["ranks"], ended)]
        if errors < 500:
            ranks = [dict(r, flight=[], place="") for r in ranks]
        packet = dict(packet, ranks=ranks, commits=packet["commits"][-commits:])
        if errors < 500 and packet.get("logs"):
            packet["logs"] = dict(packet["logs"], lines=[], seen=[])
        if size_of(packet) <= LIMIT_BYTES:
            break
    return packet
