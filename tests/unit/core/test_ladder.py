"""The one reader of ladders: who climbs, what is passed over, what stops it."""

from __future__ import annotations

import pytest

from holdfast.agent.core import actions, ladder
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.ladder import MAY, PASS, STOP, Leave, next_rung
from holdfast.agent.core.model import FATAL, Runbook, Settings
from holdfast.agent.core.run import policy

BOOK = Runbook("f", FATAL, "node", ("a", "b", "c"), budget_count=2)
UNKNOWN = Leave(False, reason="a: where is not known")


@pytest.mark.parametrize(
    ("leaves", "spent", "want"),
    [
        ("mmm", {}, ("a", "")),
        ("mmm", {"a": 1}, ("a", "")),
        ("mmm", {"a": 2}, ("b", "")),
        ("pmm", {"b": 2}, ("c", "")),
        ("ppm", {}, ("c", "")),
        ("msm", {"a": 2}, (None, "")),
        ("ppp", {}, (None, "")),
        ("upm", {}, ("c", "")),
        ("upm", {"c": 2}, (None, UNKNOWN.reason)),
        ("usm", {}, (None, UNKNOWN.reason)),
    ],
)
def test_next_rung(leaves: str, spent: dict[str, int], want: tuple[str, str]) -> None:
    words = {"m": MAY, "p": PASS, "s": STOP, "u": UNKNOWN}
    found = next_rung(BOOK, lambda action: spent.get(action, 0),
                      lambda action: words[leaves["abc".index(action)]])
    assert found == want


def test_the_first_of_those_that_are_asked_for() -> None:
    assert ladder.first(BOOK, ("c", "b")) == "b"
    assert ladder.first(BOOK, ("d",)) == ladder.first(None, ("a",)) == ""


def test_a_budget_of_none_ends_the_run_with_its_reason() -> None:
    cause = Cause(fault="f", generation=1, reason="x")
    book = Runbook("f", FATAL, "rank", (actions.RESTART_RANKS,), budget_count=0)
    over = policy.grant(cause, policy.Account("r", 3), {"f": book}, Settings())
    assert (over.action, over.fault, over.reason) == (
        policy.FINISH, "budget_spent", "f of run/r used up its 0 restarts within 24 h, all that "
        "its runbook allows (0 of the run's 3)")


LONG = Runbook("f", FATAL, "node", ("b", "reset", "a", "z", "replace"), budget_count=1)


@pytest.mark.parametrize(("action", "rest"), [
    ("b", ("reset", "a", "z", "replace")), ("reset", ("a", "z", "replace")),
    ("a", ("z", "replace")), ("z", ("replace",)), ("replace", ()),
    ("elsewhere", LONG.ladder),
])
def test_what_is_left_behind_an_action(action: str, rest: tuple[str, ...]) -> None:
    assert ladder.behind(LONG, action) == rest
    assert ladder.holds(LONG, action) is (action != "elsewhere")


@pytest.mark.parametrize(("action", "since", "ahead"), [
    ("replace", "reset", ("a", "z")), ("replace", "b", ("reset", "a", "z")),
    ("replace", "z", ()), ("replace", "elsewhere", ("b", "reset", "a", "z")),
    ("a", "replace", ("b", "reset")),  # a `since` that comes later does not count
    ("b", "reset", ()),
])
def test_what_has_to_be_tried_before_an_action(
    action: str, since: str, ahead: tuple[str, ...]
) -> None:
    assert ladder.before(LONG, action, since) == ahead


def test_the_last_of_several_counts() -> None:
    twice = Runbook("f", FATAL, "node", ("reset", "a", "reset", "b", "replace"), budget_count=1)
    assert ladder.before(twice, "replace", "reset") == ("b",)
