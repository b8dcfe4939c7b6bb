"""Every second of the node in exactly one category.

Owns the attribution of the time between two steps.  Levels decide it: what the runs showed when
the interval began, for a change of levels brings the next step at once.  Several runs on one node
share each interval in equal parts, and within a run's part the phases that its ranks account for
divide it.  A gap of the boot clock (the agent was down or frozen) is `unknown`, whatever was going
on.

Whether a second was training shows when its step is finished.  Until then it is open, and a fault
makes it `detection`, from the last finished step on.
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
    "detection",  # from the last finished step to the verdict
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
WAITING = "waiting"  # no category: it is not known yet what the stillness is
REDONE = ("recomputing", "maybe_recomputing")
STEPPING = ("training", "collective_wait", *REDONE, WAITING)  # open until the step is over
IN_STEP = (*STEPPING, "compile", "checkpoint_stall", "evaluation")
CUT = (DETECTION, "recovery", "paused", "health_check", "startup")  # no step goes on into these
ABSENT_S = 60.0  # a launcher that lost its agent comes back; of one that does not, all is over
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
    again: bool = False  # its ranks have finished steps, and none in the newest generation
    phases: tuple[str, ...] = ()
    compiling: bool = False  # some rank of it, be it one that has no place yet
    step: int = 0  # least over the ranks
    base_step: int = 0  # highest finished before the newest generation was planned
    resumed_step: int = 0
    redoes: bool = False  # its steps are counted over generations (trainer)
    still_s: float = 0.0
    step_s: float = 0.0


class Shown(Value, frozen=True):
    """What a run shows beside its category."""

    generation: int = 0
    ranks: tuple[int, ...] = ()  # that live
    seconds: dict[str, float] = {}  # phase -> what they account for, summed over them
    last_step_boot_s: float = 0.0  # when a step was finished last, as incidents have it; 0 = never
    broken: bool = False  # a fault is there, or ended it
    asked: bool = False  # it was asked to leave, which is no fault of its own

    def shares(self, before: Shown) -> dict[str, float]:
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
    """Settled and open seconds of one node and of each of its runs."""

    node: dict[str, float] = {}
    runs: dict[str, dict[str, float]] = {}
    doing: dict[str, str] = {}
    open: dict[str, dict[str, float]] = {}  # run -> category -> seconds since its last step
    last_boot_s: float = -1.0
    boot_id: str = ""
    resting: str = "idle"  # what the node does where no run is busy
    shown: dict[str, Shown] = {}  # run -> as of the last call
    seen_boot_s: dict[str, float] = {}  # run of `open` -> when it was shown last
    held: dict[str, float] = {}  # run -> seconds; of memory that older releases wrote

    def __post_init__(self) -> None:
        for table in (self.node, *self.runs.values()):
            for old, new in RENAMED.items():
                if old in table:
                    table[new] = table.get(new, 0.0) + table.pop(old)
        self.doing = {run: RENAMED.get(name, name) for run, name in self.doing.items()}
        for run in list(self.held):
            self._book(run, DETECTION, self.held.pop(run))

    def settle(
        self, boot_s: float, boot_id: str, doing: dict[str, str], resting: str = "idle",
        shown: dict[str, Shown] | None = None,
    ) -> None:
        """Attribute the time since the last call to what was being done then; `doing` maps each
        run to its category from now on, `shown` to what it shows now."""
        before, self.doing = self.doing, dict(doing)
        rested, self.resting = self.resting, resting
        then = self.shown  # of a run that is not here for a moment what it showed last
        self.shown = {run: then[run] for run in self.open if run in then} | dict(shown or {})
        rebooted = boot_id != self.boot_id
        first = self.last_boot_s < 0 or rebooted or boot_s < self.last_boot_s
        elapsed_s = 0.0 if first else boot_s - self.last_boot_s
        self.last_boot_s, self.boot_id = boot_s, boot_id
        if elapsed_s > GAP_S:
            busy = dict.fromkeys(before, "unknown") or {"": "unknown"}
        else:
            busy = {r: c for r, c in before.items() if c != "idle"} or {"": rested}
        for run in [run for run in self.open if run not in busy]:
            last_s = self.shown.get(run, Shown()).last_step_boot_s
            if last_s > then.get(run, Shown()).last_step_boot_s:  # while nobody saw it
                self._close(run, max(0.0, self.seen_boot_s.get(run, boot_s) - last_s))
        for run in sorted(busy) if elapsed_s > 0 else ():
            self._spend(run, busy[run], elapsed_s, elapsed_s / len(busy), then.get(run, Shown()))
        shown_s = dict.fromkeys(doing, boot_s)
        for run in list(self.open):
            self.seen_boot_s[run] = shown_s.get(run, self.seen_boot_s.get(run, boot_s))
            self._resolve(run, rebooted, before.get(run) == WAITING)
        self.seen_boot_s = {run: self.seen_boot_s[run] for run in self.open}
        for run in sorted(self.runs)[: max(0, len(self.runs) - RUNS_MAX)]:
            if run not in doing:
                del self.runs[run]

    def settled_rows(self) -> tuple[tuple[str, float], ...]:
        """What will not change any more: none of these numbers ever becomes less."""
        return tuple((c, self.node.get(c, 0.0)) for c in CATEGORIES)

    def node_rows(self) -> tuple[tuple[str, float], ...]:
        """All seconds; a stillness not explained yet is shown as detection."""
        rows = dict(self.node)
        for run in self.open:
            for name, seconds in self._shown(run).items():
                self._add(rows, name, seconds)
        return tuple((c, rows.get(c, 0.0)) for c in CATEGORIES)

    def run_rows(self) -> tuple[tuple[str, str, float], ...]:
        rows = []
        for run in sorted({*self.runs, *self.open}):
            own = dict(self.runs.get(run, {}))
            for name, seconds in self._shown(run).items():
                self._add(own, name, seconds)
            rows += [(run, category, own[category]) for category in CATEGORIES if category in own]
        return tuple(rows)

    def _spend(
        self, run: str, category: str, elapsed_s: float, share_s: float, then: Shown
    ) -> None:
        """One run's share of an interval: settled, but for what came behind its last step."""
        now = self.shown.get(run, then)
        behind_s = self.last_boot_s - now.last_step_boot_s
        finished = now.last_step_boot_s > then.last_step_boot_s
        parts = _divided(category, share_s, now, then)
        steps = {name: parts.pop(name) for name in STEPPING if name in parts}
        for name, seconds in parts.items():
            self._book(run, name, seconds)
        if finished:
            later = min(1.0, max(0.0, behind_s) / elapsed_s)
            self._leave_open(run, {name: s * (1.0 - later) for name, s in steps.items()})
            # Of a step on another node one hears late: some of what was open is behind it.
            self._close(run, max(0.0, behind_s - elapsed_s) * share_s / elapsed_s)
            self._leave_open(run, {name: s * later for name, s in steps.items()})
        elif now.last_step_boot_s or category == WAITING:
            self._leave_open(run, steps)
        else:  # before a first step nothing is open but a stillness
            for name, seconds in steps.items():
                self._book(run, name, seconds)

    def _leave_open(self, run: str, parts: dict[str, float]) -> None:
        for name, seconds in parts.items():
            if seconds > 0.0:
                self._add(self.open.setdefault(run, {}), name, seconds)

    def _resolve(self, run: str, rebooted: bool, waited: bool) -> None:
        """A stillness that ended by itself was a slow step; one that led to a fault was not."""
        doing, shown = self.doing.get(run), self.shown.get(run, Shown())
        gone = self.last_boot_s - self.seen_boot_s[run] >= ABSENT_S
        cut = doing in CUT or doing in ("idle", "idle_no_spare") and shown.broken
        # Who asks a run to leave while it stands still has had enough of a hang.
        cut = cut or doing == "idle" and shown.asked and waited
        if rebooted or cut or gone and WAITING in self.open[run]:
            self._book(run, DETECTION, sum(self.open.pop(run).values()))
        elif gone or doing == "idle" or (
                doing in IN_STEP and doing != WAITING and not shown.last_step_boot_s):
            self._close(run)

    def _close(self, run: str, kept_s: float = 0.0) -> None:
        """Its step is finished, or nothing says that it will not be; the newest seconds may stay
        open."""
        parts = self._as_stepping(self.open.pop(run, {}))
        whole_s = sum(parts.values())
        kept = min(1.0, kept_s / whole_s) if whole_s > 0.0 else 0.0
        for name, seconds in parts.items():
            self._book(run, name, seconds * (1.0 - kept))
        self._leave_open(run, {name: seconds * kept for name, seconds in parts.items()})

    def _shown(self, run: str) -> dict[str, float]:
        parts = self.open.get(run, {})
        if self.doing.get(run) == WAITING:
            return {DETECTION: sum(parts.values())}
        return self._as_stepping(parts)

    def _as_stepping(self, parts: dict[str, float]) -> dict[str, float]:
        """A wait that was a slow step is of the kind of the seconds around it."""
        found = dict(parts)
        if WAITING in found:
            kind = next((name for name in REDONE if name in found), "training")
            self._add(found, kind, found.pop(WAITING))
        return found

    def _book(self, run: str, category: str, seconds: float) -> None:
        self._add(self.node, category, seconds)
        if run:
            self._add(self.runs.setdefault(run, {}), category, seconds)

    def _add(self, table: dict[str, float], category: str, seconds: float) -> None:
        table[category] = table.get(category, 0.0) + seconds


def _divided(category: str, seconds: float, now: Shown, then: Shown) -> dict[str, float]:
    """The ranks' accounts are exact where a level is what was so at one moment of the interval."""
    shares = now.shares(then) if category in DIVIDED else {}
    if not shares:
        return {category: seconds}
    rest = max(0.0, 1.0 - sum(shares.values()))
    return {name: seconds * share for name, share in shares.items()} | {"training": seconds * rest}


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
    if case.again:
        return "recovery"  # the leader alone knows from what
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
