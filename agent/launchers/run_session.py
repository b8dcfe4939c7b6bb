"""One run and its launcher's connection: the levels it sent last, as the core takes them.

Owns what is kept about one run between packets.  Reads no socket and checks nothing; server.py
does, before anything is put here.
"""

from __future__ import annotations

import msgspec

from ..catalog.load import neuron_codes
from ..core.model import RunView
from ..core.parse import neuron_codes as nrt
from ..system import procfs
from . import protocol
from .connection import Connection
from .rank_monitor import RankMonitor, bare_level

DEVICES_MAX = 64  # of one node
COMMITS_MAX = 128  # newest last; a launcher sends 100 at most, and each costs in every step
Where = dict[tuple[str, int, int], str]  # (run, generation, rank) -> source line, from evidence


class RunSession:
    """One run and the connection of its launcher, if it has one at the moment."""

    def __init__(
        self, hello: protocol.Hello, pid: int, uid: int, boot_s: float, proc: str = procfs.PROC
    ) -> None:
        self.hello, self.pid, self.uid, self.registered_boot_s = hello, pid, uid, boot_s
        self.levels = protocol.Levels()
        self.have_levels = False
        self.monitors: dict[int, RankMonitor] = {}
        self.connection: Connection | None = None
        self.lost_s = 0.0  # CLOCK_MONOTONIC when the connection went, 0 while it is up
        self._proc = proc
        self._cgroup_events = procfs.cgroup_events(pid, proc)
        self._theirs: set[int] = set()  # processes that were seen to be this user's

    def owns(self, pid: int) -> bool:
        """Whether a process may be a rank here: its user's own, as it was forked.  One that is gone
        or hidden may be, until it is seen; root's launcher may run ranks as anybody."""
        if self.uid == 0 or pid in self._theirs:
            return True
        uid = procfs.real_uid(pid, self._proc)
        if uid == self.uid:
            self._theirs.add(pid)
        return uid in (-1, self.uid)

    def view(self, node: str, now_s: float, where: Where) -> RunView:
        """The run as a level."""
        levels, hello = self.levels, self.hello
        ranks = []
        self._theirs &= {rank.pid for rank in levels.ranks}
        for rank in levels.ranks:
            if not self.owns(rank.pid):  # its name would stand for another user's process
                rank = msgspec.structs.replace(rank, pid=0)
            monitor = self.monitors.get(rank.rank)
            # An ended rank's page still says at which step, and after which collective, it ended.
            if monitor is None or monitor.pid != rank.pid:
                ranks.append(bare_level(rank, node))
            else:
                ranks.append(monitor.level(
                    rank, node, now_s, where.get((hello.run, rank.generation, rank.rank), "")))
        return RunView(
            run=hello.run, node=node, grade=hello.grade, nproc=hello.nproc,
            generation=max(levels.generation, 0 if self.have_levels else hello.generation),
            state=levels.state, max_restarts=hello.max_restarts, hang_limit_s=hello.hang_limit_s,
            ranks=tuple(ranks), commits=levels.commits[-COMMITS_MAX:], snapshot=levels.snapshot,
            shutdown=levels.shutdown, connected=self.connection is not None,
            gone=self._gone(),
            startup_s=levels.startup_s, compiling=levels.compiling, keep=max(0, levels.keep),
            checkpoint_dir=levels.checkpoint_dir or hello.checkpoint_dir,
            logs=levels.logs is not None, registered_boot_s=self.registered_boot_s,
            uid=self.uid, suspended=self._suspended(), visible=hello.visible,
            devices=hello.devices[:DEVICES_MAX],
            ignored_checks=hello.ignored_checks, ignore_reason=hello.ignore_reason,
            wants_checks=hello.wants_checks, nnodes_min=hello.nnodes_min, nnodes_max=hello.nnodes,
            unit=hello.unit, mixed=hello.mixed, gang_limit_s=hello.gang_limit_s,
            node_rank=hello.node_rank,
        )

    def _gone(self) -> bool:
        """Whether nothing of it lives here any more; ranks may outlive their launcher."""
        pids = (self.pid, *(rank.pid for rank in self.levels.ranks if rank.state != "ended"))
        return self.connection is None and not any(
            procfs.process_alive(pid, self._proc) for pid in pids)

    def _suspended(self) -> bool:
        """Whether the launcher itself stands still: stopped by a signal, or frozen with its cgroup.
        A debugger's stop is a person's."""
        if self.connection is None:
            return False
        stat = procfs.parse_stat(procfs.read_small(f"{self._proc}/{self.pid}/stat"))
        if stat is not None and stat.state == "T":
            return not procfs.is_traced(self.pid, self._proc)
        return self._cgroup_events != "" and b"frozen 1" in procfs.read_small(self._cgroup_events)


def explained(levels: protocol.Levels) -> protocol.Levels:
    """With the meaning of a Neuron runtime's code in the error of each rank that ended with one."""
    def rank_explained(rank: protocol.RankLevel) -> protocol.RankLevel:
        ended = rank.ended
        if ended is None or not ended.error:
            return rank
        error = nrt.explained(neuron_codes(), ended.error)
        ended = ended if error == ended.error else msgspec.structs.replace(ended, error=error)
        return rank if ended is rank.ended else msgspec.structs.replace(rank, ended=ended)

    ranks = tuple(rank_explained(rank) for rank in levels.ranks)
    return msgspec.structs.replace(levels, ranks=ranks)
