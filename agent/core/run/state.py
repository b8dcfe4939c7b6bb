"""What a run's case remembers between steps, and what one step works with.

Owns two records: RunMemory survives a restart of the agent (msgspec JSON, bounded), Context lives
for one step.  Neither is authority: members, ranks, resume point and budgets are the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..detect.ranks.ended import Cause
from ..detect.ranks.live_logs import LogLook
from ..effects.in_flight import Outbox, Settled
from ..incidents.book import Entry, IncidentBook
from ..model import (
    Effect,
    Incident,
    Now,
    Observed,
    Plan,
    Runbook,
    RunView,
    Settings,
    Verdict,
)
from ..series.wait_history import History
from .policy import Grant


class Stopped(msgspec.Struct):
    """That a run was stopped for good, and when: said for longer than the run is here."""

    verdict: Verdict
    boot_s: float


class OpenIncident(Entry):
    """An incident with what its cost will be measured from."""

    base_step: int = 0  # highest step finished before
    last_step_boot_s: float = 0.0  # when that was
    seen_boot_s: float = 0.0  # when the verdict fell
    suspicion: bool = False  # a warning that may still be taken back


class RunMemory(msgspec.Struct):
    """One run, as this node remembers it."""

    run: str
    history: History = msgspec.field(default_factory=History)
    plan: Plan | None = None  # newest that this node wrote or read
    version: int = 0  # of that document
    wrote: int = 0  # generation of the last plan this node tried to write
    planned: int = 0  # generation that is meant for the launcher that is here now
    bases: dict[int, int] | None = None  # see detect/ranks/collective.py
    bases_generation: int = 0
    refused_version: int = -1  # a write against this version failed: read again first
    refused_boot_s: float = 0.0
    top: int = 0  # highest generation the launcher ever showed
    peak_step: int = 0  # highest step ever seen finished
    peak_boot_s: float = 0.0  # when it was
    base_step: int = 0  # peak when the last cause was found
    earned_steps: int = 0  # new steps of the generation that the last cause ended
    cause: Cause | None = None
    cause_boot_s: float = 0.0
    cause_id: str = ""  # incident
    grant: Grant | None = None
    stop_ranks: tuple[int, ...] = ()  # whom the last order to stop named
    stop_boot_s: float = 0.0  # when ranks were first ordered to stop for the cause
    finish_code: int = -1
    finish_reason: str = ""
    finish_fault: str = ""
    stopped: Stopped | None = None  # by a crash loop, or with its budget spent
    left: bool = False  # the launcher was told to leave, and said yes
    shown: int = 0  # generation that the launcher showed last
    incidents: IncidentBook[OpenIncident] = msgspec.field(default_factory=IncidentBook)  # id ->
    suspicion: str = ""  # incident id of the open suspicion
    logs: LogLook = msgspec.field(default_factory=LogLook)
    evidence: dict[str, str] = {}  # "generation/rank/step" -> source line, "" until it is known
    budget_since: dict[str, float] = {}  # budget key -> boot_s of the window's begin
    backoff_step: int = -1
    backoff: float = 1.0
    deleted: list[str] = []
    oom_pids: list[int] = []
    paused: bool = False
    resumed: bool = False  # an operator's resume that the document does not show yet
    drain: str = ""  # reason of an operator's drain
    shutdown_boot_s: float = 0.0
    restarts: int = 0
    lonely_boot_s: float = 0.0  # since only consequences were seen
    recovering: bool = False  # between a cause and the first new step
    registered_boot_s: float = -1.0


class Context(msgspec.Struct):
    """One step of one run: inputs, and the lists its outputs go to."""

    now: Now
    view: RunView
    observed: Observed
    settings: Settings
    runbooks: Mapping[str, Runbook]
    outbox: Outbox
    settled: list[Settled]
    since_boot_s: float
    frozen: bool  # this agent itself stood still a moment ago: still pages prove nothing
    counts: dict[str, int]
    effects: list[Effect]
    verdicts: list[Verdict]
    changed: dict[str, Incident]
    leader: bool = True
    reason: str = "nothing to plan"
    wake_s: float = 1.0
    causes: list[tuple[int, Cause]] = []  # (pid, cause) of what the kernel said of processes

    def wake(self, seconds: float) -> None:
        """Step again no later than this."""
        self.wake_s = min(self.wake_s, max(0.01, seconds))

    def emit(self, generation: int, draft: Effect) -> Effect | None:
        """Hand an effect out, unless its subject is busy or the journal stalled."""
        if draft.outlives_node and self.observed.journal_stalled:
            return None
        effect = self.outbox.add(generation, draft, self.now.boot_s)
        if effect is not None:
            self.effects.append(effect)
        return effect
