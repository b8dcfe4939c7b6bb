"""What a start makes of the tests between its nodes, over seeded faults of a simulated fleet."""

from __future__ import annotations

from itertools import combinations

import msgspec
import pytest
from fleet import Flight, Place, World, names

from holdfast.agent.core.checks import node_tests
from holdfast.agent.core.checks.judge import BROKEN, SLOW
from holdfast.agent.core.checks.node_tests import BadLink, Found, Hurt, found_of
from holdfast.agent.core.checks.preflight import Report, Row
from holdfast.agent.core.model import Doc, Documents, Settings

ALWAYS = Settings(single_node=False)
COUNT = 8


def found(world: World, count: int = COUNT, wall_s: float = 1.0) -> Found:
    made = found_of(Flight(count, world).report)
    return msgspec.structs.replace(made, nodes=tuple(names(count)), wall_s=wall_s)


def refused(one: Found) -> dict[str, Hurt]:
    return node_tests.left_out([one], ALWAYS)[0]


@pytest.mark.parametrize("left", [0.0, 0.5, 0.7])
@pytest.mark.parametrize("count", [4, 8])
def test_of_every_single_fault_the_node_alone_is_refused_and_of_a_link_nobody(
    count: int, left: float
) -> None:
    for node in names(count):
        out = refused(found(World({node: left}), count))
        assert out.keys() == {node} and out[node].state == (SLOW if left else BROKEN)
        assert f"{node} - " in out[node].reason or f" - {node}" in out[node].reason
    for link in combinations(names(count), 2):
        made = found(World({link: left}), count)
        assert not refused(made) and [one.nodes for one in made.links] == [link]
        ends = node_tests.ends([made], names(count))
        assert ends.keys() == (set() if left else {link[1]})  # what is only slow may be crossed
        assert not left or "both take part" in node_tests.sentence(made, ends)


def test_a_slow_processor_a_wrong_result_and_a_dark_node_are_refused_and_the_dead_are_unknown(
) -> None:
    assert refused(found(World(compute={"n003": 0.5}))).keys() == {"n003"}
    assert "not the host's" in refused(found(World(wrong=("n002",))))["n002"].reason
    assert refused(found(World(dies={"n002": 2}, dark=("n002",)))).keys() == {"n002"}
    dead = found(World(dies={"n002": 2}))
    assert not refused(dead) and [node for node, _ in dead.unknown] == ["n002"]
    assert "n002 is unknown, and takes part" in node_tests.sentence(dead, {})


def test_double_faults_refuse_no_good_node_and_leave_no_broken_link_between_those_that_start(
) -> None:
    places: list[Place] = [*names(6), *combinations(names(6), 2)]
    for a, b in combinations(places, 2):
        made = found(World({a: 0.0, b: 0.0}), 6)
        hurt = {one for one in (a, b) if isinstance(one, str)}
        assert refused(made).keys() <= hurt
        rest = [node for node in names(6) if node not in refused(made)]
        ends = node_tests.ends([made], rest)
        assert len(ends) <= 2
        starting = set(rest) - ends.keys()
        assert not any(set(link.nodes) <= starting for link in made.links)
        if not hurt and set(a) & set(b):  # one node has both links: it goes alone
            assert ends.keys() == set(a) & set(b)


def test_many_hurt_nodes_are_no_nodes_fault() -> None:
    nodes = tuple(names(8))
    three = Found(nodes, 1.0, tuple(Hurt(one, BROKEN, "x", "y") for one in nodes[:3]))
    out, common = node_tests.left_out([three], ALWAYS)
    assert not out and "peers on 3 of 8 nodes" in common
    two = msgspec.structs.replace(three, hurt=three.hurt[:2])
    assert node_tests.left_out([two], ALWAYS)[0].keys() == set(nodes[:2])
    whole = found(World(dict.fromkeys(names(8)[:6], 0.0)))
    assert not refused(whole) and "a cause in common" in node_tests.sentence(whole, {})
    assert node_tests.sentence(whole, {}).count("a cause in common") == 1
    assert not node_tests.answers(whole, nodes)  # the next start asks again


def test_what_was_found_of_a_node_or_link_stands_until_tests_prove_the_contrary() -> None:
    hurt, cut = found(World({"n002": 0.0})), found(World({("n002", "n003"): 0.0}))
    silent = Found(tuple(names(COUNT)), 2.0, unknown=(("n002", "it trains for another run"),))
    well = found(World(), wall_s=3.0)
    assert node_tests.left_out([hurt, silent], ALWAYS)[0].keys() == {"n002"}
    assert node_tests.left_out([hurt, silent, well], ALWAYS) == ({}, "")
    assert node_tests.ends([cut, silent], names(COUNT)).keys() == {"n003"}
    assert not node_tests.ends([cut, silent, well], names(COUNT))


def test_of_many_hurt_nodes_none_passes_for_well_because_it_is_not_told_of() -> None:
    many = names(2 * node_tests.NAMED_MAX)
    rows = tuple(Row(node, BROKEN, "x", "y") for node in many)
    made = msgspec.structs.replace(found_of(Report(rows, (), (), "", 1, 1)), nodes=(*many, "good"))
    assert len(made.hurt) == node_tests.NAMED_MAX
    assert not any(node_tests.answers(made, [node]) for node in many)
    assert node_tests.answers(made, ["good"])


def test_the_newest_tests_of_a_node_speak() -> None:
    bad, well = found(World({"n001": 0.0}), wall_s=1.0), found(World(), wall_s=2.0)
    others = Found(("n005", "n006"), 3.0)
    assert node_tests.left_out([bad, others], ALWAYS)[0].keys() == {"n001"}
    assert not node_tests.left_out([bad, well], ALWAYS)[0]
    cut = found(World({("n000", "n001"): 0.0}), wall_s=1.0)
    assert node_tests.ends([cut], names(8)) and not node_tests.ends([cut, well], names(8))


def test_a_young_word_answers_for_those_that_it_is_about_and_found_well() -> None:
    well = Found(("a", "b", "c"), 100.0)
    assert node_tests.answers(well, ("a", "b")) and not node_tests.answers(well, ("a", "d"))
    hurt = msgspec.structs.replace(well, hurt=(Hurt("c", SLOW, "x", "y"),), unknown=(("b", "?"),))
    assert node_tests.answers(hurt, ("a",))
    assert not node_tests.answers(hurt, ("a", "c")) and not node_tests.answers(hurt, ("a", "b"))
    assert node_tests.is_fresh(well, 390.0, 300.0) and not node_tests.is_fresh(well, 401.0, 300.0)
    assert not node_tests.is_fresh(well, 99.0, 300.0)  # of a clock that was set back


def test_what_is_written_is_read_and_junk_is_nothing() -> None:
    known: tuple[Found, ...] = ()
    for wall_s in range(12):
        one = Found(("a", "b"), float(wall_s), links=(BadLink(("a", "b"), SLOW, "x"),))
        known = node_tests.read(Doc("tested/a", 1, node_tests.written(known, one)))
    assert [one.wall_s for one in known] == [float(at) for at in range(8, 12)]
    bodies = {"tested/a": node_tests.written((), Found(wall_s=2.0)), "tested/b": b"[{",
              "tested/c": b'{"a": 1}', "tested/d": b"[" * 5000,
              "tested/e": node_tests.written((), Found(wall_s=1.0))}
    docs = Documents(Doc(key, 1, body) for key, body in bodies.items())
    assert [one.wall_s for one in node_tests.reports(docs)] == [1.0, 2.0]
    assert node_tests.read_found("{") is None and node_tests.read_found("") is None


def test_who_is_slow_in_the_network_is_told_what_well_would_be_and_a_processor_is_not() -> None:
    slow = refused(found(World({"n002": 0.5})))["n002"]
    assert "; well is " in slow.reason and "B/s or more)" in slow.reason
    assert "well is" not in refused(found(World(compute={"n002": 0.5})))["n002"].reason


def test_a_link_that_is_only_slow_needs_no_new_tests() -> None:
    cut = {state: Found(("a", "b", "c"), links=(BadLink(("a", "b"), state, "x"),))
           for state in (SLOW, BROKEN)}
    assert node_tests.answers(cut[SLOW], ("a", "b"))
    assert not node_tests.answers(cut[BROKEN], ("a", "b"))
    assert node_tests.answers(cut[BROKEN], ("a", "c"))


def test_tests_in_which_a_node_took_no_part_say_nothing_of_it() -> None:
    hurt = found(World({"n002": 0.0}))
    others = node_tests.with_away(Found(("n000", "n001"), 2.0), {"n002": "it trains elsewhere"})
    assert node_tests.left_out([hurt, others], ALWAYS)[0].keys() == {"n002"}
