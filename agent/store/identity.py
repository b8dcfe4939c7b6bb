"""Which cluster this node belongs to: remembered in the state folder, compared with the store.

Owns the file STATE/store.json and the store's document `cluster`.  The first agent of a cluster
makes its id; from then on an empty store, or another cluster's, is refused.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import msgspec

from ..core.model import UNREADABLE
from .base import StoreError

CLUSTER, FILE = "cluster", "store.json"


class Known(msgspec.Struct):
    """STATE/store.json: what this node has seen, so that it notices another store."""

    node_id: str = ""  # of this state folder
    cluster: str = ""  # store.cluster, for which the id holds
    cluster_id: str = ""


def id_of(body: bytes) -> str:
    try:
        found = msgspec.json.decode(body) if body else {}
    except UNREADABLE:
        return ""
    return str(found.get("id", "")) if isinstance(found, dict) else ""


def refusal(wanted: str, found: str, makes: bool, where: str) -> str:
    """Why a store that holds the id `found` is not the one of a node that knows `wanted`; "" where
    it is, or where this node joins it.  `makes`: may make a cluster of an empty one."""
    if not found:
        if wanted:
            return (f"{where}, came back empty: this node knows it as {wanted}. Restore etcd's "
                    "backup; where there is none: holdfast store seed")
        return "" if makes else f"{where}, is empty: the first agent makes it a cluster"
    if wanted and found != wanted:
        return (f"{where}, is another than this node knows: {found}, not {wanted}. Set store.url "
                "to the right one; where this node is to join that one: holdfast store forget")
    return ""


def new_mark(id: str, node: str) -> bytes:
    """Body of the document `cluster`, which this node writes first."""
    return msgspec.json.encode({"id": id, "by": node, "wall_s": time.time()})


def read_known(path: Path, writes: bool = True) -> Known:
    """StoreError where it is damaged: to take it for a new node's would join any store."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Known)
    except FileNotFoundError:
        known = Known()
    except (OSError, *UNREADABLE) as error:
        raise StoreError(f"{path}: {error}: it says which cluster this node belongs to; where "
                         "that is lost, remove the file, and the node joins the one it finds"
                         ) from error
    if not known.node_id and writes:
        known.node_id = secrets.token_hex(8)
        write_known(path, known)
    return known


def write_known(path: Path, known: Known) -> None:
    """Whole or not at all."""
    aside = path.with_suffix(".new")
    try:
        owner = path.parent.stat()
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(known))
            file.flush()
            if os.geteuid() == 0:  # a person's command; the agent's own user reads it next
                os.fchown(fd, owner.st_uid, owner.st_gid)
            os.fsync(fd)
        aside.rename(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}: which cluster this node belongs to cannot be "
                         "kept; make room or mend the disk") from error
