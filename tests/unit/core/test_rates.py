"""Counters that reset, wrap or vanish, by value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.series import counters
from holdfast.agent.core.series.counters import Growth, Rate, increase

WHOLE32, WHOLE64 = 1 << 32, 1 << 64


@pytest.mark.parametrize(("before", "after", "grown"), [
    (5, 5, 0), (5, 9, 4), (0, 7, 7),
    (WHOLE32 - 3, 4, 7),  # 32 bits wrapped
    (WHOLE32 - 3, WHOLE32 + 4, 7),  # 64 bits went on
    (WHOLE64 - 4096, 4096, 8192),  # as exact as a float is there
    (65535, 0, 0), (65535, 12, 12),  # began anew
    (3_000_000_000, 10, 10),  # too far from its end to have wrapped
    (WHOLE32 - 3, 4_000_000_000, 4_000_000_000),  # fell, and not by a wrap
    (-1, 5, 0), (5, -1, 0), (math.nan, 5, 0), (5, math.nan, 0), (5, math.inf, 0),
])
def test_growth_by_value(before: float, after: float, grown: float) -> None:
    assert increase(float(before), float(after)) == grown


@given(st.floats(), st.floats())
def test_growth_is_a_finite_number_and_never_negative(before: float, after: float) -> None:
    assert 0.0 <= increase(before, after) < math.inf


def test_rates_over_first_same_late_and_vanished_readings() -> None:
    kept, key = Rate(), ("network_errors_total", "device=a")
    assert kept.take(key, 100.0, 10.0) is None
    assert kept.take(key, 130.0, 10.0) is None and kept.take(key, 130.0, 9.0) is None
    grown = kept.take(key, 130.0, 25.0)
    assert grown == Growth(30.0, 15.0) and grown.per_s == 2.0
    assert kept.take(key, math.nan, 40.0) is None
    assert kept.take(key, 160.0, 55.0) == Growth(30.0, 30.0)  # over the whole time


def test_rates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "COUNTERS_MAX", 10)
    kept = Rate()
    for number in range(25):
        kept.take(("a", f"device={number}"), 1.0, 1.0)
    assert len(kept._last) == 5
