"""What explains that ranks stand still, so that nobody is to blame and no restart would help.

Owns two questions: whether the run was suspended from outside, and whether a condition of a node
that is known (a mount whose server is gone, a full disk, a lost fabric) is what a rank waits for.
A condition explains the wait of a rank that is tied to it by what it waits in, and of no other: an
excuse holds for as long as the condition stands.  Pure; it names nobody and orders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...model import (
    DEGRADED,
    FATAL,
    Condition,
    RankView,
    Readings,
    RunView,
    Verdict,
    labels_of,
    subject_of,
)

FROZEN_BEAT_S = 1.0  # without a beat; ten a second are usual
SAME_STOP_S = 1.0  # ranks that were stopped this close together were stopped by one hand
MOUNT = ("mount_hung", "mount_failed")
FULL = ("disk_space_low", "filesystem_readonly")
STORAGE = (*MOUNT, *FULL)
CARD = ("nic_link_down", "nic_lost", "nic_unresponsive")
SWITCH = "fabric_manager_down"  # of the node's own accelerators
LOCK = "compile_lock_stale"
RDMA = ("efa", "infiniband", "roce")  # collectives over other cards are heard of by their errors
# Beginning of a file system's type -> where the kernel's client of it waits for the server.
CLIENTS: Mapping[str, tuple[str, ...]] = {
    "nfs": ("nfs", "rpc_"), "fuse": ("fuse", "request_wait_answer"), "cifs": ("cifs", "smb"),
    "smb": ("cifs", "smb"), "ceph": ("ceph",), "lustre": ("ldlm", "osc_", "cl_", "ll_"),
}
# Names of readings whose subject is a mount.
OF_MOUNTS = ("host_filesystem_size_bytes", "host_mount_response_seconds",
             "host_mount_waiting_seconds", "host_mount_failed")
NO_SPACE = re.compile(r"\[Errno (?:28|122|30)\]|No space left on device|Disk quota exceeded")
NAMED = re.compile(r"'([^']+)'")
CONDITIONS_MAX, WITHIN_MAX, REASON_MAX = 8, 32, 300  # other nodes are told of them, too


class Wait(NamedTuple):
    """What a rank waits in, as the evidence child saw it; all empty where it could not look."""

    wchan: str = ""  # kernel function
    path: str = ""  # file that the call is about
    open: tuple[str, ...] = ()  # folders in which it has files open


def stands_still(rank: RankView) -> bool:
    """Whether it is stopped, or frozen: whatever else a rank waits in, its ticker beats."""
    return rank.proc_state == "T" and not rank.traced or rank.beat_age_s > FROZEN_BEAT_S


def suspended(view: RunView, ranks: Iterable[RankView], launchers: Iterable[str] = ()) -> str:
    """Why the run stands still without a fault; "" where it does not.  One rank alone that was
    stopped is a fault; all of several at once are not, nor is anything below a stopped launcher.

    launchers: the other nodes whose launcher stands still.  Ranks that go on below one need no
    order that it could not carry out.
    """
    if view.suspended:
        return "its launcher is stopped or frozen from outside"
    live = [rank for rank in ranks if rank.state in ("starting", "running")]
    for node in launchers:
        there = [rank for rank in live if rank.node == node]
        if there and all(map(stands_still, there)):
            return f"its launcher and ranks on {node} are stopped or frozen from outside"
    # What another node says of its ranks is a moment old.
    stopped = [rank.stopped_s + rank.told_s for rank in live
               if rank.proc_state == "T" and not rank.traced]
    if len(live) < 2 or len(stopped) < len(live) or max(stopped) - min(stopped) > SAME_STOP_S:
        return ""
    return "all its ranks were stopped from outside"


def conditions(verdicts: Iterable[Verdict], samples: Readings) -> tuple[Condition, ...]:
    """Those of a node's verdicts that can be what a rank waits for; a warning is none."""
    found = [one for one in verdicts if one.severity in (DEGRADED, FATAL)
             and one.fault in (*STORAGE, *CARD, SWITCH, LOCK)][:CONDITIONS_MAX]
    mounts = {labels_of(row[1]).get("mount", "") for name in OF_MOUNTS
              for row in samples.of(name)} if found else set()
    return tuple(_condition(one, mounts) for one in found)


def _condition(verdict: Verdict, mounts: set[str]) -> Condition:
    about = dict(verdict.evidence)
    mount = about.get("mount", "")
    within = sorted((one for one in mounts if one != mount and _below(one, mount)),
                    key=lambda one: (len(one), one))
    return Condition(
        subject_of(verdict.subject).node, verdict.fault, verdict.reason[:REASON_MAX], mount,
        tuple(within[:WITHIN_MAX]), about.get("fstype", ""),
        about.get("kind", "") if verdict.fault in CARD else "",
        about.get("path", "") if verdict.fault == LOCK else "")


def explains(
    found: Iterable[Condition], waiting: Iterable[tuple[RankView, Wait]], checkpoint_dir: str,
    nodes: int,
) -> Condition | None:
    """The condition that one of these ranks waits for; `nodes`: over how many the run goes."""
    waiting = tuple(waiting)
    return next((one for one in found for rank, wait in waiting
                 if _fabric(one, rank, nodes) or _storage(one, rank, wait, checkpoint_dir)), None)


def explains_end(
    found: Iterable[Condition], node: str, error: str, checkpoint_dir: str
) -> Condition | None:
    """The full disk that a rank of this node ended of, by its error; one that names no file is of
    the checkpoints."""
    if not NO_SPACE.search(error):
        return None
    paths = [path for path in NAMED.findall(error) if path.startswith("/")] or [checkpoint_dir]
    return next((one for one in found if one.fault in FULL and one.node == node
                 and any(_on(one, path) for path in paths)), None)


def _fabric(one: Condition, rank: RankView, nodes: int) -> bool:
    """Whoever is in a collective waits for the fabric of each node; what leaves no node needs no
    card."""
    if rank.phase != "collective":
        return False
    return one.fault == SWITCH or one.fault in CARD and one.card in RDMA and nodes > 1


def _storage(one: Condition, rank: RankView, wait: Wait, checkpoint_dir: str) -> bool:
    """The file that it waits for tells; else the kernel's client that it waits in, or what it has
    to do with files there."""
    if one.fault not in STORAGE or one.node != rank.node:
        return False
    if not any(wait) and one.fault in MOUNT and rank.proc_state == "D":
        return True  # nobody could look, and nothing says that it is another wait
    if wait.path:
        return _on(one, wait.path)
    served = next((names for kind, names in CLIENTS.items() if one.fstype.startswith(kind)), ())
    if one.fault in MOUNT and served and wait.wchan.startswith(served):
        return True
    saves = rank.phase == "checkpoint"
    if saves and _on(one, checkpoint_dir):
        return True
    stuck = saves if one.fault in FULL else rank.proc_state == "D"
    return stuck and any(_on(one, path) for path in wait.open)


def _on(one: Condition, path: str) -> bool:
    """Whether the path lies on this mount itself."""
    return _below(path, one.mount) and not any(_below(path, inner) for inner in one.within)


def _below(path: str, mount: str) -> bool:
    return bool(path and mount) and f"{path}/".startswith(f"{mount.rstrip('/')}/")
