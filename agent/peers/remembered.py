"""What an agent that starts while the store is away still knows of the others.

Owns STATE/peers.json: of which cluster it is, the token that the store kept, and where the nodes
were that this one was in touch with.  It is used until the store answers, and never for another
cluster.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ..core.model import UNREADABLE
from .beats import Address

FILE = "peers.json"
FILE_MAX_BYTES = 4 << 20


class Remembered(msgspec.Struct, frozen=True):
    cluster: str = ""  # its id
    by: str = ""  # the launcher whose private agent wrote it; "" for a node's agent
    token: str = ""  # "": a file of the operator's has it
    places: dict[str, Address] = {}


def read(path: Path, cluster: str, by: str) -> Remembered:
    """Nothing where the file is of another cluster or another launcher's (an address may be another
    run's agent by now), or cannot be read: it is a convenience."""
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(FILE_MAX_BYTES), type=Remembered)
    except (OSError, *UNREADABLE):
        return Remembered()
    is_ours = bool(cluster) and (found.cluster, found.by) == (cluster, by)
    return found if is_ours else Remembered()


def write(path: Path, found: Remembered) -> None:
    """Whole or not at all; this user's alone, for the token is in it."""
    aside = path.with_suffix(".new")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(found))
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
