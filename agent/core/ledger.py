"""Every second of the node in exactly one category.

Owns the attribution of the time between two steps.  Levels decide it: what the runs showed when
the interval began, for a change of levels brings the next step at once.  Several runs on one node
share each interval in equal parts.  A gap of the boot clock (the agent was down or frozen) is
`unknown`, whatever was going on.
"""

from __future__ import annotations

import msgspec

from .model import Value

CATEGORIES = (
    "training", "startup", "compile", "checkpoint", "evaluation", "detection", "recovery", "redone",
    "maybe_redone", "idle", "paused", "unknown",
)
DETECTION = "detection"
WAITING = "waiting"  # no category: held until it is known what the stillness was
GAP_S = 10.0  # a step is due every second; ten missing are a gap
RUNS_MAX = 64
STILL_S = 1.0  # stillness beyond this is a stall being detected, not training


class Doing(Value, frozen=True):
    """What of a run decides its category."""

    connected: bool = True
    over: bool = False
    fault_paused: bool = False
    broken: bool = False  # a fault is there and no new step has been finished since
    known: bool = False  # ... and a verdict has fallen
    live: bool = False  # ranks of the newest generation run
    phases: tuple[str, ...] = ()
    step: int = 0  # least over the ranks
    base_step: int = 0  # highest finished before the newest generation was planned
    resumed_step: int = 0
    redoes: bool = False  # its steps are counted over generations (trainer)
    still_s: float = 0.0
    step_s: float = 0.0


class Ledger(msgspec.Struct):
    """Settled seconds of one node and of each of its runs."""

    node: dict[str, float] = {}
    runs: dict[str, dict[str, float]] = {}
    doing: dict[str, str] = {}
    held: dict[str, float] = {}  # run -> seconds of a stillness that is not explained yet
    last_boot_s: float = -1.0
    boot_id: str = ""

    def settle(self, boot_s: float, boot_id: str, doing: dict[str, str]) -> None:
        """Attribute the time since the last call to what was being done then; `doing` maps each
        run to its category from now on."""
        before, self.doing = self.doing, dict(doing)
        first = self.last_boot_s < 0 or boot_id != self.boot_id or boot_s < self.last_boot_s
        elapsed_s = 0.0 if first else boot_s - self.last_boot_s
        self.last_boot_s, self.boot_id = boot_s, boot_id
        if elapsed_s <= 0:
            return
        if elapsed_s > GAP_S:
            busy = dict.fromkeys(before, "unknown") or {"": "unknown"}
        else:
            busy = {r: c for r, c in before.items() if c != "idle"} or {"": "idle"}
        share_s = elapsed_s / len(busy)
        for run in sorted(busy):
            if busy[run] == WAITING:
                self.held[run] = self.held.get(run, 0.0) + share_s
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
    stepping = case.live and "startup" not in case.phases and case.step > case.resumed_step
    if case.broken and not (stepping and case.step < case.base_step):
        return "recovery" if case.known else "detection"
    if not case.live or set(case.phases) <= {"startup"}:
        return "startup"
    for phase, name in (("compile", "compile"), ("checkpoint", "checkpoint"),
                        ("eval", "evaluation")):
        if phase in case.phases:
            return name
    if case.still_s > max(STILL_S, 3 * case.step_s):
        return WAITING
    # Whether a script that counts anew does its steps again, its own checkpoint alone knows.
    again = "redone" if case.redoes else "maybe_redone"
    return again if case.step < case.base_step else "training"
