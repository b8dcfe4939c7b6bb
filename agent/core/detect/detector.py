"""What a detector declares, what it is shown, and what a look at a run may say.

Owns the two protocols and their views, one of a node and one of a run.  The table of the detectors
is agent/core/detect/registry.py.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from ..model import (
    Now,
    Observed,
    Plan,
    RankView,
    Rows,
    Runbook,
    RunView,
    Settings,
    Verdict,
    node_subject,
)
from ..run.layout import Member
from ..run.operator import OperatorRequest
from ..run.state import RunState
from .ranks.ended import Cause
from .ranks.growth import Growth


class NodeView(NamedTuple):
    """What a detector of a node looks at."""

    rows: Rows  # the readings that it declares: the very same tuple until one of them is newer
    observed: Observed
    memory: Any = None  # what it keeps over a restart of the agent; kept up by it in place


class Detector(Protocol):
    """One detector of a node.  A new one is a class that declares this, and its entry in the table.

    view     what it looks at: a node, or a run (RunDetector)
    name     the `detector` of its verdicts
    reads    how the names of its readings begin: `view.rows` are these
    beside   what else it takes from `view.observed`: "runs", "events", or how names of readings
             begin.  Without any it is asked again only when a reading of its own is newer
    warm_s   how long its windows, which begin anew with the agent, take to find what was so before
    memory   the type of what it keeps over a restart of the agent, which makes an empty one when
             called; None keeps nothing
    of_boot  whether that memory means nothing in another boot
    """

    view: ClassVar[Literal["node"]] = "node"
    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()
    warm_s: ClassVar[float] = 0.0
    memory: ClassVar[Any] = None
    of_boot: ClassVar[bool] = True
    _node: str

    def __init__(self, node: str) -> None:
        self._node = node

    def look(self, view: NodeView) -> list[Verdict]:
        """Faults now."""
        ...

    def node_verdict(
        self, fault: str, thing: str, severity: str, reason: str,
        evidence: tuple[tuple[str, str], ...] = (),
    ) -> Verdict:
        """A verdict about a thing of this node (`mount/data`), or, with "", about the node."""
        return Verdict(
            fault=fault, subject=node_subject(self._node, thing), severity=severity, confidence=1.0,
            reason=reason, evidence=evidence, detector=self.name)


class RanksView(NamedTuple):
    """What a detector of a run looks at: levels, and the run's records, to be read alone."""

    state: RunState
    run: RunView
    plan: Plan
    plan_boot_s: float  # since when that plan is known here
    ranks: tuple[RankView, ...]  # of the plan's generation, on every node heard of
    now: Now
    observed: Observed
    settings: Settings
    runbooks: Mapping[str, Runbook]
    since_boot_s: float  # when this node began to listen
    frozen: bool  # this agent stood still a moment ago: still pages prove nothing
    of_kernel: list[tuple[int, Cause]]  # (pid, cause) of what the kernel said of processes
    request: OperatorRequest | None
    alerts: tuple[Cause, ...]  # what alerts from outside ask for
    nodes: tuple[Member, ...]  # of the run and of that plan


class Look(NamedTuple):
    """What one look at a run says."""

    cause: Cause | None = None  # the generation is replaced for it, and nobody else is asked
    by_cost: bool = False  # ... without proof, because waiting on would be dearer
    suspicion: Cause | None = None  # a warning, unless a later detector finds a cause
    would_have: str = ""  # what acting on it would have done
    moves: bool = False  # no suspicion is left
    verdicts: tuple[Verdict, ...] = ()  # said beside the above
    ticket: Cause | None = None  # nobody recovers from it: it is said until it clears
    clears: str = ""  # ... because of this, or the run is over
    evidence: tuple[int, ...] = ()  # ranks whose evidence is wanted
    lonely: bool = False  # only consequences ended so far
    heard: bool = False  # the operator's request is answered
    reason: str = ""  # why no plan is made, for people
    ends: str = ""  # why the run is over: it waited for nodes as long as it may
    wake_s: float = 3600.0  # look again no later
    growth: Growth | None = None  # who would make the world larger; None: not looked at


class RunDetector(Protocol):
    """One detector of a run: it orders nothing, and keeps nothing between two looks."""

    view: ClassVar[Literal["run"]] = "run"
    name: ClassVar[str]

    def look(self, view: RanksView) -> Look:
        """What breaks this generation now."""
        ...
