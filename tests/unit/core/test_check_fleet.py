"""Whether a node that fails a check may be drained, by what the scheduler says of the others."""

from __future__ import annotations

from holdfast.agent.core.checks import fleet
from holdfast.agent.core.checks.fleet import FleetNode, announcement, decide, reason
from holdfast.agent.core.model import Settings

NOW_S, WAIT_S = 10_000.0, 90.0


def node(number: int, check: str = "", age_s: float = 100.0, drained_for: str = "",
         **more: object) -> FleetNode:
    given = {"comment": announcement(check, NOW_S - age_s) if check else "",
             "drained": bool(drained_for),
             "reason": reason(drained_for, "7 of 8") if drained_for else "", **more}
    return FleetNode(f"n{number}", ("all",), **given)  # type: ignore[arg-type]


def asked(*nodes: FleetNode, share: float = 0.1, check: str = "devices") -> fleet.Decision:
    return decide("n0", check, "7 nvidia devices, and p4d has 8", nodes, NOW_S, WAIT_S, share,
                  Settings())


def test_a_lonely_failure_is_announced_waits_and_drains_with_its_reason() -> None:
    others = [node(number) for number in range(1, 40)]
    assert asked(node(0), *others).act == fleet.ANNOUNCE
    assert asked(node(0, "clock"), *others).act == fleet.ANNOUNCE  # that was another check
    waits = asked(node(0, "devices", age_s=30), *others)
    assert waits.act == fleet.WAIT and "in 60 s" in waits.why
    drained = asked(node(0, "devices"), *others)
    assert drained == fleet.Decision(
        fleet.DRAIN, "holdfast: devices critical: 7 nvidia devices, and p4d has 8")
    assert fleet.check_of(drained.why) == "devices"


def test_the_same_on_many_nodes_drains_none_and_one_says_so() -> None:
    for number in (3, 4):
        sick = [node(one, "devices") for one in range(number)]
        found = asked(*sick, node(9))
        assert found.act == fleet.HOLD and found.tells and "a common cause" in found.why
    told = node(1, "devices", comment=announcement("devices", 1.0) + ": " + found.why)
    assert not asked(node(0, "devices"), told, node(2, "devices")).tells
    assert not decide("n2", "devices", "", sick, NOW_S, WAIT_S, 0.1, Settings()).tells
    other = [node(one, "clock") for one in range(1, 9)]  # many fail, each at something else
    assert asked(node(0, "devices"), *other).act == fleet.DRAIN
    drained = [node(one, drained_for="devices") for one in (1, 2)]  # they count as well
    assert asked(node(0, "devices"), *drained).act == fleet.HOLD
    many = [node(one) for one in range(1, 100)]  # three of a hundred are no common cause
    assert asked(node(0, "devices"), *many[2:], node(1, "devices"), node(2, "devices"),
                 ).act == fleet.DRAIN


def test_no_more_than_a_share_of_the_partition_is_drained() -> None:
    def held(ours: int, nodes: int, share: float) -> bool:
        rest = [node(one, drained_for=f"c{one}" if one <= ours else "") for one in range(1, nodes)]
        return asked(node(0, "devices"), *rest, share=share).act == fleet.HOLD

    assert [held(ours, 40, 0.1) for ours in (0, 3, 4)] == [False, False, True]
    assert [held(ours, 4, 0.1) for ours in (0, 1)] == [False, True]  # one at least
    theirs = [node(one, drained=True, reason="disk swap") for one in range(1, 20)]
    elsewhere = [FleetNode(f"x{one}", ("gpu",), True, reason("a", "b")) for one in range(9)]
    assert asked(node(0, "devices"), *theirs, *elsewhere).act == fleet.DRAIN


def test_a_drained_node_gets_no_job_by_whomever_it_was_drained() -> None:
    """One that was allocated before may come still."""
    for here in (node(0, drained=True, reason="disk swap"), node(0, drained_for="devices"),
                 node(0, "devices", drained_for="clock")):
        found = asked(here, node(1))
        assert found.act == fleet.OUT and found.refuses
        assert found.why == f"drained already: {here.reason}"
    assert asked(node(0, "devices"), node(1)).refuses
    # What is common to many has not its fault in the node: it was drained before the others came.
    sick = [node(0, drained_for="devices"), node(1, "devices"), node(2, "devices")]
    found = asked(*sick)
    assert found.act == fleet.HOLD and not found.refuses and found.tells


def test_an_unknown_node_is_left() -> None:
    assert asked(node(1)).act == fleet.LEAVE and not asked(node(1)).refuses
    assert fleet.check_of("Prolog error") == "" == fleet.check_of("")
    assert len(reason("devices", "x" * 900)) == fleet.REASON_MAX
