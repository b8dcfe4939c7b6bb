"""What operators ask for: requests to the core, and orders to a launcher that bypass it.

Owns both until they are answered.  Who may ask is agent/web/auth.py's; what is done about a request
the core decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ..core.model import Answer, Request
from ..launchers import protocol
from .alerts import Alerts

ANSWERS_MAX = 256
REQUESTS_MAX = 64


class Operators:
    """`order` sends a packet to a run's launcher, and says why it could not; `on_request` is called
    for each request that was taken; `alerts` are what others' software asks for."""

    def __init__(
        self, order: Callable[[str, dict[str, object]], str], on_request: Callable[[], None],
        alerts: Alerts,
    ) -> None:
        self._order, self._on_request, self.alerts = order, on_request, alerts
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, Answer] = {}  # newest last
        self._orders: dict[str, asyncio.Future[protocol.Outcome]] = {}

    def request(self, request: Request) -> bool:
        """Hands a request to the core; False when too many wait already."""
        if len(self._requests) >= REQUESTS_MAX:
            return False
        self._requests[request.id] = request
        self._on_request()
        return True

    def pending(self, answers: Iterable[Answer]) -> tuple[Request, ...]:
        """What the core has not answered yet, by its last decision."""
        for answer in answers:
            if self._requests.pop(answer.id, None) is not None:
                self._answers[answer.id] = answer
        for old in list(self._answers)[:-ANSWERS_MAX]:
            del self._answers[old]
        return tuple(self._requests.values())

    def answer(self, id: str) -> dict[str, str] | None:
        """How a request stands: waiting, done, or refused and why; None for one not known."""
        if id in self._requests:
            return {"id": id, "state": "waiting", "text": ""}
        found = self._answers.get(id)
        if found is None:
            return None
        return {"id": id, "state": "done" if found.ok else "refused", "text": found.text}

    async def direct(self, run: str, fields: dict[str, object], limit_s: float) -> protocol.Outcome:
        """Sends an order that is no effect of the core (a fault on purpose) and waits for its
        outcome.  TimeoutError when none comes, ConnectionError without a launcher."""
        key = str(fields["id"])
        answer: asyncio.Future[protocol.Outcome] = asyncio.get_running_loop().create_future()
        self._orders[key] = answer
        try:
            why_not = self._order(run, fields)
            if why_not:
                raise ConnectionError(why_not)
            return await asyncio.wait_for(answer, limit_s)
        finally:
            del self._orders[key]

    def launcher_outcome(self, packet: protocol.Outcome) -> bool:
        """Whether it answers an order of these."""
        answer = self._orders.get(packet.id)
        if answer is None or answer.done():
            return False
        answer.set_result(packet)
        return True
