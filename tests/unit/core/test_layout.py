"""Which nodes carry the ranks: sizes, units, neighbours, models of accelerators."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.agent.core.model import LEVELS, Doc, Labels, Plan, RunView, Start
from holdfast.agent.core.nodes.labels import LABEL_MAX
from holdfast.agent.core.run import members, reconcile
from holdfast.agent.core.run.layout import WRITTEN_MAX, Member, World, arranged, labelled
from holdfast.agent.core.run.plan import PlanView, plan_run


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


def planned(grade: str, names: str, **labels: Labels) -> Plan | None:
    many = len(names.split())
    view = PlanView("r", grade, True, 0, 1, "x", tuple(nodes(names, **labels)), World(many, many))
    return plan_run(view)[0]


def test_a_trainers_plan_says_where_its_nodes_are_and_each_start_its_own_nodes() -> None:
    where = {"a": (*rack("1", "x"), *model("H100")), "b": rack("1", "x"), "c": rack("2")}
    made = planned("trainer", "a b c d", **where)
    assert made is not None and made.members == ("d", "a", "b", "c")
    assert made.labels == ((rack("1", "x"), ("a", "b")), (rack("2"), ("c",)))
    read = members.read_plan(Doc("run/r", 1, msgspec.json.encode(made)))
    assert read == made
    for node, own in (("b", rack("1", "x")), ("c", rack("2")), ("d", ())):
        order = reconcile.start(made, RunView("r", node, "trainer", 1), 0.0)
        assert isinstance(order and order.body, Start) and order.body.labels == own
        sent = msgspec.json.decode(msgspec.json.encode(order.body))
        assert sent["labels"] == [list(one) for one in own]


def test_a_plan_says_nothing_where_nothing_is_near_or_nobody_would_ask() -> None:
    where = {"a": rack("1"), "b": rack("2")}
    for made in (planned("script", "a b", **where), planned("trainer", "a", **where),
                 planned("trainer", "a b", a=model("H100"), b=model("H100"))):
        assert made is not None and made.labels == ()
        order = reconcile.start(made, RunView("r", "a", "trainer", 1), 0.0)
        assert isinstance(order and order.body, Start) and order.body.labels is None
        assert "labels" not in msgspec.to_builtins(order.body)


def test_no_plan_grows_too_large_for_the_store_by_its_labels() -> None:
    """A neighbour's beat is input: what its own configuration would refuse is left out."""
    long, whole = (("rack", "r" * (LABEL_MAX + 1)),), (("rack", "r" * LABEL_MAX),)
    of = [Member("a", True, labels=long), Member("b", True, labels=(*whole, ("shelf", "s")))]
    assert labelled(of, "ab") == ((whole, ("b",)),)
    each = len("rack") + LABEL_MAX + 6 + len("n00001") + 3  # as written, with quotes and commas
    names = [f"n{number:05}" for number in range(WRITTEN_MAX // each + 2)]
    many = [Member(name, True, labels=(("rack", f"{name:r>{LABEL_MAX}}"),)) for name in names]
    assert len(labelled(many, names[:-2])) == len(names) - 2
    assert labelled(many, names) == ()
    alike = [replace(one, labels=whole) for one in many]
    assert labelled(alike, names) == ((whole, tuple(names)),)


def test_a_unit_that_no_part_of_the_network_holds_lies_across_them() -> None:
    where = {name: ((LEVELS[0], f"x{at}"),) for at, name in enumerate("abcd")}
    assert slots(World(4, 4, unit=2), "a b c d", **where) == "a b c d"
    assert slots(World(2, 3), "a b", **where) == "a b"


def test_a_world_grows_by_whole_units_up_to_what_its_most_holds_of_them() -> None:
    names = " ".join("abcdefghi")
    assert slots(World(1, 11, unit=4), names, "a b c d") == "a b c d e f g h"


# ---------------------------------------------------------------- what holds for every world


NAMES = [f"n{number:02}" for number in range(14)]


@settings(max_examples=80)
@given(
    least=st.integers(1, 6), most=st.integers(1, 12), unit=st.integers(1, 4),
    fit=st.sets(st.sampled_from(NAMES)), before=st.lists(st.sampled_from(NAMES), unique=True),
    racks=st.lists(st.sampled_from("123"), min_size=14, max_size=14),
)
@example(least=1, most=11, unit=4, fit=set(NAMES[:8]), before=NAMES[:4], racks=["1"] * 14)
@example(least=2, most=2, unit=2, fit={"n00", "n01"}, before=[], racks=list("12" * 7))
def test_a_world_is_as_large_as_may_be_and_moves_nobody_without_need(
    least: int, most: int, unit: int, fit: set[str], before: list[str], racks: list[str]
) -> None:
    world = World(least, most, unit)
    members = [Member(name, name in fit, labels=(("rack", at),))
               for name, at in zip(NAMES, racks, strict=True)]
    made, why = arranged(world, members, before)
    size = min(most, len(fit)) // unit * unit
    need = (least + unit - 1) // unit * unit
    if size < need:
        assert made == () and why == f"waiting for nodes: {len(fit)} of {need} can take ranks"
        return
    assert len(made) == size == len(set(made)) and set(made) <= fit and why
    units = [before[at:at + unit] for at in range(0, len(before), unit)]
    missing = sorted(unit - len(set(one) & fit) for one in units)
    survivors = len(set(made) & set(before))
    assert survivors >= sum(unit - count for count in missing[:size // unit]), (
        "the units that lost the fewest stay")
    stay = [(at, node) for at, node in enumerate(before[:size]) if node in made]
    if len(before) <= size:
        assert all(made[at] == node for at, node in stay), "there is room for every survivor"


def test_of_many_other_models_four_are_named_and_the_rest_is_counted() -> None:
    where = {f"m{number}": model("H100") for number in range(8)} | {
        f"o{number}": model("A100") for number in range(6)}
    said = arranged(World(9, 9), nodes(" ".join(where), **where), ())[1]
    assert said.endswith(
        "o3 has A100, 2 more have others where the others have H100, and a mixed world is not "
        "allowed (--allow-mixed)")
    where = {one: where[one] for one in list(where)[:12]}
    assert " more have" not in arranged(World(9, 9), nodes(" ".join(where), **where), ())[1]


def test_the_gates_of_four_nodes_are_told() -> None:
    held = [Member(name, True, held=f"{name} fails") for name in "abcdef"]
    said = arranged(World(2, 2), [*held, Member("g", True), Member("h", False, held="old")], ())[1]
    assert said == ("waiting for nodes: 1 of 2 can take ranks; a: a fails; b: b fails; c: c fails; "
                    "d: d fails")


def test_whoever_is_to_be_drained_carries_ranks_only_where_there_is_no_other_way() -> None:
    members = [Member("a", True, draining=True), Member("b", True), Member("c", True)]
    assert arranged(World(2, 2), members, ("a", "b"))[0] == ("c", "b")
    assert arranged(World(3, 3), members, ("a", "b", "c"))[0] == ("a", "b", "c")
    assert arranged(World(1, 3), members, ("a", "b", "c"))[0] == ("c", "b")
    out = [replace(one, excluded=one.node == "a") for one in members]
    assert arranged(World(3, 3), out, ())[0] == ()


@pytest.mark.parametrize("why", [
    {"fresh": False}, {"lost": True}, {"fatal": "x"}, {"excluded": True}, {"held": "x"}])
def test_each_reason_alone_keeps_a_node_out(why: dict[str, object]) -> None:
    assert Member("a", True).is_fit and not replace(Member("a", True), **why).is_fit


def test_who_plans_stays_named_fit_or_not() -> None:
    """A node that is cut off with its ranks, and the store with it, asks those that the plan names
    whether it may go on: who leads must be among them."""
    members = (Member("a", True, excluded=True), Member("b", True),
               Member("c", True, excluded=True))
    view = PlanView("r", "script", True, 0, 1, "x", members, World(1, 1), node="a")
    made, _ = plan_run(view)
    assert made is not None and (made.members, made.spares) == (("b",), ("a",))
