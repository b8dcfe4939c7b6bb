"""Every second of the node in exactly one category.

Owns the attribution of the time between two steps.  Levels decide it: what the runs showed when
the interval began, for a change of levels brings the next step at once.  Several runs on one node
share each interval in equal parts, and within a run's part the phases that its ranks account for
divide it.  A gap of the boot clock (the agent was down or frozen) is `unknown`, whatever was going
on.
"""

from __future__ import annotations

import msgspec

from .model import Value

CATEGORIES = (
    "training",
    "collective_wait",  # of a step: in a collective, for the others or the network
    "startup",
    "compile",
    "checkpoint_stall",  # a step waits for its checkpoint; writing in the background is training
    "evaluation",
    "health_check",  # nothing trains until checks of this node are made
    "detection",  # from the last step to the verdict
    "recovery",  # from the verdict to the first new step
    "recomputing",  # steps that were done before
    "maybe_recomputing",  # ... or not: a script's own checkpoint alone knows
    "idle_no_spare",  # a run is here, and too few nodes can take its ranks
    "idle",
    "paused",  # a fault is there, and an operator said not to act
    "unknown",
)
WORKING = ("training", "collective_wait")  # what a run is for: goodput's numerator
RENAMED = {"checkpoint": "checkpoint_stall", "redone": "recomputing",
           "maybe_redone": "maybe_recomputing"}  # of memory that older releases wrote
# phase on a rank's page -> category; all other phases are the work itself
OF_PHASE = {"compile": "compile", "checkpoint": "checkpoint_stall", "eval": "evaluation",
            "collective": "collective_wait"}
DETECTION = "detection"
WAITING = "waiting"  # no category: held until it is known what the stillness was
GAP_S = 10.0  # a step is due every second; ten missing are a gap
RUNS_MAX = 64
DIVIDED = ("training", "checkpoint_stall", "evaluation")  # by the ranks' own accounts
STILL_S = 1.0  # stillness beyond this is a stall being detected, not training


class Doing(Value, frozen=True):
    """What of a run decides its category."""

    connected: bool = True
    over: bool = False
    fault_paused: bool = False
    checked: bool = False  # its start waits for checks of this node
    no_spare: bool = False  # ... or for nodes: fewer can take ranks than it needs
    broken: bool = False  # a fault is there and no new step has been finished since
    known: bool = False  # ... and a verdict has fallen
    live: bool = False  # ranks of the newest generation run
    phases: tuple[str, ...] = ()
    compiling: bool = False  # some rank of it, be it one that has no place yet
    step: int = 0  # least over the ranks
    base_step: int = 0  # highest finished before the newest generation was planned
    resumed_step: int = 0
    redoes: bool = False  # its steps are counted over generations (trainer)
    still_s: float = 0.0
    step_s: float = 0.0


class Phases(Value, frozen=True):
    """What a run's living ranks say that their time went to, summed over them."""

    generation: int = 0
    ranks: tuple[int, ...] = ()
    seconds: dict[str, float] = {}  # phase ->

    def shares(self, before: Phases) -> dict[str, float]:
        """Of the time since `before`, the share of each category that is not the work itself; {}
        where other ranks ran then, or nothing is known.  Pages are written by the job: whatever
        stands there, the shares are of one whole."""
        if (self.generation, self.ranks) != (before.generation, before.ranks):
            return {}
        spent = {phase: max(0.0, seconds - before.seconds.get(phase, 0.0))
                 for phase, seconds in self.seconds.items()}
        total_s = sum(spent.values())
        if not 0.0 < total_s < float("inf"):
            return {}
        return {OF_PHASE[phase]: seconds / total_s for phase, seconds in sorted(spent.items())
                if phase in OF_PHASE and seconds > 0.0}


class Ledger(msgspec.Struct):
    """Settled seconds of one node and of each of its runs."""

    node: dict[str, float] = {}
    runs: dict[str, dict[str, float]] = {}
    doing: dict[str, str] = {}
    held: dict[str, float] = {}  # run -> seconds of a stillness that is not explained yet
    last_boot_s: float = -1.0
    boot_id: str = ""
    resting: str = "idle"  # what the node does where no run is busy
    phases: dict[str, Phases] = {}  # run -> as of the last call

    def __post_init__(self) -> None:
        for table in (self.node, *self.runs.values()):
            for old, new in RENAMED.items():
                if old in table:
                    table[new] = table.get(new, 0.0) + table.pop(old)

    def settle(
        self, boot_s: float, boot_id: str, doing: dict[str, str], resting: str = "idle",
        phases: dict[str, Phases] | None = None,
    ) -> None:
        """Attribute the time since the last call to what was being done then; `doing` maps each
        run to its category from now on, `phases` to what its ranks' accounts show now."""
        before, self.doing = self.doing, dict(doing)
        rested, self.resting = self.resting, resting
        shown, self.phases = self.phases, dict(phases or {})
        first = self.last_boot_s < 0 or boot_id != self.boot_id or boot_s < self.last_boot_s
        elapsed_s = 0.0 if first else boot_s - self.last_boot_s
        self.last_boot_s, self.boot_id = boot_s, boot_id
        if elapsed_s <= 0:
            return
        if elapsed_s > GAP_S:
            busy = dict.fromkeys(before, "unknown") or {"": "unknown"}
        else:
            busy = {r: c for r, c in before.items() if c != "idle"} or {"": rested}
        share_s = elapsed_s / len(busy)
        for run in sorted(busy):
            if busy[run] == WAITING:
                self.held[run] = self.held.get(run, 0.0) + share_s
            elif busy[run] in DIVIDED and run in self.phases and run in shown:
                self._divide(run, busy[run], share_s, self.phases[run].shares(shown[run]))
            else:
                self._book(run, busy[run], share_s)
        self._settle_held(doing)
        for run in sorted(self.runs)[: max(0, len(self.runs) - RUNS_MAX)]:
            if run not in doing:
                del self.runs[run]

    def held_s(self) -> float:
        """Seconds in `node_rows` that are not settled: they may yet turn out to be training."""
        return sum(self.held.values())

    def node_rows(self) -> tuple[tuple[str, float], ...]:
        """All seconds; a stillness not explained yet is shown as detection."""
        rows = {**self.node, DETECTION: self.node.get(DETECTION, 0.0) + self.held_s()}
        return tuple((c, rows.get(c, 0.0)) for c in CATEGORIES)

    def run_rows(self) -> tuple[tuple[str, str, float], ...]:
        rows = []
        for run in sorted({*self.runs, *self.held}):
            own = dict(self.runs.get(run, {}))
            if run in self.held:
                own[DETECTION] = own.get(DETECTION, 0.0) + self.held[run]
            rows += [(run, category, own[category]) for category in CATEGORIES if category in own]
        return tuple(rows)

    def _divide(
        self, run: str, category: str, seconds: float, shares: dict[str, float]
    ) -> None:
        """The ranks' accounts are exact where a level is what was so at one moment of the
        interval."""
        if not shares:
            return self._book(run, category, seconds)
        for name, share in shares.items():
            self._book(run, name, seconds * share)
        self._book(run, "training", seconds * max(0.0, 1.0 - sum(shares.values())))

    def _settle_held(self, doing: dict[str, str]) -> None:
        """A stillness that ended by itself was a slow step; one that led to a fault was not."""
        for run in [run for run in self.held if doing.get(run) != WAITING]:
            slow = doing.get(run) not in (None, "recovery", DETECTION, "unknown")
            self._book(run, "training" if slow else DETECTION, self.held.pop(run))

    def _book(self, run: str, category: str, seconds: float) -> None:
        self._add(self.node, category, seconds)
        if run:
            self._add(self.runs.setdefault(run, {}), category, seconds)

    def _add(self, table: dict[str, float], category: str, seconds: float) -> None:
        table[category] = table.get(category, 0.0) + seconds


def category(case: Doing) -> str:
    """What a run is doing now, for the seconds until the next step."""
    if not case.connected:
        return "unknown"
    if case.over:
        return "idle"
    if case.fault_paused:
        return "paused"
    if not case.live and case.checked:
        return "health_check"
    still = case.still_s > max(STILL_S, 3 * case.step_s)
    begins = not case.live or set(case.phases) <= {"startup"}
    if case.no_spare and (begins or still or case.broken):
        return "idle_no_spare"  # the ranks that are left wait for those that are gone
    stepping = case.live and "startup" not in case.phases and case.step > case.resumed_step
    if case.broken and not (stepping and case.step < case.base_step):
        return "recovery" if case.known else "detection"
    if begins:
        return "compile" if case.compiling else "startup"
    for phase in ("compile", "checkpoint", "eval"):
        if phase in case.phases:
            return OF_PHASE[phase]
    if still:
        return WAITING
    # Whether a script that counts anew does its steps again, its own checkpoint alone knows.
    again = "recomputing" if case.redoes else "maybe_recomputing"
    return again if case.step < case.base_step else "training"
