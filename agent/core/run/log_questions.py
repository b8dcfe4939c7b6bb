"""When a run's logs are read: once for each death and each suspicion, and what becomes of it.

Owns the question and the place of its answer: the incident that it was asked for.  Nothing here
changes what is done about a fault.  What an answer means is agent/core/detect/ranks/live_logs.py's.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..detect.ranks import live_logs
from ..detect.ranks.live_logs import Asked
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import RankView, subject_of
from .incidents import RunIncidents
from .state import Context, RunState

SETTLE_S = 0.3  # for what the other ranks print about a death; it shows who only followed
HOLD_S = 3.0  # the run's end waits this long for somebody to ask; a cold child answers in 1 s
GIVE_UP_S = 15.0  # ... and this long for one who reads: on a busy machine that took 4 s and more
SUSPECTED_AGAIN_S = 30.0  # suspicions come and go every few seconds on an uneven job
OPERATOR = "operator"


class LogQuestions:
    """The reader of one run's logs."""

    def __init__(self, state: RunState, incidents: RunIncidents) -> None:
        self.state, self.incidents = state, incidents

    def step(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        if ctx.view.logs:
            self._want(ctx, ranks)
            self._ask(ctx, ranks)
        look = self.state.logs
        if look.verdict is not None and look.incident in self.incidents.book.open:
            ctx.verdicts.append(look.verdict)

    def holds(self, ctx: Context) -> bool:
        """Whether the end of the run waits for an answer: afterwards nobody is left to ask."""
        asked, code = self.state.logs.asked, self.state.finish_code
        if asked is None or not ctx.view.logs or code == 0 or ctx.view.shutdown:
            return False
        reads = ctx.in_flight.busy(drafts.logs_subject(self.state.run))
        hold_s = GIVE_UP_S if reads else HOLD_S
        left_s = asked.since_boot_s + hold_s - ctx.now.boot_s
        if left_s > 0:
            ctx.wake(min(left_s, SETTLE_S / 3))
        return left_s > 0

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """The answer joins its incident, also when that one closed meanwhile."""
        asked, incident = self.state.logs.asked, done.effect.request
        if asked is not None and asked.incident == incident and asked.sent:
            self._write(asked=None)
        answer = live_logs.read(done.detail) if done.ok else None
        if answer is None:
            why = live_logs.plain(done.error) or "the answer makes no sense"
            self.incidents.attach(ctx, incident, (("logs not read", why),))
            return
        generation = getattr(done.effect.body, "generation", 0)
        verdict = live_logs.verdict_of(answer, self.state.run, generation)
        self._write(incident=incident, verdict=verdict)
        text = verdict.reason if verdict is not None else ""
        self.incidents.attach(ctx, incident, live_logs.rows(answer), text)

    # ------------------------------------------------------------ within

    def _want(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        """Asks about a death before a suspicion, also where the suspicion was asked about already.
        """
        look, recovery, now_s = self.state.logs, self.state.recovery, ctx.now.boot_s
        cause, suspicion = self.state.cause, self.state.incidents.suspicion
        if recovery is not None and cause is not None and cause.detector != OPERATOR:
            key, incident = f"act/{recovery.incident}", recovery.incident
            generation = cause.generation
        elif suspicion and not 0.0 <= now_s - look.suspected_boot_s < SUSPECTED_AGAIN_S:
            item = self.incidents.book.open.get(suspicion)
            key, incident = f"see/{suspicion}", suspicion
            generation = item.incident.generation if item is not None else 0
            self._write(suspected_boot_s=now_s)
        else:
            return
        if key != look.last and incident and generation > 0:
            item = self.incidents.book.open.get(incident)
            number = subject_of(item.incident.subject).rank if item is not None else -1
            node = next((r.node for r in ranks if r.rank == number), ctx.view.node)
            self._write(last=key, asked=Asked(
                incident, generation, now_s, node="" if node == ctx.view.node else node))

    def _ask(self, ctx: Context, ranks: tuple[RankView, ...]) -> None:
        asked = self.state.logs.asked
        if asked is None:
            return
        waited_s = ctx.now.boot_s - asked.since_boot_s
        if waited_s > GIVE_UP_S or waited_s < 0:
            return self._write(asked=None)
        # An agent that began anew does not know the effect: its answer would come for nobody.
        sent = asked.sent and ctx.in_flight.busy(drafts.logs_subject(self.state.run))
        mine = [r for r in ranks if r.generation == asked.generation]
        quiet = all(r.ended is not None or r.parked is not None for r in mine)
        if sent or not quiet and waited_s < SETTLE_S:
            ctx.wake(SETTLE_S)
        else:
            draft = drafts.logs(ctx.view, asked.generation, asked.incident, asked.node)
            sent = ctx.emit(asked.generation, draft) is not None
        self._write(asked=replace(asked, sent=sent))

    def _write(self, **changed: Any) -> None:
        self.state.logs = replace(self.state.logs, **changed)
