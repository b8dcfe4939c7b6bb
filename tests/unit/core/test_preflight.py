"""A pre-flight in a simulated fleet: whose fault it is, by all that a transport can bring."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
from fleet import Flight, Place, World, names

from holdfast.agent.core.checks import preflight
from holdfast.agent.core.checks.judge import BROKEN, GOOD, SLOW, UNKNOWN
from holdfast.agent.core.checks.preflight import COMPUTE, GROUP, PAIR, Member, Outcome


def test_all_well_is_one_round_and_every_node_passes() -> None:
    flight = Flight(8, World(), size=4)
    assert flight.report.rounds == 1 and flight.named() == {}
    assert {one.state for one in flight.report.rows} == {GOOD}
    assert [one.label for one in flight.report.groups] == [
        "group 0", "group 1", "across 0", "across 1", "across 2", "across 3", "whole"]
    assert flight.report.groups[2].nodes == ("n000", "n004")
    within, across, whole = flight.batches[-3:]
    assert {one.kind for one in (*within, *across, *whole)} == {GROUP}
    assert not set(within) & set(across)  # measured apart from each other


def test_links_alone_are_tested_without_the_groups() -> None:
    flight = Flight(4, World({"n002": 0.5}), groups=False)
    assert not flight.report.groups and flight.named() == {"n002": SLOW}
    assert GROUP not in {test.kind for batch in flight.batches for test in batch}


@pytest.mark.parametrize("left", [0.0, 0.5, 0.7])
def test_every_single_network_fault_is_named_and_no_good_node_excluded(left: float) -> None:
    for count in (4, 8, 11):
        for place in (*names(count), *combinations(names(count), 2)):
            flight = Flight(count, World({place: left}), seed=hash(place) & 0xFF)
            assert flight.named() == {place: SLOW if left else BROKEN}, place


def test_every_double_fault_of_eight_is_named_and_no_good_node_excluded() -> None:
    places: list[Place] = [*names(8), *combinations(names(8), 2)]
    for seed, (a, b) in enumerate(combinations(places, 2)):
        lefts = {a: 0.0, b: 0.5 if seed % 2 else 0.0}
        nodes = {one for one in lefts if isinstance(one, str)}
        hidden = {one: left for one, left in lefts.items()
                  if isinstance(one, str) or not nodes & set(one)}
        flight = Flight(8, World(lefts), seed)
        assert {one for one in flight.named() if isinstance(one, str)} <= nodes
        # A link of its own may be slow and untried once its node has failed twice.
        assert flight.named() == {one: SLOW if left else BROKEN for one, left in hidden.items()}


def test_a_broken_node_is_not_waited_for_in_every_slot() -> None:
    """Each of its tests lasts until the deadline."""
    flight = Flight(12, World({"n003": 0.0}))
    waited = sum(any("n003" in test.nodes and test.kind == PAIR for test in batch)
                 for batch in flight.batches)
    assert waited == 4 and flight.named() == {"n003": BROKEN}


@pytest.mark.parametrize("left", [0.5, 0.65])
def test_a_slow_processor_is_named_by_two_that_compute_beside_it(left: float) -> None:
    for node in names(6):
        flight = Flight(6, World(compute={node: left}))
        assert flight.named() == {node: SLOW} and "at the same moment" in flight.reason(node)
        beside = [batch for batch in flight.batches if len(batch) == 2 and {
            one.kind for one in batch} == {COMPUTE} and batch[0].nodes == (node,)]
        assert len(beside) == 2


def test_a_wrong_result_is_broken_and_says_which() -> None:
    flight = Flight(4, World(wrong=("n002",)))
    assert flight.named() == {"n002": BROKEN} and "not the host's" in flight.reason("n002")
    assert flight.report.groups[-1].nodes == ("n000", "n001", "n003")


def test_a_moment_of_load_names_nobody() -> None:
    """What was slow once is tried again."""
    named = Counter[str]()
    for seed in range(100):
        flight = Flight(8, World(load=0.02), seed)
        named.update(one for one in flight.named() if isinstance(one, str))
    assert not named


def test_who_did_not_come_is_unknown_where_its_machine_answers_and_broken_where_not() -> None:
    absent = {"n001": "it did not come within 60 s", "n002": "it did not come within 60 s"}
    flight = Flight(6, World(dark=("n002",)), absent=absent)
    assert flight.named() == {"n002": BROKEN} and flight.state("n001") == UNKNOWN
    assert "nothing answers n000 or n003" in flight.reason("n002")
    assert "the machine answers" in flight.reason("n001")


def test_a_link_to_the_coordinator_that_is_cut_is_named_although_its_end_cannot_come() -> None:
    flight = Flight(4, World({("n000", "n001"): 0.0}), absent={"n001": "it did not come"})
    assert flight.named() == {("n000", "n001"): BROKEN} and flight.state("n001") == UNKNOWN
    assert flight.report.links[0].reason.startswith("n001 answers n002")


def test_who_dies_in_the_middle_is_named_and_holds_nobody_up() -> None:
    for after in range(1, 8):
        for dark in ((), ("n002",)):
            flight = Flight(6, World(dies={"n002": after}, dark=dark))
            if after < 6:
                assert flight.state("n002") == (BROKEN if dark else UNKNOWN), after
                assert "n002 left" in flight.reason("n002")
            assert all(flight.state(one) == GOOD for one in names(6) if one != "n002")


def test_who_stands_still_while_its_machine_answers_is_broken_and_a_cut_way_is_not_its_fault(
) -> None:
    for after in (0, 1, 3):
        world = World(dies={"n002": after}, frozen=("n002",))
        flight = Flight(6, world)
        assert flight.named() == {"n002": BROKEN}, after
        assert "the machine answers n000" in flight.reason("n002")
        assert "reboot" in next(one.todo for one in flight.report.rows if one.node == "n002")
        # To the coordinator alone: a link that was cut makes its end silent as well.
        cut = Flight(6, world._replace(network={("n000", "n002"): 0.0}))
        assert cut.state("n002") == UNKNOWN and cut.named() == {("n000", "n002"): BROKEN}, after
        dark = Flight(6, world._replace(dark=("n002",)))
        assert "nothing answers" in dark.reason("n002") and dark.state("n002") == BROKEN


def test_every_accelerator_takes_part_and_a_slow_rail_is_told_from_slow_nodes() -> None:
    flight = Flight(4, World(slow_rails={"rail 2": 0.6}), rails=4)
    pairs = [test for batch in flight.batches for test in batch if test.kind == PAIR]
    assert {test.ranks for test in pairs} == {4}
    groups = {one.label: one.state for one in flight.report.groups}
    assert groups == {"whole": GOOD, "rail 0": GOOD, "rail 1": GOOD, "rail 2": SLOW,
                      "rail 3": GOOD}
    tests = [test for batch in flight.batches for test in batch if test.label.startswith("rail")]
    assert [(test.rail, test.ranks) for test in tests] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert not flight.named()  # no node is slower than another
    assert {one.label for one in Flight(4, World()).report.groups} == {"whole"}


def test_nodes_that_are_all_slower_than_when_they_passed_do_not_pass() -> None:
    slow = World(dict.fromkeys(names(4), 0.5))
    assert Flight(4, slow).state("n001") == GOOD  # of itself it knows nothing of it
    flight = Flight(4, slow, expected_rate=1e9)
    assert {row.state for row in flight.report.rows} == {UNKNOWN} and not flight.named()
    assert "a cause in common" in flight.report.common
    assert flight.report.limit_from == "baseline" and flight.report.rows[0].limit == 0.85e9
    usual = Flight(4, World(), expected_rate=1e9)
    assert {row.state for row in usual.report.rows} == {GOOD}


def test_nodes_on_one_machine_take_turns_with_its_processors() -> None:
    flight = Flight(8, World(), machine="m", cores=2)
    computing = [batch for batch in flight.batches if batch[0].kind == COMPUTE]
    assert [len(batch) for batch in computing] == [2, 2, 2, 2]
    assert {test.threads for batch in computing for test in batch} == {1}
    alone = Flight(8, World())
    assert len(alone.batches[0]) == 8 and alone.batches[0][0].threads == 0


def test_other_models_are_not_compared_and_two_nodes_accuse_nobody() -> None:
    steps = preflight.preflight(
        ["a", "b"], [Member("a", "a", 1, "slow"), Member("b", "b", 1, "fast")], {})
    outcomes = None
    try:
        while True:
            batch = steps.send(outcomes)  # type: ignore[arg-type]
            outcomes = [Outcome(test, True, 1e9 if test.nodes[0] == "a" else 9e9)
                        for test in batch]
    except StopIteration as ended:
        assert {one.state for one in ended.value.rows} == {GOOD}


def test_a_group_with_a_broken_link_is_not_waited_for_and_the_others_are_made() -> None:
    flight = Flight(8, World({("n001", "n002"): 0.0}), size=4)
    states = {one.label: one.state for one in flight.report.groups}
    assert states["group 0"] == states["whole"] == UNKNOWN and states["group 1"] == GOOD
    assert "n001 - n002 is broken" in flight.report.groups[0].reason


def test_without_torch_a_node_is_unknown_and_the_others_go_on() -> None:
    members = [Member(name, name, 1, "cpu", "no Python has torch" if name == "n003" else "")
               for name in names(4)]
    steps = preflight.preflight(names(4), members, {})
    outcomes = None
    try:
        while True:
            batch = steps.send(outcomes)  # type: ignore[arg-type]
            assert all("n003" not in test.nodes for test in batch)
            outcomes = [Outcome(test, True, 1e9) for test in batch]
    except StopIteration as ended:
        states = {one.node: one.state for one in ended.value.rows}
    assert states == {"n000": GOOD, "n001": GOOD, "n002": GOOD, "n003": UNKNOWN}


def test_a_thousand_nodes_take_a_few_slots() -> None:
    rng = random.Random(1)
    bad = rng.sample(names(1000), 20)
    flight = Flight(1000, World(dict.fromkeys(bad, 0.5)))
    assert flight.named() == dict.fromkeys(bad, SLOW)
    assert sum(batch[0].kind == PAIR for batch in flight.batches) <= 10
