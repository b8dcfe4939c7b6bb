"""Whether an order for the whole node can be obeyed, found out before anything is ended for it.

Owns the look: whether evidence can be kept, whether the root unit's socket is there, whose
processes compute here, and which runs other agents serve.  Looks only while an incident may lead to
an order, and decides nothing: agent/core/nodes/repair.py does.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import stat
import tempfile
from pathlib import Path

from ..core.actions import root_verbs
from ..core.detect.devices.accelerator import processes
from ..core.model import FATAL, Gate
from ..daemon.state import AgentState
from ..evidence.bundle import file_name
from ..system import procfs
from ..telemetry.devices import COLLECTORS
from .evidence_store import EvidenceStore

ANSWER_S = 4.0  # for a few bytes to be written to evidence.store
HIDDEN = ("/proc hides other users' processes (hidepid): add its group to SupplementaryGroups= of "
          "holdfast.service")
READ_ONLY = ": name it in ReadWritePaths= of holdfast.service (docs/node-orders.md)"
UNSEEN = Gate(closed="what it needs has not been looked at yet")
ANCESTORS_MAX = 32
TABLE_MAX_BYTES = 64 << 20  # /proc/net/unix: 500,000 sockets, read line by line
LINE_MAX_BYTES = 4096
LISTENS = 0x10000  # __SO_ACCEPTCON in its flags
SEQPACKET = 5
AGENT_SOCKET = "/agent.sock"
OTHERS_MAX = 64


def wanted(state: AgentState) -> bool:
    """Whether an incident that is open now may lead to an order."""
    if not set(root_verbs()).intersection(state.config.actions.allow):
        return False
    return any(incident.severity == FATAL and not incident.run and not incident.closed_wall_s
               for incident in state.snapshot.decision.incidents)


async def look(state: AgentState, evidence: EvidenceStore) -> Gate:
    """The gate as it is now."""
    proc, own = Path(state.config.collectors.proc), Path(state.config.agent.runtime_dir)
    last = [sample for name in COLLECTORS for sample in state.runner.last(name)] \
        if state.runner is not None else []
    listed = processes(tuple(last))
    seen = await asyncio.to_thread(_alive, str(proc), listed)
    living = {pid for pid, _ in seen}
    sessions = state.launchers.sessions()
    launchers = frozenset(session.pid for session in sessions if session.pid)
    ranks = frozenset((rank.pid, session.uid)
                      for session in sessions for rank in session.levels.ranks)
    ours = await asyncio.to_thread(_ours, proc, sorted(living), launchers, ranks)
    ended_pids = tuple(sorted({pid for pid, _ in listed} - living))
    if not procfs.sees_host(str(proc)):
        ended_pids = ()  # a driver lists the host's numbers, of which this container sees none
    try:
        others = await asyncio.to_thread(other_agents, proc, f"{own}{AGENT_SOCKET}")
    except (OSError, ValueError) as error:
        return Gate(closed=f"who else serves runs here cannot be seen: {error}", seen=seen)
    closed = HIDDEN if procfs.hides_others(str(proc)) else await _closed(state, evidence)
    return Gate(closed=closed, seen=seen, ours=ours, gone=ended_pids, others=others)


# ------------------------------------------------------------------ whether an order could leave


async def _closed(state: AgentState, evidence: EvidenceStore) -> str:
    """Why no order could leave now, or "".  The socket is not connected to: a connection is an
    order, and systemd counts them."""
    path = Path(state.config.actions.socket)
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError as error:
        return f"{path}: {error.strerror}: is holdfast-node.socket enabled?"
    if not is_socket:
        return f"{path} is no socket: is holdfast-node.socket enabled?"
    folder = evidence.folder
    if not folder:
        return "evidence.store is not set"
    probe = functools.partial(write_probe, Path(folder), state.name)
    try:
        async with asyncio.timeout(ANSWER_S):
            await asyncio.shield(evidence.side_thread.do("probe", probe))
    except TimeoutError:
        return f"evidence.store: {folder} does not answer"
    except (OSError, ValueError, RuntimeError) as error:
        sandboxed = isinstance(error, OSError) and error.errno == errno.EROFS
        return f"evidence.store: {error}{READ_ONLY if sandboxed else ''}"
    return ""


def write_probe(folder: Path, node: str) -> None:
    """Leaves nothing behind.  OSError when the folder does not take a file.  Its name cannot be
    guessed, so that nobody who may write there as well puts a link in its place."""
    folder.mkdir(parents=True, exist_ok=True)
    fd, probe = tempfile.mkstemp(".probe", f".{file_name(node)}.", folder)
    try:
        os.write(fd, b"holdfast: may be removed\n")
    finally:
        os.close(fd)
        Path(probe).unlink(missing_ok=True)


# ------------------------------------------------------------------ who else is here


def _alive(proc: str, listed: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(process for process in listed if procfs.process_alive(process[0], proc))


def _ours(
    proc: Path, pids: list[int], launchers: frozenset[int], ranks: frozenset[tuple[int, int]]
) -> tuple[int, ...]:
    """Those of `pids` that descend from one of our launchers, for a rank may be a shell whose child
    computes; and the ranks that a launcher named, as far as its user's processes go, for one may
    outlive it in its device.  One that cannot be read is not ours."""
    return tuple(pid for pid in pids if _descends(proc, pid, launchers) or any(
        (pid, uid) in ranks for uid in {0, procfs.real_uid(pid, str(proc))} - {-1}))


def _descends(proc: Path, pid: int, launchers: frozenset[int]) -> bool:
    for _ in range(ANCESTORS_MAX):
        if pid in launchers:
            return True
        read = procfs.parse_stat(procfs.read_small(f"{proc}/{pid}/stat"))
        if read is None or read.ppid <= 1:
            return False
        pid = read.ppid
    return False


def other_agents(proc: Path, own: str) -> tuple[str, ...]:
    """Sockets of other agents that listen on this machine: one that began while no node agent was
    there serves its run until that ends.  Those of another network namespace are not seen.  OSError
    or ValueError when the kernel's table cannot be read to its end."""
    found, left = set(), TABLE_MAX_BYTES
    with open(proc / "net/unix", "rb") as file:
        while line := file.readline(LINE_MAX_BYTES):
            left -= len(line)
            if left < 0:
                raise ValueError(f"{file.name} is longer than {TABLE_MAX_BYTES >> 20} MiB")
            path = _agent_of(line)
            if path and path != own:
                found.add(path[:200])
    return tuple(sorted(found)[:OTHERS_MAX])


def _agent_of(line: bytes) -> str:
    """The path of an agent's socket that listens, or ""."""
    fields = line.rstrip(b"\n").decode("utf-8", "replace").split(None, 7)
    if len(fields) < 8 or not fields[7].endswith(AGENT_SOCKET):
        return ""
    try:
        listens, kind = int(fields[3], 16) & LISTENS, int(fields[4], 16)
    except ValueError:
        return ""
    return fields[7] if listens and kind == SEQPACKET else ""
