"""Two rounds of pair tests name every bad node and link, and no good one.

Every single and double fault up to twelve nodes, seeded ones up to 2,048.  A world is its set of
bad nodes and links; `tried` answers for a pair as such a world would.
"""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from holdfast.agent.core.checks import judge, pairing
from holdfast.agent.core.checks.judge import BROKEN, GOOD, SLOW, UNKNOWN, Result
from holdfast.agent.core.checks.pairing import Pair

USUAL = 10e9
Fault = str | Pair


def names(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


def tried(pair: Pair, faults: dict[Fault, float], noise: random.Random) -> Result:
    """`faults`: node or link -> share of the usual rate that is left; 0 = broken."""
    left = min((share for fault, share in faults.items() if fault == pair or fault in pair),
               default=1.0)
    if left == 0.0:
        return Result(pair, False, error="timed out")
    return Result(pair, True, USUAL * left * noise.uniform(0.95, 1.05))


def two_rounds(nodes: list[str], faults: dict[Fault, float], seed: int = 0) -> judge.Judgement:
    noise = random.Random(seed)
    first = [tried(pair, faults, noise) for slot in pairing.first_round(nodes) for pair in slot]
    second = [tried(pair, faults, noise) for slot in judge.next_round(first) for pair in slot]
    return judge.judge(nodes, first + second)


def named(found: judge.Judgement) -> dict[Fault, str]:
    """What is said to be slow or broken."""
    links = {link: finding.state for link, finding in found.links}
    return {node: finding.state for node, finding in found.nodes
            if finding.state in (SLOW, BROKEN)} | links


def expected(faults: dict[Fault, float]) -> dict[Fault, str]:
    return {fault: SLOW if share else BROKEN for fault, share in faults.items()}


def hidden(faults: dict[Fault, float]) -> dict[Fault, float]:
    """Without links of bad nodes, which nobody can tell from their node."""
    nodes = {fault for fault in faults if isinstance(fault, str)}
    return {fault: share for fault, share in faults.items()
            if isinstance(fault, str) or not nodes & set(fault)}


@pytest.mark.parametrize("count", range(2, 40))
def test_slots_hold_each_node_once_and_the_round_every_link(count: int) -> None:
    nodes = names(count)
    slots = pairing.first_round(nodes)
    for slot in slots:
        used = [node for pair in slot for node in pair]
        assert len(used) == len(set(used))
    pairs = [pair for slot in slots for pair in slot]
    assert len(pairs) == len(set(pairs)) and {node for pair in pairs for node in pair} == set(nodes)
    if count <= pairing.EVERY_LINK_MAX:
        assert len(pairs) == count * (count - 1) // 2 and len(slots) <= count
    else:
        assert len(pairs) == count and len(slots) == 2 + count % 2


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7])
@pytest.mark.parametrize("count", range(4, 13))
def test_every_single_fault_is_named_and_nobody_else(count: int, share: float) -> None:
    nodes = names(count)
    for fault in [*nodes, *combinations(nodes, 2)]:
        found = two_rounds(nodes, {fault: share})
        assert named(found) == expected({fault: share}), fault
        assert all(finding.state == GOOD for node, finding in found.nodes if node != fault)


@pytest.mark.parametrize("count", range(6, 13))
def test_every_double_fault_is_named_and_nobody_else(count: int) -> None:
    nodes = names(count)
    places: list[Fault] = [*nodes, *combinations(nodes, 2)]
    for number, pair in enumerate(combinations(places, 2)):
        faults = {pair[0]: 0.0, pair[1]: 0.5 if number % 2 else 0.0}
        found = two_rounds(nodes, faults, number)
        assert named(found) == expected(hidden(faults)), faults


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_where_too_few_are_left_nobody_good_is_named(count: int) -> None:
    nodes = names(count)
    places: list[Fault] = [*nodes, *combinations(nodes, 2)]
    for pair in combinations(places, 2):
        faults = dict.fromkeys(pair, 0.0)
        alone = {node for node in nodes  # cut off from all others: whose fault it is does not help
                 if all(link in faults for link in combinations(nodes, 2) if node in link)}
        said = {fault for fault in named(two_rounds(nodes, faults)) if isinstance(fault, str)}
        assert said <= {fault for fault in faults if isinstance(fault, str)} | alone, faults


def test_two_nodes_cannot_accuse_each_other() -> None:
    found = two_rounds(names(2), {"n0000": 0.0})
    assert [finding.state for _, finding in found.nodes] == [UNKNOWN, UNKNOWN]
    assert "too few nodes are proven well" in found.of("n0000").reason and not found.bad()


@pytest.mark.parametrize("count", [17, 64, 257, 2048])
def test_many_nodes_need_two_rounds_of_few_slots(count: int) -> None:
    for seed in range(40 if count < 2048 else 4):
        rng = random.Random(seed)
        nodes = names(count)
        bad = rng.sample(nodes, max(1, count // 50))
        faults: dict[Fault, float] = {node: rng.choice((0.0, 0.7)) for node in bad}
        first = [tried(pair, faults, rng) for slot in pairing.first_round(nodes) for pair in slot]
        rounds = judge.next_round(first)
        assert len(rounds) <= 2 * pairing.WITNESSES + 2, len(rounds)
        second = [tried(pair, faults, rng) for slot in rounds for pair in slot]
        found = judge.judge(nodes, first + second)
        assert set(found.bad()) <= set(bad)  # a neighbour of two bad ones has no test that passed
        assert found.bad() == tuple(sorted(bad)) and not found.links


def test_a_cause_in_common_names_nobody() -> None:
    nodes = names(8)
    found = two_rounds(nodes, dict.fromkeys(nodes[:5], 0.0))
    assert found.bad() == () and "5 of 8 nodes fail" in found.common
    assert {node for node, finding in found.nodes if finding.state == GOOD} == set(nodes[5:])


def test_a_peer_that_never_comes_is_unknown_and_accuses_nobody() -> None:
    nodes = names(4)
    results = [Result(pair, False, ran=False, error="n0003 did not come") if "n0003" in pair
               else Result(pair, True, USUAL) for slot in pairing.first_round(nodes)
               for pair in slot]
    assert judge.next_round(results) == ()
    found = judge.judge(nodes, results)
    assert found.of("n0003").state == UNKNOWN and found.bad() == ()
    assert all(found.of(node).state == GOOD for node in nodes[:3])


def test_all_slow_together_is_seen_by_the_baseline_alone() -> None:
    results = [Result(pair, True, 4e9) for slot in pairing.first_round(names(4)) for pair in slot]
    assert judge.judge(names(4), results).of("n0000").state == GOOD
    found = judge.judge(names(4), results, expected_rate=10e9)
    assert found.bad() == () and set(found.of("n0000").evidence[0]) == {"n0000 - n0001", "4 GB/s"}


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        pairing.first_round(["a", "b", "a"])
