"""A run over nodes whose leader has them tested with each other before it starts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleet import World

from holdfast.agent.core.checks.node_tests import Found, Hurt, written
from holdfast.agent.core.model import CheckVerdict, Doc, GateSettings, NodeTests, Settings
from holdfast.agent.core.run.start_gate import AGAIN_S

from .driver import Cluster, replace
from .test_gate_of_nodes import left, returns

LIMIT_S = 30.0


def fleet(names: str, nnodes: int, least: int = 0, world: World | None = None,
          wait_s: float = 0.0, peers: tuple[str, ...] = ("links",), **view: Any) -> Cluster:
    settings = Settings(single_node=False, gather_s=2.0, gate=GateSettings(
        names=(), wait_s=wait_s, peers=peers, peers_limit_s=LIMIT_S))
    made = Cluster(names, nnodes, least=least, settings=settings, registered_boot_s=99.0, **view)
    becomes(made, world or World())
    return made


def becomes(made: Cluster, world: World) -> None:
    for lab in made.labs.values():
        lab.world = world


def rounds(made: Cluster) -> list[tuple[str, ...]]:
    """Who was tested, each time, by whomever."""
    return [one.body.nodes for lab in made.labs.values() for one in lab.log
            if isinstance(one.body, NodeTests)]


def open_notes(made: Cluster) -> list[str]:
    return [one.reason for one in made.labs[made.leader()].decision.incidents
            if one.fault == "check_failed" and one.state == "open"]


def reason(made: Cluster) -> str:
    return dict(made.labs[made.leader()].decision.reasons)["r"]


def requeued(made: Cluster, seconds: int = 1) -> None:
    """The run ended, and so many seconds later its launchers come anew."""
    doc = made.docs["run/r"]
    made.docs["run/r"] = Doc(doc.key, doc.version + 1, msgspec.json.encode(
        replace(made.plan(), finished=0)))
    made.step()
    made.leases.clear()
    made.heard.clear()
    for lab in made.labs.values():
        lab.log.clear()
    for _ in range(seconds):
        for lab in made.labs.values():
            lab.boot_s += 1.0
    for name in made.labs:
        returns(made, name)
        made.labs[name].restart_agent()


def test_without_the_setting_nobody_is_tested() -> None:
    made = fleet("abc", 3, world=World({"b": 0.0}), peers=())
    made.run(8)
    assert not rounds(made) and made.plan().generation == 1


def test_nodes_that_are_well_are_tested_once_and_start() -> None:
    made = fleet("abcd", 4)
    made.run(10)
    assert rounds(made) == [("a", "b", "c", "d")] and sorted(made.plan().members) == list("abcd")
    assert not open_notes(made) and not any(left(made, name) for name in "abcd")


@pytest.mark.parametrize("hurt", ["b", "c", "d"])
@pytest.mark.parametrize("kind", ["network", "compute", "broken"])
def test_a_hurt_node_is_named_with_evidence_and_the_rest_starts(hurt: str, kind: str) -> None:
    world = {"network": World({hurt: 0.5}), "compute": World(compute={hurt: 0.5}),
             "broken": World({hurt: 0.0})}[kind]
    made = fleet("abcd", 4, least=3, world=world)
    made.run(12)
    assert sorted(made.plan().members) == sorted(set("abcd") - {hurt})
    (why,) = left(made, hurt)
    assert f"{hurt} starts no run: check peers: " in why and "--ignore-check peers" in why
    (said,) = open_notes(made)
    assert said.startswith(f"{hurt} takes no ranks of it: check peers: ")
    assert "at the same moment" in said or f" - {hurt}" in said or f"{hurt} - " in said
    assert len(rounds(made)) == 1 and hurt not in made.plan().spares


def test_a_hurt_leader_lets_another_lead_who_believes_its_tests() -> None:
    made = fleet("abcd", 4, least=3, world=World({"a": 0.5}))
    made.run(30)  # a lease lasts 10 s
    assert made.leader() != "a" and sorted(made.plan().members) == ["b", "c", "d"]
    assert "a starts no run: check peers" in left(made, "a")[0] and len(rounds(made)) == 1
    assert made.plan().finished < 0


def test_where_every_node_is_needed_the_start_waits_and_a_mended_node_is_admitted() -> None:
    made = fleet("abcd", 4, world=World({"c": 0.5}), wait_s=600.0)
    made.run(8)
    assert "run/r" not in made.docs
    assert reason(made).startswith("waiting for nodes: 3 of 4 can take ranks; c: check peers: slow")
    assert len(rounds(made)) == 1
    becomes(made, World())
    made.run(int(AGAIN_S) + 6)
    assert sorted(made.plan().members) == list("abcd") and len(rounds(made)) == 2
    assert not open_notes(made) and not left(made, "c")


@pytest.mark.parametrize("least", [3, 4])
def test_of_a_broken_link_one_end_goes_where_enough_remain(least: int) -> None:
    made = fleet("abcd", 4, least=least, world=World({("b", "c"): 0.0}))
    made.run(12)
    assert sorted(made.plan().members) == (["a", "b", "d"] if least == 3 else list("abcd"))
    assert not any(left(made, name) for name in "abcd")
    (said,) = open_notes(made)
    assert "link b - c is broken" in said
    assert ("c takes no ranks" in said) == (least == 3) and len(rounds(made)) == 1


def test_a_slow_link_is_told_and_both_take_part() -> None:
    made = fleet("abcd", 4, least=2, world=World({("b", "c"): 0.5}))
    made.run(12)
    assert sorted(made.plan().members) == list("abcd")
    assert "link b - c is slow, both take part" in open_notes(made)[0]


def test_a_young_good_word_spares_the_tests_an_old_one_does_not() -> None:
    made = fleet("abc", 3)
    made.run(8)
    requeued(made)
    made.run(8)
    assert not rounds(made) and made.plan().generation == 2
    requeued(made, seconds=301)
    made.run(8)
    assert len(rounds(made)) == 1 and sorted(made.plan().members) == ["a", "b", "c"]


def test_who_was_hurt_is_tested_again_at_once_by_the_next_start() -> None:
    made = fleet("abcd", 4, least=3, world=World({"d": 0.0}))
    made.run(12)
    assert left(made, "d")
    becomes(made, World())
    requeued(made)
    made.run(10)
    assert len(rounds(made)) == 1 and sorted(made.plan().members) == list("abcd")


def test_a_broken_link_is_tested_again_by_the_next_start() -> None:
    made = fleet("abcd", 4, least=3, world=World({("b", "c"): 0.0}))
    made.run(12)
    requeued(made)
    made.run(12)
    assert len(rounds(made)) == 1 and sorted(made.plan().members) == ["a", "b", "d"]


def test_what_another_run_found_of_its_own_nodes_is_not_told_of_this_one() -> None:
    made = fleet("abc", 3)
    others = tuple("uvwxyz")
    hurt = tuple(Hurt(name, "slow", "slow", "look") for name in others)
    wall_s = 1e9 + made.labs["a"].boot_s + 1.0
    for number, found in enumerate((Found(others, wall_s, hurt[:1]), Found(others, wall_s, hurt))):
        key = f"tested/{others[number]}"
        made.docs[key] = Doc(key, 1, written((), found))
    made.run(10)
    assert sorted(made.plan().members) == list("abc") and not open_notes(made)
    assert not any(one.detector == "peers" or "common" in one.reason
                   for lab in made.labs.values() for one in lab.decision.incidents)


def test_tests_that_never_return_hold_up_nobody_for_longer_than_their_limit() -> None:
    made = fleet("abc", 3)
    made.labs["a"].hold = {"run_check"}
    made.run(int(LIMIT_S) - 4)
    assert "run/r" not in made.docs and "tested with each other" in reason(made)
    made.run(12)
    assert sorted(made.plan().members) == ["a", "b", "c"]
    (said,) = open_notes(made)
    assert said.startswith("tests between its nodes came to no result, and it starts: no outcome")


def test_a_node_that_dies_in_the_test_is_unknown_and_a_late_one_takes_part_untested() -> None:
    made = fleet("abcd", 4, least=3, world=World(dies={"b": 2}))
    made.dead.add("d")
    made.labs["a"].hold = {"run_check"}
    made.run(5)
    assert rounds(made) == [("a", "b", "c")]
    made.dead.discard("d")
    made.step()
    effect = next(one for one in made.labs["a"].log if isinstance(one.body, NodeTests))
    made.labs["a"].hold = set()
    made.labs["a"]._perform(effect)
    made.run(6)
    assert sorted(made.plan().members) == list("abcd") and len(rounds(made)) == 1
    assert "b is unknown, and takes part" in open_notes(made)[0]


def test_the_same_on_many_nodes_refuses_none_and_one_message_says_so() -> None:
    made = fleet("abcdefgh", 8, world=World(dict.fromkeys("bcd", 0.0)))
    made.run(12)
    assert sorted(made.plan().members) == list("abcdefgh")
    told = [one.reason for lab in made.labs.values() for one in lab.incidents.values()
            if "breaker is open" in one.reason]
    assert len(told) == 1 and "peers on 3 of 8 nodes" in told[0]


def test_who_is_told_to_ignore_it_starts_without_tests_and_it_is_written_down() -> None:
    made = fleet("abc", 3, world=World({"b": 0.0}), ignored_checks=("peers",),
                 ignore_reason="known, and mended tomorrow")
    made.run(8)
    assert not rounds(made) and sorted(made.plan().members) == ["a", "b", "c"]
    (one,) = [one for one in made.labs[made.leader()].decision.incidents
              if one.fault == "check_ignored"]
    assert "known, and mended tomorrow" in one.reason and one.state == "open"


def test_a_restart_in_place_makes_no_tests() -> None:
    made = fleet("abcd", 4, least=3, world=World({"d": 0.5}))
    made.run(12)
    first = made.plan()
    becomes(made, World({"b": 0.0}))
    node = next(name for name in first.members if name != made.leader())
    made.labs[node].kill(next(rank for rank, place in first.ranks if place == node))
    made.run(10)
    assert made.plan().generation == 2 and len(rounds(made)) == 1
    assert sorted(made.plan().members) == ["a", "b", "c"]


@pytest.mark.parametrize("age_s", [0, 400])
def test_a_node_that_joins_a_run_that_goes_on_is_judged_by_what_is_young(age_s: int) -> None:
    made = fleet("abcd", 4, least=3, world=World({"d": 0.5}))
    made.run(12)
    assert left(made, "d")
    made.labs["d"].log.clear()
    made.dead.add("d")
    made.run(age_s)
    returns(made, "d")
    made.labs["d"].restart_agent()
    made.run(8)
    plan = made.plan()
    assert bool(left(made, "d")) == (age_s == 0)
    assert ("d" in (*plan.members, *plan.spares)) == (age_s > 0)


def test_a_verdict_that_a_node_keeps_holds_it_up_only_where_no_test_is_made_anew() -> None:
    """As `holdfast check --peers` left it, or the tests of an earlier start."""
    made = fleet("abcd", 4, least=3)
    broken = CheckVerdict("peers", "critical", "broken with a and b", confirmed=True)
    for name, lab in made.labs.items():
        lab.settings = lab.node.settings = replace(lab.settings, gate=replace(
            lab.settings.gate, names=("devices",), disturbing=("peers",)))
        if name in "cd":
            lab.checks["peers"] = replace(broken, wall_s=1e9 + lab.boot_s)
    made.dead.add("d")
    made.run(10)
    assert sorted(made.plan().members) == ["a", "b", "c"] and len(rounds(made)) == 1
    returns(made, "d")
    made.run(8)
    assert "d starts no run: check peers: broken with a and b" in left(made, "d")[0]


def test_who_leads_after_the_tester_believes_what_it_wrote() -> None:
    made = fleet("abc", 3, least=2)
    while not rounds(made):
        made.step()
    while "tested/a" not in made.docs:
        made.step(0.1)
    assert "run/r" not in made.docs
    made.dead.add("a")
    made.lost.add("a")
    made.run(25)
    assert sorted(made.plan().members) == ["b", "c"] and len(rounds(made)) == 1


def of_run(found: Found, made: Cluster) -> None:
    """It is written down as what another node of the fleet found just now."""
    doc = made.docs.get("tested/z", Doc("tested/z", 0, b""))
    found = replace(found, wall_s=1e9 + made.labs["a"].boot_s)
    made.docs["tested/z"] = Doc(doc.key, doc.version + 1, written((), found))
    made.run(3)


def told(made: Cluster, words: str) -> int:
    """How often a person was told that, of whomever."""
    return sum(words in one.reason for lab in made.labs.values() for one in lab.incidents.values())


def test_what_was_said_to_an_earlier_launcher_is_over_when_another_comes() -> None:
    made = fleet("abcd", 4, least=2, world=World({("b", "c"): 0.5}))
    made.run(12)
    assert "link b - c is slow" in open_notes(made)[0]
    requeued(made)
    made.run(8)
    assert not rounds(made), "it is a young word, and spares the tests"
    assert not open_notes(made) and made.plan().generation == 2


def test_each_launcher_that_ignores_the_tests_is_written_down() -> None:
    made = fleet("abc", 3, ignored_checks=("peers",), ignore_reason="known", uid=7)
    made.run(8)
    requeued(made)
    made.run(8)
    assert made.plan().generation == 2 and told(made, "uid 7 asked for that: known") == 2


@pytest.mark.parametrize(("uid", "who"), [(0, "uid 0"), (7, "uid 7"), (-1, "its user")])
def test_it_is_written_down_who_asked_for_a_start_without_tests(uid: int, who: str) -> None:
    made = fleet("abc", 3, ignored_checks=("peers",), ignore_reason="known", uid=uid)
    made.run(8)
    assert told(made, f"without tests between its nodes; {who} asked for that: known") == 1


def test_nobody_is_named_for_what_was_found_before_this_launcher_came() -> None:
    """Its own tests speak, and until then nothing is said of anybody."""
    made = fleet("abcd", 4, least=3, world=World({"d": 0.0}))
    made.run(12)
    assert told(made, "d takes no ranks of it") == 1
    becomes(made, World())
    requeued(made)
    made.run(10)
    assert told(made, "d takes no ranks of it") == 1 and not open_notes(made)


def test_a_node_of_a_run_that_goes_on_is_named_each_time_that_it_is_found_hurt() -> None:
    made = fleet("abcd", 4)
    made.run(10)
    nodes, slow = tuple("abcd"), Hurt("d", "slow", "slow with a and b", "look")
    for times in (1, 2):
        of_run(Found(nodes, hurt=(slow,)), made)
        assert open_notes(made) == ["d takes part all the same: check peers: slow with a and b"]
        of_run(Found(nodes), made)
        assert not open_notes(made)
        assert told(made, "d takes part all the same") == times
    assert sorted(made.plan().members) == list("abcd") and made.plan().generation == 1
