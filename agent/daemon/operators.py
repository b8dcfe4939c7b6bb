"""What operators ask for: requests to the core, and orders to a launcher that bypass it.

Owns both until they are answered.  Who may ask is agent/web/auth.py's; what is done about a request
the core decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..core.model import Answer, Request
from ..history.journal import WAITING, Answered, Asked
from ..launchers import protocol
from .alerts import Alerts

ANSWERS_MAX = 256
ASKED_MAX = 256
REQUESTS_MAX = 64


class Operators:
    """`order` sends a packet to a run's launcher, and says why it could not; `on_request` is called
    for each request that was taken; `alerts` are what others' software asks for.  `record` appends
    to the journal, and `known` is what that held of requests, oldest first."""

    def __init__(
        self, order: Callable[[str, dict[str, object]], str], on_request: Callable[[], None],
        alerts: Alerts, record: Callable[[Asked | Answered], object],
        known: Iterable[Asked] = (),
    ) -> None:
        self._order, self._on_request, self.alerts = order, on_request, alerts
        self._record = record
        self._asked = {one.id: one for one in known}  # newest last
        self._orphans = tuple(
            Request(one.id, one.action, one.subject, one.reason, by=one.by,
                    until_wall_s=one.until_wall_s)
            for one in self._asked.values() if one.state == WAITING)
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, Answer] = {}  # newest last
        self._orders: dict[str, asyncio.Future[protocol.Outcome]] = {}

    def request(self, request: Request) -> bool:
        """Hands a request to the core; False when too many wait already."""
        if len(self._requests) >= REQUESTS_MAX:
            return False
        self._requests[request.id] = request
        self._record_asked(request)
        self._on_request()
        return True

    def done(self, request: Request) -> None:
        """Records what a person did that needed nobody's answer."""
        self._record_asked(request)
        self._settle(Answer(request.id, True, ""))

    def made(self, requests: Iterable[Request]) -> None:
        """Records what alerts became: the core has it already."""
        for request in requests:
            self._record_asked(request)

    def _record_asked(self, request: Request) -> None:
        asked = Asked(request.id, request.action, request.subject, request.reason, request.by,
                      time.time(), request.until_wall_s)
        self._asked[request.id] = asked
        for old in list(self._asked)[:-ASKED_MAX]:
            del self._asked[old]
        self._record(asked)

    def pending(self, answers: Iterable[Answer]) -> tuple[Request, ...]:
        """What the core has not answered yet, by its last decision."""
        for answer in answers:
            if self._requests.pop(answer.id, None) is not None:
                self._answers[answer.id] = answer
                self._settle(answer)
            elif answer.id in self._asked and self._asked[answer.id].state == WAITING:
                # An earlier life's, or what an alert became; the alert is settled elsewhere.
                self._settle(answer)
        for old in list(self._answers)[:-ANSWERS_MAX]:
            del self._answers[old]
        return tuple(self._requests.values())

    def orphans(self) -> tuple[Request, ...]:
        """What an earlier life took and did not answer, until the core has."""
        self._orphans = tuple(one for one in self._orphans
                              if one.id in self._asked and self._asked[one.id].state == WAITING)
        return self._orphans

    def _settle(self, answer: Answer) -> None:
        answered = Answered(answer.id, answer.ok, answer.text, time.time())
        self._record(answered)
        asked = self._asked.get(answer.id)
        if asked is not None:
            self._asked[answer.id] = asked._replace(state=answered.state, text=answer.text)

    def asked(self) -> list[dict[str, Any]]:
        """What people asked for, in the life before this one too, the newest first."""
        return [one._asdict() for one in reversed(self._asked.values())]

    def answer(self, id: str) -> dict[str, str] | None:
        """How a request stands: waiting, done, or refused and why; None for one not known."""
        if id in self._requests:
            return {"id": id, "state": "waiting", "text": ""}
        found = self._answers.get(id)
        if found is not None:
            return {"id": id, "state": "done" if found.ok else "refused", "text": found.text}
        asked = self._asked.get(id)  # in an earlier life, too
        return {"id": id, "state": asked.state, "text": asked.text} if asked is not None else None

    async def direct(
        self, request: Request, fields: dict[str, object], limit_s: float
    ) -> protocol.Outcome:
        """Sends the order for a request that is no effect of the core (a fault on purpose) to its
        run's launcher, and waits for its outcome.  It is in the journal before it is sent, and what
        became of it after.  TimeoutError when none comes, ConnectionError without a launcher."""
        self._record_asked(request)
        answer = Answer(request.id, False, "whoever asked left before the answer")
        try:
            outcome = await self._ordered(request.run, fields, limit_s)
            answer = Answer(request.id, outcome.ok, outcome.error)
            return outcome
        except ConnectionError as error:
            answer = Answer(request.id, False, str(error))
            raise
        except TimeoutError:
            answer = Answer(request.id, False, "the launcher did not answer")
            raise
        finally:
            self._settle(answer)

    async def _ordered(
        self, run: str, fields: dict[str, object], limit_s: float
    ) -> protocol.Outcome:
        key = str(fields["id"])
        answer: asyncio.Future[protocol.Outcome] = asyncio.get_running_loop().create_future()
        self._orders[key] = answer
        try:
            why_not = self._order(run, fields)
            if why_not:
                raise ConnectionError(why_not)
            async with asyncio.timeout(limit_s):
                return await answer
        finally:
            del self._orders[key]

    def launcher_outcome(self, packet: protocol.Outcome) -> bool:
        """Whether it answers an order of these."""
        answer = self._orders.get(packet.id)
        if answer is None or answer.done():
            return False
        answer.set_result(packet)
        return True
