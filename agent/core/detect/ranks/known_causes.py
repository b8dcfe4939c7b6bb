"""What explains that ranks stand still, so that nobody is to blame and no restart would help.

Owns two questions: whether the run was suspended from outside, and whether a condition of the node
that is known (a mount whose server is gone, a full disk, a lost fabric) is what a rank waits for.
Pure; it names nobody and orders nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...model import RankView, RunView, Verdict

SAME_STOP_S = 1.0  # ranks that were stopped this close together were stopped by one hand
MOUNT = ("mount_hung", "mount_failed")
FULL = ("disk_space_low", "filesystem_readonly")
FABRIC = ("fabric_manager_down", "nic_link_down", "nic_lost", "nic_unresponsive")
# Where the kernel waits for a server of files.
SERVERS = ("nfs", "rpc_", "fuse", "request_wait_answer", "cifs", "smb", "ceph", "ldlm", "osc_")


def suspended(view: RunView, ranks: Iterable[RankView]) -> str:
    """Why the run stands still without a fault; "" where it does not.  One rank alone that was
    stopped is a fault; all of several at once are not, nor is anything below a stopped launcher."""
    if view.suspended:
        return "its launcher is stopped or frozen from outside"
    live = [rank for rank in ranks if rank.state in ("starting", "running")]
    stopped = [rank.stopped_s for rank in live if rank.proc_state == "T" and not rank.traced]
    if len(live) < 2 or len(stopped) < len(live) or max(stopped) - min(stopped) > SAME_STOP_S:
        return ""
    return "all its ranks were stopped from outside"


def explains(
    verdicts: Iterable[Verdict], ranks: Iterable[RankView], waits: Iterable[tuple[str, str]]
) -> Verdict | None:
    """The condition that these ranks wait for; `waits`: (kernel function, path) of each where it
    was looked at."""
    ranks, waits = tuple(ranks), tuple(waits)
    blocked = any(rank.proc_state == "D" for rank in ranks) or any(
        wchan.startswith(SERVERS) for wchan, _ in waits)
    for verdict in verdicts:
        mount = dict(verdict.evidence).get("mount", "")
        below = any(_below(path, mount) for _, path in waits)
        if verdict.fault in MOUNT and (blocked or below):
            return verdict
        if verdict.fault in FULL and verdict.severity in ("degraded", "fatal") and (
            below or any(rank.phase == "checkpoint" for rank in ranks)
        ):
            return verdict
        if verdict.fault in FABRIC and any(rank.phase == "collective" for rank in ranks):
            return verdict
    return None


def _below(path: str, mount: str) -> bool:
    return bool(path and mount) and f"{path}/".startswith(f"{mount.rstrip('/')}/")
