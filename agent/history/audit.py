"""Who asked for what they may not have: into the journal, however often they ask, and to people.

Owns how often that is written, and the kinds that are shown. Another user who asks in a loop fills
neither the journal nor its queue, in which intents wait: the first of a kind is recorded at once,
its repetitions together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from holdfast.worker.redact import redacted

from .journal import Refused

AGAIN_S = 60.0
KINDS_MAX = 256  # of all users together; beyond it what is new waits until one is old
TEXT_MAX = 200


class Audit:
    """`record` appends to the journal, `say` writes one line to the agent's log; `known` is what
    the journal held, oldest first."""

    def __init__(
        self, record: Callable[[Refused], object], say: Callable[[str], object],
        known: Iterable[Refused] = (),
    ) -> None:
        self._record, self._say = record, say
        self._shown = {one[:3]: one for one in known}
        self._kinds: dict[tuple[int, str, str], tuple[float, Refused | None]] = {}

    def refused(self, uid: int, what: str, why: str, example: str) -> None:
        """One request that was turned away."""
        now_s = time.monotonic()
        key = (uid, what[:TEXT_MAX], why[:TEXT_MAX])
        refusal = Refused(*key, redacted(example)[:TEXT_MAX], time.time())
        self._show(refusal)
        if key in self._kinds:
            since_s, waiting = self._kinds[key]
            times = waiting.times + 1 if waiting is not None else 1
            self._kinds[key] = since_s, refusal._replace(times=times)
            self.settle(now_s)
            return
        self.settle(now_s)
        if len(self._kinds) >= KINDS_MAX:
            return
        self._kinds[key] = now_s, None
        self._record(refusal)
        who = f"uid {uid}" if uid >= 0 else "somebody on the network"
        self._say(f"refused: {who}: {what}: {why}")

    def listed(self) -> list[Refused]:
        """Every kind with its newest example and how often it came, the newest first."""
        return list(reversed(self._shown.values()))

    def _show(self, refusal: Refused) -> None:
        before = self._shown.pop(refusal[:3], None)
        times = refusal.times + (before.times if before is not None else 0)
        self._shown[refusal[:3]] = refusal._replace(times=times)
        if len(self._shown) > KINDS_MAX:
            del self._shown[next(iter(self._shown))]

    def settle(self, now_s: float, all_of_it: bool = False) -> None:
        """Records what was repeated, once a minute for each kind."""
        for key, (since_s, waiting) in list(self._kinds.items()):
            if now_s - since_s < AGAIN_S and not all_of_it:
                continue
            if waiting is None:
                del self._kinds[key]
            else:
                self._kinds[key] = now_s, None
                self._record(waiting)
