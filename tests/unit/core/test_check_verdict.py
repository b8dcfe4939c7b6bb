"""What an answer comes to: whose limit speaks, what exit code follows, what a baseline is."""

from __future__ import annotations

import itertools
import random

import pytest

from holdfast.agent.core.checks import baseline
from holdfast.agent.core.checks.verdict import (
    BASELINE,
    CODES,
    CONVENTIONS,
    CRITICAL,
    FLEET,
    NO_LIMIT,
    OK,
    OPERATOR,
    PROFILE,
    STATUSES,
    UNKNOWN,
    WARNING,
    Answer,
    CheckVerdict,
    Limit,
    Measure,
    amount,
    exit_code,
    held,
    judged,
    worst,
)

RATE = Measure("gemm", 8e9, "FLOP/s", "cpu", (8e9,))


def limit(origin: str, met: bool) -> Limit:
    return Limit(origin, 1e9 if met else 10e9, met, "where it is from")


def verdict(status: str, confirmed: bool = False) -> CheckVerdict:
    return CheckVerdict("gemm", status, "why", confirmed=confirmed)


@pytest.mark.parametrize(("limits", "status", "speaks"), [
    ({}, OK, NO_LIMIT),
    ({PROFILE: True}, OK, PROFILE),
    ({PROFILE: False}, WARNING, PROFILE),
    ({BASELINE: True}, OK, BASELINE),
    ({BASELINE: False}, WARNING, BASELINE),
    ({PROFILE: False, BASELINE: True}, WARNING, PROFILE),
    ({PROFILE: True, BASELINE: False}, WARNING, BASELINE),
    ({PROFILE: False, BASELINE: False}, CRITICAL, PROFILE),
    ({FLEET: True}, OK, FLEET),
    ({FLEET: False}, WARNING, FLEET),
    ({FLEET: False, BASELINE: True, PROFILE: True}, WARNING, FLEET),
    ({FLEET: True, BASELINE: False}, WARNING, BASELINE),
    ({PROFILE: False, FLEET: False, BASELINE: True}, CRITICAL, PROFILE),
    ({OPERATOR: True, FLEET: False, PROFILE: False}, OK, OPERATOR),
    ({OPERATOR: False}, CRITICAL, OPERATOR),
    ({OPERATOR: True, PROFILE: False, BASELINE: False}, OK, OPERATOR),
])
def test_a_shipped_limit_only_warns_until_a_baseline_confirms_it(
    limits: dict[str, bool], status: str, speaks: str
) -> None:
    found = judged("gemm", Answer(measures=(RATE,)),
                   {RATE: [limit(*one) for one in limits.items()]}, "look")
    assert (found.status, found.limit_from) == (status, speaks)
    assert found.value == 8e9 and found.unit == "FLOP/s"
    assert found.todo == ("" if status == OK else "look")
    if status != OK:
        measured = speaks in (BASELINE, FLEET)
        words = "where it is from" if measured else f"below 10 GFLOP/s ({speaks})"
        assert found.reason == f"gemm of cpu is 8 GFLOP/s, {words}"


def test_the_measure_that_is_nearest_to_its_limit_is_shown() -> None:
    other = Measure("gemm", 9e9, "FLOP/s", "cuda:1")
    limits = {RATE: [limit(PROFILE, True)], other: [limit(PROFILE, False)]}
    found = judged("gemm", Answer(measures=(RATE, other)), limits, "look")
    assert (found.value, found.limit, found.status) == (9e9, 10e9, WARNING)
    assert "cuda:1" in found.reason
    assert judged("gemm", Answer(measures=(RATE, other)), {}, "").value == 9e9


@pytest.mark.parametrize(("answer", "status", "reason"), [
    (Answer("all is well"), OK, "all is well"),
    (Answer(unknown=("a",)), UNKNOWN, "a"),
    (Answer(unknown=("a",), warning=("b", "c")), WARNING, "b; c"),
    (Answer(critical=("d",), unknown=("a",), warning=("b",)), CRITICAL, "d"),
])
def test_the_worst_that_is_said_is_the_status(answer: Answer, status: str, reason: str) -> None:
    found = judged("disk", answer, {}, "clean up")
    assert (found.status, found.reason) == (status, reason)


def test_the_exit_code_is_that_of_nagios() -> None:
    for count in range(1, 4):
        for statuses in itertools.product(STATUSES, repeat=count):
            expected = next(one for one in (CRITICAL, WARNING, UNKNOWN, OK) if one in statuses)
            assert worst(statuses) == expected
            assert exit_code([verdict(one) for one in statuses]) == CODES[expected]
    assert exit_code([]) == 0


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_scheduler_hears_of_a_confirmed_critical_alone(convention: str) -> None:
    for status, confirmed, is_open in itertools.product(STATUSES, (True, False), (True, False)):
        code = exit_code([verdict(OK), verdict(status, confirmed)], convention, is_open)
        assert code == (status == CRITICAL and confirmed and not is_open)
    assert held(()) == (OK, None)


def test_numbers_are_written_with_their_prefix() -> None:
    assert [amount(one, "B/s") for one in (0.0, 12.34, 999.6, 12.3e9, 4.61e11, 7e19)] == [
        "0 B/s", "12.3 B/s", "1 kB/s", "12.3 GB/s", "461 GB/s", "7e+04 PB/s"]


# ------------------------------------------------------------------------------------ baseline


def passes(count: int, spread: float, seed: int = 1) -> list[list[float]]:
    noise = random.Random(seed)
    return [[1e9 * noise.uniform(1 - spread, 1 + spread) for _ in range(5)] for _ in range(count)]


def test_similarity_counts_what_is_worse_alone() -> None:
    healthy = [1.0, 1.0, 1.0, 1.0]
    assert baseline.similarity(healthy, healthy) == 1.0
    assert baseline.similarity([2.0], healthy) == 1.0
    assert baseline.similarity([0.5], healthy) == pytest.approx(0.5)
    assert baseline.similarity([0.0], healthy) == 0.0
    assert baseline.similarity([1.0], [0.0]) == 1.0
    # Half of the samples at half the rate: a quarter of the distribution is missing.
    assert baseline.similarity([0.5, 1.0], healthy) == pytest.approx(0.75)


def test_too_few_passes_say_nothing() -> None:
    measure = Measure("gemm", 1e8, "FLOP/s")
    assert baseline.limit_of(measure, passes(baseline.PASSES_MIN - 1, 0.01)) is None
    assert baseline.limit_of(measure, []) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_node_is_told_and_a_usual_one_is_not(seed: int) -> None:
    healthy = passes(12, 0.03, seed)
    usual = Measure("gemm", 1e9, "FLOP/s", samples=tuple(passes(1, 0.03, seed + 100)[0]))
    slow = Measure("gemm", 7e8, "FLOP/s", samples=tuple(0.7 * one for one in usual.samples))
    told = baseline.limit_of(slow, healthy), baseline.limit_of(usual, healthy)
    assert [one is not None and one.met for one in told] == [False, True]
    assert told[0] is not None and 0.9e9 < told[0].value < 1e9


def test_a_fleet_that_differs_gets_what_it_differs_by_and_no_less_than_the_floor() -> None:
    assert baseline.least_similarity(passes(12, 0.001)) == baseline.SIMILAR
    assert baseline.SIMILAR_LEAST <= baseline.least_similarity(passes(12, 0.3)) < baseline.SIMILAR
    wild = [[1.0], [100.0], [3.0], [50.0], [0.1]]
    assert baseline.least_similarity(wild) == baseline.SIMILAR_LEAST
