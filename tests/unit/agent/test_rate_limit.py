"""Nobody's loop takes the agent from everybody else, and ten thousand alerts a minute pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.web.rate_limit import (
    ALERT,
    CHANGE,
    CLIENTS_MAX,
    RATES,
    READ,
    WRONG_TOKEN,
    RateLimit,
)


def test_a_burst_passes_then_the_rate_and_each_client_by_itself() -> None:
    limit, burst = RateLimit(), int(RATES[CHANGE].burst)
    assert all(limit.wait_s("uid 7", CHANGE, 0.0) == 0.0 for _ in range(burst))
    wait_s = limit.wait_s("uid 7", CHANGE, 0.0)
    assert 0.0 < wait_s <= 1.0 / RATES[CHANGE].per_s
    assert limit.wait_s("uid 8", CHANGE, 0.0) == 0.0 == limit.wait_s("uid 7", READ, 0.0)
    assert limit.wait_s("uid 7", CHANGE, wait_s) == 0.0  # as soon as was said
    assert limit.wait_s("uid 7", CHANGE, wait_s) > 0.0


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=300))
def test_never_more_than_the_rate_allows(gaps: list[float]) -> None:
    limit, now_s, passed = RateLimit(), 0.0, 0
    for gap in gaps:
        now_s += gap
        passed += limit.wait_s("a", CHANGE, now_s) == 0.0
    assert passed <= RATES[CHANGE].burst + now_s * RATES[CHANGE].per_s + 1e-6


def test_ten_thousand_alerts_in_a_minute_pass_also_all_at_its_end() -> None:
    limit = RateLimit()
    assert all(limit.wait_s("am", ALERT, number * 0.006) == 0.0 for number in range(10_000))
    assert RATES[ALERT].burst >= 5000


def test_guessing_tokens_is_dear() -> None:
    limit = RateLimit()
    tries = sum(limit.wait_s("10.0.0.9", READ, second / 10, WRONG_TOKEN) == 0.0
                for second in range(600))
    assert tries <= 65  # of 600


def test_clients_are_forgotten_by_age() -> None:
    limit = RateLimit()
    for number in range(CLIENTS_MAX * 2):
        limit.wait_s(f"10.0.{number}", READ, 0.0)
    assert len(limit._left) == CLIENTS_MAX
