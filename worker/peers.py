"""Whose socket is believed to be an agent's: one rule, for a run's launcher and the command line.

Owns the rule, and what a user is called.  Decides nothing about what follows from it.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from functools import lru_cache
from typing import Mapping

AGENT_USER = "holdfast"  # the node agent's; HOLDFAST_AGENT_USER names another, or a uid


class Stranger(Exception):
    """The agent's socket belongs to a user who could be anybody; its text says who."""


@lru_cache(maxsize=4)  # a directory service may take its time, and the launcher's loop has none
def uid_of(name: str) -> int:
    """The uid behind a user's name or number; -1 where there is no such user."""
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return -1


@lru_cache(maxsize=256)  # a directory service may be slow, and callers are loops
def user_name(uid: int) -> str:
    """A user's name; in many containers a user has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def believed(uid: int, environ: Mapping[str, str]) -> bool:
    """Whether this user's word is an agent's: root, this user, and the agent's own user."""
    name = environ.get("HOLDFAST_AGENT_USER") or AGENT_USER
    return uid in (0, os.getuid()) or uid == uid_of(name)


def check_peer(sock: socket.socket, path: str, environ: Mapping[str, str]) -> None:
    """Whoever serves the socket orders this run's ranks about, and is handed their pages: only
    root, this user and the agent's own user may.  Raises Stranger for any other."""
    got = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid: int = struct.unpack("3i", got)[1]
    if not believed(uid, environ):
        name = environ.get("HOLDFAST_AGENT_USER") or AGENT_USER
        raise Stranger("%s is served by uid %d, which is neither root, you nor user %s "
                       "(HOLDFAST_AGENT_USER)" % (path, uid, name))
