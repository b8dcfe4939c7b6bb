"""Which nodes carry the ranks: sizes, units, neighbours, models of accelerators."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import Labels
from holdfast.agent.core.run.layout import Member, World, arranged


def nodes(names: str, **labels: Labels) -> list[Member]:
    """One member a word; `-b` is lost, `b?` is not heard of."""
    return [Member(name.strip("-?"), not name.startswith("-") and not name.endswith("?"),
                   lost=name.startswith("-"), labels=labels.get(name.strip("-?"), ()))
            for name in names.split()]


def slots(world: World, names: str, before: str = "", **labels: Labels) -> str:
    return " ".join(arranged(world, nodes(names, **labels), before.split())[0])


@pytest.mark.parametrize(("names", "before", "expected"), [
    ("a b c d", "", "a b c d"),
    ("a b c d e", "", "a b c d"),
    ("a b", "", "a b"),  # the least that goes on
    ("a", "", ""),
    ("a -b c d e", "a b c d", "a e c d"),  # a spare goes first: the same world
    ("a -b c d", "a b c d", "a d c"),  # the last one moves into the hole, no other does
    ("a b c -d", "a b c d", "a b c"),
    ("-a -b c d", "a b c d", "c d"),
    ("a b c d", "a d c", "a d c b"),  # grows back behind those who stayed
    ("a b? c d", "a b c d", "a d c"),
    ("e f g", "a b c d", "e f g"),
])
def test_survivors_keep_their_slots(names: str, before: str, expected: str) -> None:
    assert slots(World(2, 4), names, before) == expected


@pytest.mark.parametrize(("asked", "before", "expected"), [
    ({"a": 2, "b": 0, "c": 1}, "", "b c a"),
    ({"b": 0}, "", "b a c"),  # who asks for nothing fills it by name
    ({"a": 1, "b": 1}, "", "b a c"),  # the same place twice: by name
    ({"c": 7}, "", "a b c"),  # of a world that is smaller
    ({"a": 2, "b": 0, "c": 1}, "a b c", "a b c"),  # survivors keep their slots
])
def test_a_first_world_is_in_the_order_of_node_ranks(
    asked: dict[str, int], before: str, expected: str
) -> None:
    members = [replace(one, node_rank=asked.get(one.node, -1)) for one in nodes("a b c")]
    assert " ".join(arranged(World(3, 3), members, before.split())[0]) == expected


def test_too_few_is_said_with_both_numbers() -> None:
    assert arranged(World(3, 4), nodes("a b -c"), ())[1] == (
        "waiting for nodes: 2 of 3 can take ranks")


@pytest.mark.parametrize(("names", "before", "expected"), [
    ("a b c d", "", "a b c d"),
    ("a b c", "", "a b"),  # a world is a multiple of the unit
    ("a b c -d", "a b c d", "a b"),  # the unit that lost one goes as a whole
    ("a -b c d", "a b c d", "c d"),
    ("a -b c -d", "a b c d", "a c"),  # both lost one: the first is completed from the second
    ("a -b c d e", "a b c d", "a e c d"),
    ("a b c d", "c d", "c d a b"),
    ("a", "a b", ""),
])
def test_nodes_of_a_unit_move_together(names: str, before: str, expected: str) -> None:
    assert slots(World(2, 4, unit=2), names, before) == expected


def rack(name: str, domain: str = "") -> Labels:
    return (("rack", name), ("nvlink_domain", domain)) if domain else (("rack", name),)


def test_a_world_that_fits_into_one_rack_starts_there() -> None:
    where = {"a": rack("1"), "b": rack("2"), "c": rack("1"), "d": rack("2"), "e": rack("2")}
    assert slots(World(2, 2), "a b c d e", **where) == "a c"
    assert slots(World(3, 3), "a b c d e", **where) == "b d e"
    assert slots(World(4, 4), "a b c d e", **where) == "a c b d"  # neighbours beside each other


def test_a_spare_of_the_same_rack_takes_a_lost_nodes_place() -> None:
    where = {"a": rack("1"), "b": rack("1"), "c": rack("2"), "d": rack("2"),
             "e": rack("1"), "f": rack("2")}
    assert slots(World(4, 4), "a b c -d e f", "a b c d", **where) == "a b c f"
    assert slots(World(4, 4), "-a b c d e f", "a b c d", **where) == "e b c d"


def test_a_unit_lies_within_one_domain_where_one_holds_it() -> None:
    where = {"a": rack("1", "x"), "b": rack("1", "y"), "c": rack("1", "x"), "d": rack("1", "y")}
    assert slots(World(4, 4, unit=2), "a b c d", **where) == "a c b d"


def model(name: str) -> Labels:
    return (("model", name),)


def test_a_world_is_of_one_model_unless_told_otherwise() -> None:
    where = {"a": model("H100"), "b": model("H100"), "c": model("A100"), "d": model("H100")}
    assert slots(World(2, 4), "a b c d", **where) == "a b d"
    assert slots(World(2, 4, mixed=True), "a b c d", **where) == "a b c d"
    made, why = arranged(World(4, 4), nodes("a b c d", **where), ())
    assert made == () and why == (
        "waiting for nodes: 3 of 4 can take ranks; c has A100 where the others have H100, and a "
        "mixed world is not allowed (--allow-mixed)")


def test_who_is_in_the_world_says_which_model_it_is() -> None:
    where = {"a": model("A100"), "b": model("H100"), "c": model("H100"), "d": ()}
    assert slots(World(1, 3), "a b c d", "a", **where) == "a d"


def test_ranks_follow_how_many_each_node_starts() -> None:
    from holdfast.agent.core.run import plan

    members = (Member("a", True, nproc=2), Member("b", True, nproc=1))
    view = plan.PlanView("r", "trainer", True, 0, 4, "x", members, World(2, 2))
    made, _ = plan.plan_run(view)
    assert made is not None and made.ranks == ((0, "a"), (1, "a"), (2, "b"))
