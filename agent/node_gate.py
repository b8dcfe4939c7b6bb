"""What stands before an order for the whole node, looked at before anything is ended for it.

Owns the look: whether evidence can be kept, whether the root unit's socket is there, whose
processes compute here, and which runs other agents serve.  Looks only while an incident may lead to
an order, and decides nothing: agent/core/repair.py does.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.collectors.sample import Sample

from . import procfs
from .core.detect.accelerator import processes
from .core.model import FATAL
from .core.order import Gate
from .core.repair import VERBS
from .devices import COLLECTORS

if TYPE_CHECKING:
    from .daemon import Daemon

LOOK_S = 5.0  # between two looks
IDLE_S = 1.0
ANSWER_S = 4.0  # for a few bytes to be written to evidence.store
READ_ONLY = ": name it in ReadWritePaths= of holdfast.service (docs/node-orders.md)"
UNSEEN = Gate(closed="what it needs has not been looked at yet")
ANCESTORS_MAX = 32
TABLE_MAX_BYTES = 4 << 20  # /proc/net/unix: 30,000 sockets
LISTENS = 0x10000  # __SO_ACCEPTCON in its flags
SEQPACKET = 5
AGENT_SOCKET = "/agent.sock"
OTHERS_MAX = 64


async def watch_gate(daemon: Daemon) -> None:
    """Looks every few seconds while it matters."""
    while True:
        wanted = _wanted(daemon)
        daemon.gate = await look(daemon) if wanted else UNSEEN
        await asyncio.sleep(LOOK_S if wanted else IDLE_S)


def _wanted(daemon: Daemon) -> bool:
    if not set(VERBS).intersection(daemon.config.actions.allow):
        return False
    open_now = (one for one in daemon.snapshot.decision.incidents if not one.closed_wall_s)
    return any(one.severity == FATAL and not one.run for one in open_now)


async def look(daemon: Daemon) -> Gate:
    """The gate as it is now."""
    proc, own = Path(daemon.config.collectors.proc), Path(daemon.config.agent.runtime_dir)
    last = [sample for name in COLLECTORS for sample in _last(daemon, name)]
    seen = await asyncio.to_thread(_alive, str(proc), processes(tuple(last)))
    launchers = frozenset(one.pid for one in daemon.sessions.sessions() if one.pid)
    ours = await asyncio.to_thread(_below, proc, [pid for pid, _ in seen], launchers)
    others = await asyncio.to_thread(other_agents, proc, f"{own}{AGENT_SOCKET}")
    return Gate(closed=await _closed(daemon), seen=seen, ours=ours, others=others)


def _last(daemon: Daemon, name: str) -> tuple[Sample, ...]:
    return daemon.runner.last(name) if daemon.runner is not None else ()


# ------------------------------------------------------------------ whether an order could leave


async def _closed(daemon: Daemon) -> str:
    """Why no order could leave now, or "".  The socket is not connected to: a connection is an
    order, and systemd counts them."""
    path = Path(daemon.config.actions.socket)
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError as error:
        return f"{path}: {error.strerror}: is holdfast-node.socket enabled?"
    if not is_socket:
        return f"{path} is no socket: is holdfast-node.socket enabled?"
    folder = daemon.config.evidence.store
    if not folder:
        return "evidence.store is not set"
    probe = functools.partial(write_probe, Path(folder), daemon.name)
    try:
        await asyncio.wait_for(asyncio.shield(daemon.evidence.do("probe", probe)), ANSWER_S)
    except TimeoutError:
        return f"evidence.store: {folder} does not answer"
    except (OSError, ValueError, RuntimeError) as error:
        sandboxed = isinstance(error, OSError) and error.errno == errno.EROFS
        return f"evidence.store: {error}{READ_ONLY if sandboxed else ''}"
    return ""


def write_probe(folder: Path, node: str) -> None:
    """Leaves nothing behind.  OSError when the folder does not take a file.  Its name cannot be
    guessed, so that nobody who may write there as well puts a link in its place."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in node)[:200]
    folder.mkdir(parents=True, exist_ok=True)
    fd, probe = tempfile.mkstemp(".probe", f".{name}.", folder)
    try:
        os.write(fd, b"holdfast: may be removed\n")
    finally:
        os.close(fd)
        Path(probe).unlink(missing_ok=True)


# ------------------------------------------------------------------ who else is here


def _alive(proc: str, listed: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(one for one in listed if procfs.process_alive(one[0], proc))


def _below(proc: Path, pids: list[int], launchers: frozenset[int]) -> tuple[int, ...]:
    """Those of `pids` that descend from one of our launchers: a rank may be a shell whose child
    computes.  One that cannot be read is not ours."""
    found = []
    for pid in pids:
        at = pid
        for _ in range(ANCESTORS_MAX):
            if at in launchers:
                found.append(pid)
                break
            read = procfs.parse_stat(procfs.read_small(f"{proc}/{at}/stat"))
            if read is None or read.ppid <= 1:
                break
            at = read.ppid
    return tuple(found)


def other_agents(proc: Path, own: str) -> tuple[str, ...]:
    """Sockets of other agents that listen on this machine: one that began while no node agent was
    there serves its run until that ends.  Those of another network namespace are not seen."""
    try:
        with open(proc / "net/unix", "rb") as file:
            table = file.read(TABLE_MAX_BYTES)
    except OSError:
        return ()
    found = set()
    for line in table.split(b"\n")[1:]:
        fields = line.decode("utf-8", "replace").split(None, 7)
        if len(fields) < 8 or not fields[7].endswith(AGENT_SOCKET) or fields[7] == own:
            continue
        try:
            listens, kind = int(fields[3], 16) & LISTENS, int(fields[4], 16)
        except ValueError:
            continue
        if listens and kind == SEQPACKET:
            found.add(fields[7][:200])
    return tuple(sorted(found)[:OTHERS_MAX])
