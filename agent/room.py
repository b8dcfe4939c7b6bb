"""How many connections, runs and ranks fit into this agent, and how many of one user.

Owns the limits and the sentences that name them, and this process' limit of open files, from which
the number of ranks follows.  Keeps nothing: it counts what sessions.py shows it.
"""

from __future__ import annotations

import pwd
import resource
from collections.abc import Collection
from functools import lru_cache

from . import procfs, wire
from .link import Link
from .session import Session

CONNECTIONS_MAX = 256
PER_UID_MAX = 64  # of the connections and of the runs: one user never takes all
OPEN_FILES = 65_536  # asked for; a login's 1,024 would do for 170 ranks
OPEN_FILES_KEPT = 512  # for connections, journal, store, collectors and pipes of children
FILES_PER_RANK = 3  # page, pidfd, /proc/PID/stat
RANKS_MAX = 4 * wire.RANKS_MAX  # of all runs; a node has some hundred cores


def raise_open_files() -> int:
    """Raises this process' own limit of open files as far as it may, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Room:
    """The limits of one agent.  `alone`: it serves one run, so nobody has to share."""

    def __init__(self, alone: bool) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = OPEN_FILES if soft == resource.RLIM_INFINITY else min(OPEN_FILES, soft)
        self.ranks_max = min(RANKS_MAX, max(1, (files - OPEN_FILES_KEPT) // FILES_PER_RANK))
        shared_max = self.ranks_max if alone else max(1, self.ranks_max // 2)
        self.ranks_per_uid = min(wire.RANKS_MAX, shared_max)

    def for_connection(self, uid: int, links: Collection[Link]) -> str:
        """Why one more connection of this user is too many, or ""."""
        if len(links) >= CONNECTIONS_MAX:
            return f"this agent has its {CONNECTIONS_MAX} connections: end a run, then start anew"
        if sum(link.uid == uid for link in links) >= PER_UID_MAX:
            return (f"{user_name(uid)} has {PER_UID_MAX} connections to this agent already: "
                    "end a run, then start anew")  # fmt: skip
        return ""

    def for_run(self, uid: int, runs: Collection[Session]) -> str:
        """Why one more run of this user is too many, or "".  A run outlives its connection for a
        while: a user could leave any number behind."""
        if len(runs) >= CONNECTIONS_MAX:
            return f"this node already serves {CONNECTIONS_MAX} runs"
        if sum(session.uid == uid for session in runs) >= PER_UID_MAX:
            return f"this node already serves {PER_UID_MAX} runs of {user_name(uid)}"
        return ""

    def for_ranks(self, uid: int, nproc: int, others: Collection[Session]) -> str:
        """Why so many ranks more are too many beside the other runs, or ""."""
        mine = sum(session.hello.nproc for session in others if session.uid == uid)
        if mine + nproc > self.ranks_per_uid:
            return (f"{nproc} ranks are too many: {user_name(uid)} has {mine} on this node already"
                    f", and this agent follows {self.ranks_per_uid} of one user")  # fmt: skip
        taken = sum(session.hello.nproc for session in others)
        if taken + nproc > self.ranks_max:
            return (f"{nproc} ranks are too many: this agent follows {taken} of the "
                    f"{self.ranks_max} that it may (its limit of open files)")  # fmt: skip
        return ""


def is_dead(session: Session) -> bool:
    """Whether a run is only kept to be seen: its launcher has ended, not just its connection."""
    return session.link is None and not procfs.process_alive(session.pid)


@lru_cache(maxsize=256)  # a directory service may be slow, and this is the agent's loop
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
