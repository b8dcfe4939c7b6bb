"""What people ask of one run: pause, resume, drain, restart.

Owns RunState.held and the restart that waits to become a cause.  It answers nothing: a drain ends
the run in ending.py, a pause holds the answer to a cause in recovery.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from .. import actions
from ..model import Answer, Now, Plan, Request, RunView, Value, subject_of
from .state import Held, RunState


class OperatorRequest(Value, frozen=True):
    """An operator's restart, waiting to become a cause."""

    reason: str
    rank: int = -1
    id: str = ""


class Operator:
    """The requests to one run."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.restart: OperatorRequest | None = None

    def ask(self, request: Request, reason: str) -> None:
        if request.action == actions.RESTART_RANKS:
            self.restart = OperatorRequest(reason, subject_of(request.subject).rank, request.id)
        elif request.action == actions.PAUSE:
            self.pause(True, request.until_wall_s)
        elif request.action == actions.RESUME:
            self.resume()
        elif request.action in (actions.DRAIN, actions.STOP_RUN):
            self.drain(reason)

    def answer(self, request: str, shown: bool) -> Answer | None:
        """What became of a restart; None while it is on its way.  `shown`: the run is here."""
        plan, recovery = self.state.document.plan, self.state.recovery
        if plan is not None and request in plan.granted:
            return Answer(request, True, f"generation {plan.generation}")
        if shown and recovery is not None and recovery.cause.request == request:
            return None if self.state.finish_code < 0 else Answer(
                request, False, "the run ended before it")
        if shown and self.restart is not None and self.restart.id == request:
            return None if self.state.finish_code < 0 else Answer(request, False, "the run is over")
        return Answer(request, False, "another request or a fault was answered instead, another "
                      "node leads the run, or no rank runs here")

    def pause(self, paused: bool, until_wall_s: float = 0.0) -> None:
        self.state.held = replace(self.state.held, paused=paused, until_wall_s=until_wall_s)

    def resume(self) -> None:
        self.state.held = replace(
            self.state.held, paused=False, until_wall_s=0.0, ends_wall_s=0.0, resumed=True)

    def pass_time(self, now: Now, leads: bool) -> None:
        """A pause for a while is over then, whoever forgot it.  The document's is everybody's: who
        leads next ends it, and whoever wrote it and leads no more keeps no mark of his own."""
        held, plan = self.state.held, self.state.document.plan
        told = plan if plan is not None and plan.paused else None
        if held.paused and told is not None and not leads:
            held = replace(held, paused=False, until_wall_s=0.0)
        until_s = told.paused_until_wall_s if told is not None and not held.paused else 0.0
        if told is not None and held.counted_wall_s != until_s:
            lasts_s = until_s - told.paused_since_wall_s
            held = replace(held, counted_wall_s=until_s,
                           ends_wall_s=now.wall_s + lasts_s if until_s else 0.0)
        elif told is None:
            held = replace(held, counted_wall_s=0.0, ends_wall_s=0.0)
        if held != self.state.held:
            self.state.held = held
        ends_s = held.until_wall_s if held.paused else held.ends_wall_s
        if 0.0 < ends_s <= now.wall_s and (held.paused or leads):
            self.resume()

    def of_fleet(self, paused: bool) -> None:
        """A pause of the fleet, or its end: the run's own stays as it is."""
        if self.state.held.fleet != paused:
            self.state.held = replace(self.state.held, fleet=paused)

    def drain(self, reason: str) -> None:
        self.state.held = replace(self.state.held, drain=reason)

    def leave(self, view: RunView, reason: str) -> None:
        """Ends the run because its node goes away; a run whose ranks have all ended needs no end.
        """
        held, ranks = self.state.held, view.ranks
        lives = not ranks or any(rank.state != "ended" for rank in ranks)
        if lives and not held.rests and not held.drain:
            self.drain(reason)

    def shown(self, plan: Plan | None) -> None:
        """A resume is done when the document does not say paused any more."""
        resumed = self.state.held.resumed and plan is not None and plan.paused
        self.state.held = replace(self.state.held, resumed=resumed)


def born(paused: bool, until_wall_s: float = 0.0) -> Held:
    """What a run begins with on a node that is paused, or not."""
    return Held(paused=paused, until_wall_s=until_wall_s if paused else 0.0)
