"""What the agent knows of itself and of its node at this moment.

Owns the values that the web, metrics and actions read.  The daemon and its parts alone write them:
nothing is asked for here, and nothing is decided.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.collectors.contract import legible

from ..config.load import Loaded
from ..config.settings import Config
from ..core.checks.verdict import CheckVerdict
from ..core.model import Commit, Decision, Now, Observed, Runbook
from ..core.run.state import Suspension
from ..core.series.gradient_pace import GradientPace
from ..history.audit import Audit
from ..history.incident_log import IncidentLog
from ..history.job_log import JobLog
from ..history.journal import Journal, Labels, Review
from ..launchers.server import LauncherServer
from ..store.base import Traffic
from ..system import procfs
from ..system.child_probe import StuckChild
from ..system.errors import ErrorCounters
from ..system.side_thread import SideThread
from ..telemetry.collectors import Runner
from ..telemetry.kernel_log import KernelWatch
from ..web.curves import Curves

COMMITS_MAX = 4096


class Snapshot(NamedTuple):
    """The last step, as people and metrics see it.  `number` grows with every step."""

    number: int
    now: Now
    observed: Observed
    decision: Decision
    paused_until: Mapping[str, float] = {}  # subject -> wall_s at which a pause ends by itself
    stages: Mapping[str, str] = {}  # run -> what it is doing, see core/run/stage.py
    paces: Mapping[str, GradientPace] = {}  # run -> how long its ranks wait for their gradients
    suspended: Mapping[str, Suspension] = {}  # run that is stopped from outside -> since when, why


class AgentState:
    """Times are CLOCK_MONOTONIC seconds."""

    # There before launchers may connect: the daemon opens them.
    journal: Journal
    audit: Audit
    incident_log: IncidentLog
    jobs: JobLog
    counters: dict[tuple[str, Labels], float]
    launchers: LauncherServer
    keep: Callable[[Review], object]  # writes it into the journal, and counts it
    runbooks: Mapping[str, Runbook]  # in force, by fault
    site_pages: Mapping[str, str]  # words of the site's own runbooks, by fault
    outlook: Callable[[str], Sequence[object]]  # what the core would do about a fault now

    def __init__(self, loaded: Loaded, is_private: bool) -> None:
        self.loaded = loaded
        self.is_private = is_private
        self.name = legible(self.config.agent.node or socket.gethostname())
        self.boot_id = procfs.boot_id()
        self.started_s = time.monotonic()
        self.errors = ErrorCounters()
        self.store_traffic: Traffic | None = None
        self.refused_nodes: Callable[[], Mapping[str, str]] = dict  # node -> why
        self.out_of_touch: Callable[[], int] = int  # how many nodes it exchanges no beats with
        self.disk_problem = ""  # why journal or store take no writes
        self.reload_ok = True
        self.reload_error = ""
        self.snapshot = Snapshot(0, Now(0.0, 0.0), Observed(), Decision())
        self.turns = 0  # steps begun, whether or not the core got through
        self.steps = 0
        self.step_s = 0.0
        self.last_step_s = 0.0
        self.loop_lag_s = 0.0
        self.runner: Runner | None = None
        collectors = self.config.collectors
        self.kernel = KernelWatch(collectors.kmsg, self.boot_id, collectors.kmsg_users)
        self.checkpoints = CheckpointAges()
        self.curves = Curves()
        self.checks: tuple[CheckVerdict, ...] = ()  # what was checked last in this boot
        self.passes: tuple[tuple[str, tuple[float, ...]], ...] = ()  # see Observed

    @property
    def config(self) -> Config:
        return self.loaded.config

    def training(self) -> tuple[str, ...]:
        """Runs whose ranks compute here; between two generations they are parked or ended."""
        return tuple(view.run for view in self.snapshot.observed.runs
                     if any(rank.state in ("starting", "running") for rank in view.ranks))

    def job_pythons(self) -> tuple[str, ...]:
        """Of a private agent alone: another user's interpreter is not ours to start."""
        return tuple(session.hello.python for session in self.launchers.sessions()
                     if self.is_private)

    def stuck_children(self) -> tuple[StuckChild, ...]:
        """Children that cannot be ended, whoever started them."""
        starters = (self.runner, self.kernel.journal)
        return tuple(child for starter in starters if starter is not None
                     for child in starter.stuck_children())


class CheckpointAges:
    """When each run's checkpoints became durable, for people."""

    def __init__(self) -> None:
        self._committed_wall_s: dict[tuple[str, str], float] = {}  # by run and path
        self.side_thread = SideThread("checkpoint times")  # because a file system may hang

    def age_s(self, run: str, commit: Commit) -> float:
        """Seconds since a checkpoint was committed; since it was first seen where its directory
        does not tell."""
        key = (run, commit.path)
        if key not in self._committed_wall_s:
            if len(self._committed_wall_s) >= COMMITS_MAX:
                self._committed_wall_s.clear()
            self._committed_wall_s[key] = time.time()
            self.side_thread.do(commit.path, functools.partial(self._stat, key))
        return max(0.0, time.time() - self._committed_wall_s[key])

    def _stat(self, key: tuple[str, str]) -> None:
        try:
            self._committed_wall_s[key] = min(time.time(), os.stat(key[1]).st_mtime)
        except OSError:
            pass  # the time at which it was first seen stays
