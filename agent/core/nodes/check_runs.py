"""When checks of this node are made for an incident, a person, or after a job; and what they clear.

Owns the budget of run_check and what became of each round.  A round is an effect; its verdicts come
back as levels.  What disturbs training waits until no run goes on here.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from .. import ladder
from ..actions import RUN_CHECK, is_root_verb
from ..checks.common_cause import NOT_A_ROUND, OF_SCOPE, TOGETHER
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..incidents import values
from ..model import Answer, Request, Runbook, RunCheck, node_subject
from ..model.checked import OK, WARNING
from ..run.state import Context
from .condition_incidents import ConditionIncidents, Stood
from .kernel_incidents import KernelIncidents, Watched

KEPT_MAX = 256


class CheckMemory(msgspec.Struct):
    """Survives a restart of the agent."""

    times: dict[str, list[float]] = {}  # "fault|subject" -> wall_s of its rounds
    had_runs: bool = False


class CheckRuns:
    """Asks for rounds of checks, one at a time."""

    def __init__(self, name: str, memory: CheckMemory, kernel: KernelIncidents,
                 conditions: ConditionIncidents) -> None:
        self.name, self.memory = name, memory
        self.kernel, self.conditions = kernel, conditions
        self.requests: dict[str, Request] = {}  # a person's, not begun yet
        self.answers: dict[str, Answer] = {}

    def step(self, ctx: Context, paused: str) -> None:
        for done in ctx.settled:
            if isinstance(done.effect.body, RunCheck) and not done.effect.body.run:
                self._settle(ctx, done, done.effect.body)
        for request in list(self.requests.values()):
            if self._emit(ctx, request.checks, request.reason, request=request.id):
                del self.requests[request.id]
        self._after(ctx)
        for item in self._open():
            book = ctx.runbooks.get(item.incident.fault)
            if book is not None and not self._clears(ctx, item, book) and not paused:
                self._ask(ctx, item, book)

    def ask(self, request: Request) -> None:
        if len(self.requests) < KEPT_MAX:
            self.requests[request.id] = request

    def is_asked(self, ctx: Context, request: str) -> bool:
        """Whether this request waits, or is under way."""
        return request in self.requests or any(
            one.effect.request == request for one in ctx.in_flight.pending.values())

    def _open(self) -> list[Watched | Stood]:
        return [*self.kernel.book.entries(), *self.conditions.book.entries()]

    def comes_first(self, ctx: Context, fault: str, subject: str) -> bool:
        """Whether a check is due, or under way, before anything behind it on the ladder."""
        book = ctx.runbooks.get(fault)
        due = book is not None and self._spent(ctx, fault, subject, book) < book.budget_count
        return due or ctx.in_flight.busy(self._subject())

    # ------------------------------------------------------------ asking

    def _ask(self, ctx: Context, item: Watched | Stood, book: Runbook) -> None:
        one, names = item.incident, tuple(x for x in checks_of(book) if x not in TOGETHER)
        instructed = item.action if isinstance(item, Watched) else ""
        if not names or instructed == RUN_CHECK and self._is_well(ctx, item, names):
            return  # it was asked for by repeats, and nothing stands behind it
        wanted = replace(book, ladder=(instructed,)) if instructed else book
        action, _ = ladder.next_rung(
            wanted, lambda action: self._spent(ctx, one.fault, one.subject, book),
            lambda action: _leave(action, ctx))
        if action != RUN_CHECK:
            return
        going = [view.run for view in ctx.observed.runs if view.generation and view.state != "done"]
        if going and set(names) & set(ctx.settings.gate.disturbing):
            return self._tell(ctx, item, f"{RUN_CHECK}: waits while {going[0]} goes on")
        if self._emit(ctx, names, one.reason, one.fault, one.id):
            key, now_s = f"{one.fault}|{one.subject}", ctx.now.wall_s
            self.memory.times[key] = [*self.memory.times.pop(key, ()), now_s][-8:]
            while len(self.memory.times) > KEPT_MAX:
                del self.memory.times[next(iter(self.memory.times))]
            self._note(ctx, item, f"{RUN_CHECK}: {', '.join(names)}")

    def _after(self, ctx: Context) -> None:
        going = any(view.generation and view.connected and view.state != "done"
                    for view in ctx.observed.runs)
        if self.memory.had_runs and not going and ctx.settings.gate.after:
            names = tuple(one for one in ctx.settings.gate.names if one not in NOT_A_ROUND)
            if names and not self._emit(ctx, names, "after a job"):
                return  # another round is under way
        self.memory.had_runs = going

    def _emit(
        self, ctx: Context, names: tuple[str, ...], reason: str, fault: str = "",
        incident: str = "", request: str = "",
    ) -> bool:
        settings = ctx.settings.gate
        disturbs = set(names) & set(settings.disturbing)
        draft = drafts.check_node(
            self.name, names, 0.0, reason,
            settings.full_limit_s if disturbs else settings.limit_s, fault)
        body = draft.body
        assert isinstance(body, RunCheck)
        draft = replace(draft, request=request, body=replace(body, incident=incident))
        return ctx.emit(int(ctx.now.wall_s), draft) is not None

    def _spent(self, ctx: Context, fault: str, subject: str, book: Runbook) -> int:
        since_s = ctx.now.wall_s - book.budget_window_h * 3600.0
        return sum(at_s > since_s for at_s in self.memory.times.get(f"{fault}|{subject}", ()))

    def _subject(self) -> str:
        return node_subject(self.name, "checks")

    # ------------------------------------------------------------ what came of it

    def _settle(self, ctx: Context, done: EffectResult, body: RunCheck) -> None:
        known = {one.check: one for one in ctx.observed.checks}
        rows = [f"{name} {known[name].status}: {known[name].reason}" if name in known
                else f"{name} unknown" for name in body.checks]
        text = "; ".join(rows) if done.ok else f"failed: {done.error}"
        if done.effect.request:
            self.answers[done.effect.request] = Answer(done.effect.request, done.ok, text)
            while len(self.answers) > KEPT_MAX:
                del self.answers[next(iter(self.answers))]
        for item in self._open():
            if body.incident and item.incident.id == body.incident:
                self._note(ctx, item, f"{RUN_CHECK}: {text}")

    def _clears(self, ctx: Context, item: Watched | Stood, book: Runbook) -> bool:
        """Closes what a check clears, when all of them passed that began after it was said last.
        What is a condition closes when it is not so any more."""
        names = checks_of(book)
        if book.clears != "check" or not self._is_well(ctx, item, names):
            return False
        self.kernel.well(ctx, (item.incident.id,), f"checked, and well: {', '.join(names)}")
        return True

    def _is_well(self, ctx: Context, item: Watched | Stood, names: tuple[str, ...]) -> bool:
        """Whether all of these passed in a round that began after the kernel's last line of it."""
        if not names or not isinstance(item, Watched):
            return False
        last_wall_s = ctx.now.wall_s - (ctx.now.boot_s - item.last_boot_s)
        passed = {one.check for one in ctx.observed.checks
                  if one.status in (OK, WARNING) and one.wall_s - one.took_s > last_wall_s}
        return passed.issuperset(names)

    def _note(self, ctx: Context, item: Watched | Stood, text: str) -> None:
        changed = values.noted(replace(item.incident, would_have=""), ctx.now, text)
        if isinstance(item, Watched):
            self.kernel.book.change(ctx, item, changed)
        else:
            self.conditions.book.change(ctx, item, changed)

    def _tell(self, ctx: Context, item: Watched | Stood, text: str) -> None:
        if item.incident.would_have == text:
            return
        changed = replace(item.incident, would_have=text)
        if isinstance(item, Watched):
            self.kernel.book.change(ctx, item, changed)
        else:
            self.conditions.book.change(ctx, item, changed)


def checks_of(book: Runbook) -> tuple[str, ...]:
    return book.checks or OF_SCOPE.get(book.scope, ())


def _leave(action: str, ctx: Context) -> ladder.Leave:
    """An order that may be given goes before a check that stands behind it."""
    if action == RUN_CHECK:
        return ladder.MAY
    return ladder.STOP if is_root_verb(action) and action in ctx.settings.allow else ladder.PASS
