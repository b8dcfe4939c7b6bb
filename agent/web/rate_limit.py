"""How often one client may ask, so that nobody's loop takes the agent from everybody else.

Owns the budgets: a bucket for each client and kind of request, which fills with time.  A client is
a user of this machine, or an address beyond it.  Root and the agent's own user are not counted:
they can end the agent anyhow.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

CLIENTS_MAX = 1024  # the one that asked longest ago is forgotten, and begins with a full bucket


class Rate(NamedTuple):
    """Requests a second in the long run, and at once."""

    per_s: float
    burst: float


READ, CHANGE, ALERT = "read", "change", "alert"
RATES = {
    # A page asks once a second, Prometheus every 15 s, `holdfast pause` 20 times a second.
    READ: Rate(100.0, 400.0),
    CHANGE: Rate(5.0, 30.0),
    # 10,000 deliveries in a minute are promised; Alertmanager sends one again for 503 alone.
    ALERT: Rate(500.0, 5000.0),
}
WRONG_TOKEN = 100.0  # what a request costs whose token is none: one a second in the long run


class RateLimit:
    """The buckets of one agent; time is an argument."""

    def __init__(self) -> None:
        self._left: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, kind: str, now_s: float, cost: float = 1.0) -> float:
        """0.0 when the request may be answered, else how long until it may.  Only what is answered
        is taken from the bucket, and what costs more than is left leaves a debt."""
        rate = RATES[kind]
        left, then_s = self._left.pop((client, kind), (rate.burst, now_s))
        left = min(rate.burst, left + max(0.0, now_s - then_s) * rate.per_s)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / rate.per_s
        self._left[client, kind] = (left if wait_s else left - cost), now_s
        while len(self._left) > CLIENTS_MAX:
            self._left.popitem(last=False)
        return wait_s
