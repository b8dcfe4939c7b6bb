"""When a run's logs are read: once for each death and each suspicion, and what becomes of it.

Owns the question and the place of its answer: the incident that it was asked for.  Nothing here
changes what is done about a fault.  What an answer means is agent/core/detect/ranks/live_logs.py's.
"""

from __future__ import annotations

from ..detect.ranks import live_logs
from ..detect.ranks.live_logs import Asked
from ..effects.in_flight import Settled
from ..model import RankView
from . import reconcile
from .incidents import Casebook
from .state import Context, RunMemory

SETTLE_S = 0.3  # for what the other ranks print about a death; it shows who only followed
HOLD_S = 3.0  # the run's end waits this long for the root; a cold child answers in under 1 s
GIVE_UP_S = 15.0
SUSPECTED_AGAIN_S = 30.0  # suspicions come and go every few seconds on an uneven job
OPERATOR = "operator"


class LogCase:
    """The reader of one run's logs."""

    def __init__(self, memory: RunMemory, book: Casebook) -> None:
        self.memory = memory
        self.book = book

    def step(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        look = self.memory.logs
        if ctx.view.logs:
            self._want(ctx)
            self._ask(ctx, ranks)
        if look.verdict is not None and look.incident in self.memory.incidents.open:
            ctx.verdicts.append(look.verdict)

    def holds(self, ctx: Context) -> bool:
        """Whether the end of the run waits for an answer: afterwards nobody is left to ask."""
        m, asked = self.memory, self.memory.logs.asked
        if asked is None or not ctx.view.logs or m.finish_code == 0 or ctx.view.shutdown:
            return False
        left_s = asked.since_boot_s + HOLD_S - ctx.now.boot_s
        if left_s > 0:
            ctx.wake(min(left_s, SETTLE_S / 3))
        return left_s > 0

    def settled(self, ctx: Context, done: Settled) -> None:
        """The answer joins its incident, also when that one closed meanwhile."""
        look, incident = self.memory.logs, done.effect.request
        if look.asked is not None and look.asked.incident == incident and look.asked.sent:
            look.asked = None
        answer = live_logs.read(done.detail) if done.ok else None
        if answer is None:
            why = live_logs.plain(done.error) or "the answer makes no sense"
            self.book.attach(ctx, incident, (("logs not read", why),))
            return
        generation = getattr(done.effect.body, "generation", 0)
        verdict = live_logs.verdict_of(answer, self.memory.run, generation)
        look.incident, look.verdict = incident, verdict
        text = verdict.reason if verdict is not None else ""
        self.book.attach(ctx, incident, live_logs.rows(answer), text)

    # ------------------------------------------------------------ within

    def _want(self, ctx: Context) -> None:
        """A death goes before a suspicion, and is asked about even where that one was."""
        m, look = self.memory, self.memory.logs
        now_s = ctx.now.boot_s
        if m.cause is not None and m.cause.detector != OPERATOR:
            key, incident, generation = f"act/{m.cause_id}", m.cause_id, m.cause.generation
        elif m.suspicion and not 0.0 <= now_s - look.suspected_boot_s < SUSPECTED_AGAIN_S:
            item = m.incidents.open.get(m.suspicion)
            key, incident = f"see/{m.suspicion}", m.suspicion
            generation = item.incident.generation if item is not None else 0
            look.suspected_boot_s = now_s
        else:
            return
        if key != look.last and incident and generation > 0:
            look.last, look.asked = key, Asked(incident, generation, now_s)

    def _ask(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        asked = self.memory.logs.asked
        if asked is None:
            return
        waited_s = ctx.now.boot_s - asked.since_boot_s
        if waited_s > GIVE_UP_S or waited_s < 0:
            self.memory.logs.asked = None
            return
        # An agent that began anew does not know the effect: its answer would come for nobody.
        asked.sent = asked.sent and ctx.outbox.busy(reconcile.logs_subject(self.memory.run))
        mine = [r for r in ranks if r.generation == asked.generation]
        quiet = all(r.ended is not None or r.parked is not None for r in mine)
        if asked.sent or not quiet and waited_s < SETTLE_S:
            return ctx.wake(SETTLE_S)
        draft = reconcile.logs_draft(ctx.view, asked.generation, asked.incident)
        asked.sent = ctx.emit(asked.generation, draft) is not None
