"""Ports of loopback for servers that a test starts itself, which nobody else is given meanwhile.

The kernel gives out a port of its own choice again as soon as it is let go: what is asked for so,
and used a moment later, may be the server or the connection of a test beside it by then.  These are
below the kernel's choice, and each worker of xdist has a share of its own.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading

FIRST, END = 12_000, 28_000
SHARES = 64  # of so many workers; torch, etcd and Holdfast have their own ports elsewhere
TURN = threading.Lock()


def share(worker: str) -> range:
    """What a worker of xdist gives out, "gw0" and so on, or a process without one: ""."""
    number = int(worker.removeprefix("gw")) + 1 if worker else 0
    return range(FIRST + number % SHARES, END, SHARES)


OWN = share(os.environ.get("PYTEST_XDIST_WORKER", ""))
# Another start than another session's on this machine.
NEXT = itertools.islice(itertools.cycle(OWN), os.getpid() % len(OWN), None)


def free_ports(count: int) -> list[int]:
    """So many, each given out once in a few hundred times."""
    with TURN:
        found = list(itertools.islice(filter(_is_free, itertools.islice(NEXT, len(OWN))), count))
    assert len(found) == count, "other programs listen on every port from 12000 to 28000"
    return found


def free_port() -> int:
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True
