"""What a launcher knows of its run beside the processes: its checkpoints, its clocks, its end.

Owns the levels that several parts of the launcher read, and how a trainer's word changes them.
It talks to nobody and starts nothing.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, Optional

from ..addresses import LOOPBACK
from ..elastic import COMMITS_SENT
from ..wire import Packet
from .spec import Spec

# As the trainer names a checkpoint's folder: step and generation.
CHECKPOINT = re.compile(r"step-(\d{9,18})\.gen-(\d{1,18})\Z")
COMMITS_KEPT = 2 * COMMITS_SENT  # then those that are not sent are forgotten


class RunState:
    """One run on this node, as the agent and a run without an agent see it."""

    def __init__(self, spec: Spec, log_dir: str) -> None:
        self.spec = spec
        self.log_dir = log_dir
        # Where the other nodes reach this one; "" until the agent has said who they are.
        self.address = LOOPBACK if spec.nnodes == 1 else ""
        self.interface = ""  # that has the address; "" = torch's own choice
        self.started_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.listed = not spec.program.trainer  # a trainer lists its checkpoints first
        self.checkpoint_dir = ""
        self.keep = 0
        self.commits: Dict[str, Dict[str, Any]] = {}  # by path
        self.shutdown = ""  # interrupted | preempted | drained
        self.shutdown_s = 0.0
        self.shutdown_reason = ""  # as a person is told
        self.exit_code: Optional[int] = None  # the launcher leaves as soon as there is one
        self.end_reason = ""

    def shut_down(self, why: str) -> None:
        """The first cause stands, and so does the time since which its grace runs."""
        if not self.shutdown:
            self.shutdown, self.shutdown_s = why, time.monotonic()

    def end(self, code: int, reason: str) -> None:
        """The launcher leaves, and says why as its last word; the first decision stands."""
        if self.exit_code is None:
            self.exit_code, self.end_reason = code, reason

    def take_checkpoints(self, packet: Packet) -> None:
        """A trainer's first word: where its checkpoints are; that of later processes is older."""
        if not self.listed:
            self.checkpoint_dir = str(packet.get("checkpoint_dir") or "")
            self.keep = int(packet.get("keep") or 0)
            self.commits = {str(c["path"]): c for c in packet.get("commits") or ()}
            self.listed = True

    def take_commit(self, packet: Packet) -> None:
        path = str(packet["path"])
        self.commits[path] = {"generation": packet["generation"], "step": packet["step"],
                              "path": path, "world": packet["world"], "bad": ""}
        if len(self.commits) > COMMITS_KEPT:  # another node's launcher removed the older ones
            self.commits = {str(one["path"]): one for one in self.newest_commits()}

    def take_verified(self, packet: Packet) -> None:
        path = str(packet["path"])
        named = CHECKPOINT.match(os.path.basename(path))
        if path not in self.commits and named:
            # A rank 0 elsewhere committed it, and the one here has read it back.
            self.take_commit({"path": path, "step": int(named[1]), "generation": int(named[2]),
                              "world": 0})
        if path in self.commits:
            self.commits[path]["verified"] = True

    def take_bad_checkpoint(self, packet: Packet) -> None:
        path = str(packet["path"])
        unknown = {"generation": 0, "step": 0, "path": path, "world": 0, "bad": ""}
        self.commits.setdefault(path, unknown)["bad"] = packet["why"] or "bad"

    def newest_commits(self) -> List[Dict[str, Any]]:
        commits = sorted(self.commits.values(), key=lambda c: (c["generation"], c["step"]))
        return commits[-COMMITS_SENT:]
