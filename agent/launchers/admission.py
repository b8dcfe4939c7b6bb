"""How many connections, runs and ranks fit into this agent, how many of one user, and how fast.

Owns the limits and the sentences that name them, and this process' limit of open files, from which
the number of ranks follows.  Keeps what each user has spent; all else server.py shows it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection

from holdfast.worker.peers import user_name

from ..system import procfs
from . import protocol
from .connection import Connection
from .run_session import RunSession

CONNECTIONS_MAX = 256
USERS_MAX = 1024
PER_UID_MAX = 64  # of the connections and of the runs: one user never takes all
OPEN_FILES = 65_536  # asked for; a login's 1,024 would do for 170 ranks
OPEN_FILES_KEPT = 512  # for connections, journal, store, collectors and pipes of children
FILES_PER_RANK = 3  # page, pidfd, /proc/PID/stat
RANKS_MAX = 4 * protocol.RANKS_MAX  # of all runs; a node has some hundred cores
# One user's share of the agent's time, over all connections.  A packet weighs 1, and 1 more for
# each 4 KiB.  A run's launcher sends two in 15 s, or a few a second where it takes snapshots all
# the time; where 200 ranks end together it sends 200 of 60 KB, which is 3,200.
PACKET_BYTES = 4096
PACKETS_PER_S, PACKETS_AT_ONCE = 400.0, 8192.0
# New runs leave incidents, intents and counters behind.  After a reboot all of a node's come at
# once; ten thousand a month are one in four minutes.
RUNS_PER_S, RUNS_AT_ONCE = 1.0, 256.0


def raise_open_files() -> int:
    """Raises this process' own limit of open files as far as it may, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Allowance:
    """What each user may spend: so much at once, and then so much a second."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._spent: dict[int, tuple[float, float]] = {}  # uid -> (what is spent, when)

    def spend(self, uid: int, amount: float, now_s: float) -> float:
        """Notes it, and says for how many seconds nothing more may be taken of this user."""
        before, then_s = self._spent.get(uid, (0.0, now_s))
        spent = max(0.0, before - (now_s - then_s) * self._per_s) + amount
        if uid not in self._spent and len(self._spent) >= USERS_MAX:
            self._spent.clear()  # whoever overspends is known again after a moment
        self._spent[uid] = spent, now_s
        return max(0.0, spent - self._at_once) / self._per_s


class Admission:
    """The limits of one agent.  `alone`: it serves one run, so nobody has to share."""

    def __init__(self, alone: bool) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = OPEN_FILES if soft == resource.RLIM_INFINITY else min(OPEN_FILES, soft)
        self.ranks_max = min(RANKS_MAX, max(1, (files - OPEN_FILES_KEPT) // FILES_PER_RANK))
        shared_max = self.ranks_max if alone else max(1, self.ranks_max // 2)
        self.ranks_per_uid = min(protocol.RANKS_MAX, shared_max)
        self._packets = Allowance(PACKETS_PER_S, PACKETS_AT_ONCE)
        self._runs = Allowance(RUNS_PER_S, RUNS_AT_ONCE)

    def pause_s(self, uid: int, nbytes: int, is_new_run: bool) -> float:
        """For how long a connection of this user is left alone after such a packet: nothing is
        refused, it waits in the kernel."""
        now_s = time.monotonic()
        wait_s = self._packets.spend(uid, 1 + nbytes / PACKET_BYTES, now_s)
        return max(wait_s, self._runs.spend(uid, 1.0, now_s)) if is_new_run else wait_s

    def for_connection(self, uid: int, connections: Collection[Connection]) -> str:
        """Why one more connection of this user is too many, or ""."""
        if len(connections) >= CONNECTIONS_MAX:
            return f"this agent has its {CONNECTIONS_MAX} connections: end a run, then start anew"
        if sum(connection.uid == uid for connection in connections) >= PER_UID_MAX:
            return (f"{user_name(uid)} has {PER_UID_MAX} connections to this agent already: "
                    "end a run, then start anew")
        return ""

    def for_run(self, uid: int, runs: Collection[RunSession]) -> str:
        """Why one more run of this user is too many, or "".  A run outlives its connection for a
        while: a user could leave any number behind."""
        if len(runs) >= CONNECTIONS_MAX:
            return f"this node already serves {CONNECTIONS_MAX} runs"
        if sum(session.uid == uid for session in runs) >= PER_UID_MAX:
            return f"this node already serves {PER_UID_MAX} runs of {user_name(uid)}"
        return ""

    def for_ranks(self, uid: int, nproc: int, others: Collection[RunSession]) -> str:
        """Why so many ranks more are too many beside the other runs, or ""."""
        mine = sum(session.hello.nproc for session in others if session.uid == uid)
        if mine + nproc > self.ranks_per_uid:
            return (f"{nproc} ranks are too many: {user_name(uid)} has {mine} on this node already"
                    f", and this agent follows {self.ranks_per_uid} of one user")
        taken = sum(session.hello.nproc for session in others)
        if taken + nproc > self.ranks_max:
            return (f"{nproc} ranks are too many: this agent follows {taken} of the "
                    f"{self.ranks_max} that it may (its limit of open files)")
        return ""


def is_dead(session: RunSession) -> bool:
    """Whether a run is only kept to be seen: its launcher has ended, not just its connection."""
    return session.connection is None and not procfs.process_alive(session.pid)
