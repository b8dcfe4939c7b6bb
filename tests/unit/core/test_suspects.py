"""Nodes that a fault puts under suspicion, tested before the next generation where that pays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fleet import World

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.checks.node_tests import Found
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.model import CheckVerdict, EffectOutcome, Incident, Request
from holdfast.agent.core.run import start_gate
from holdfast.agent.core.run.between import FIRST_S, added, suspects_of
from holdfast.agent.core.run.members import NodeDoc

from .driver import Cluster, Lab, replace
from .test_peer_gate import becomes, open_notes, rounds
from .test_peer_gate import fleet as gated

BOOKS = load_runbooks()
LIMIT_S = 20.0  # that the user set for a hang: then each costs more than the tests take
HURT = "c"


def fleet(names: str = "abcd", nnodes: int = 4, least: int = 3, world: World | None = None,
          limit_s: float = 30.0, **view: Any) -> Cluster:
    """A run that trains; the nodes are hurt from then on."""
    made = gated(names, nnodes, least=least, **{"hang_limit_s": LIMIT_S, **view})
    for lab in made.labs.values():
        lab.settings = lab.node.settings = replace(lab.settings, gate=replace(
            lab.settings.gate, suspects_limit_s=limit_s))
        lab.runbooks = lab.node.runbooks = BOOKS
    made.run(8)
    assert made.plan().generation == 1 and len(rounds(made)) == 1
    trains(made)
    becomes(made, world or World())
    for lab in made.labs.values():
        lab.log.clear()
    return made


def trains(made: Cluster, steps: int = 12) -> None:
    """Every rank does so many steps."""
    made.run(2)
    for _ in range(steps):
        for lab in made.labs.values():
            for rank in lab.view.ranks:
                if rank.state == "running":
                    done = max(rank.step, made.plan().resume.step)
                    lab.change(rank.rank, still_s=0.0, step=done + 1, step_time_s=1.0,
                               phase="forward_backward")
        made.step()


def stands(lab: Lab, phase: str) -> None:
    for rank in lab.view.ranks:
        if rank.state == "running":
            lab.change(rank.rank, phase=phase, still_s=rank.still_s + 1.0)


def hangs(made: Cluster, node: str = HURT) -> None:
    """One node's ranks stand still until the run is about to begin anew, and the others' leave;
    without a node all wait in a collective, and nothing tells them apart."""
    generation = made.plan().generation
    for _ in range(int(LIMIT_S) + 4):
        for name, lab in made.labs.items():
            stands(lab, "forward_backward" if name == node else "collective")
        made.step()
        cause = made.labs[made.leader()].node.cases["r"].state.cause
        if cause is not None:
            break
    assert cause is not None and (cause.fault, cause.node) == ("rank_hung", node)
    for name, lab in made.labs.items():
        for rank in lab.view.ranks:
            if name != node and rank.state == "running":
                lab.park(rank.rank, rank.step)
    for _ in range(4):
        made.step(0.5)
    assert rounds(made) or made.plan().generation == generation + 1


def told(made: Cluster, fault: str = "rank_hung") -> list[str]:
    """The timeline of the newest incident of a fault, wherever it was led."""
    found: list[Incident] = [one for lab in made.labs.values() for one in lab.incidents.values()
                             if one.fault == fault]
    return [text for _, text in max(found, key=lambda one: one.opened_wall_s).timeline]


def document(made: Cluster, node: str) -> NodeDoc:
    doc = made.docs.get(f"node/{node}")
    return msgspec.json.decode(doc.body, type=NodeDoc) if doc else NodeDoc()


@pytest.mark.parametrize("kind", ["slow", "broken", "computes wrong"])
def test_a_suspect_that_fails_is_excluded_and_the_others_go_on(kind: str) -> None:
    world = {"slow": World({HURT: 0.5}), "broken": World({HURT: 0.0}),
             "computes wrong": World(wrong=(HURT,))}[kind]
    made = fleet(world=world)
    hangs(made)
    made.run(4)
    assert rounds(made) == [("a", "b", "c", "d")]
    assert made.plan().generation == 2 and sorted(made.plan().members) == ["a", "b", "d"]
    doc = document(made, HURT)
    assert doc.excluded and doc.fault == "check_failed" and "c: check peers: " in doc.reason
    lines = "\n".join(told(made))
    assert "c, under suspicion, is tested with a, b, d: rank_hung cost 2" in lines, lines
    assert "in 1 time, tests take 15.0 s" in lines and "; it is excluded" in lines, lines
    assert open_notes(made)[-1].startswith("c takes no ranks of it: check peers: ")
    trains(made, 30)
    assert made.plan().generation == 2  # and it does not grow back


def test_a_suspect_that_passes_is_suspected_no_more_and_takes_part() -> None:
    made = fleet()
    hangs(made)
    made.run(4)
    assert made.plan().generation == 2 and sorted(made.plan().members) == list("abcd")
    assert "c passed its tests: it is under suspicion no more" in told(made)
    assert not document(made, HURT).excluded and not open_notes(made)
    assert not made.labs[made.leader()].node.kept.runs["r"].between.losses


@pytest.mark.parametrize("grade", ["trainer", "script"])
@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_rank_that_crashes_asks_for_no_test_however_often(grade: str, end: str) -> None:
    """And whatever it cost: each was worth a test, had it been a hang."""
    made = fleet(world=World({HURT: 0.0}), grade=grade, max_restarts=20)
    for _ in range(6):
        generation = made.plan().generation
        lab = made.labs[HURT]
        made.run(40)  # nobody makes a step
        if end == "killed":
            lab.kill(lab.view.ranks[0].rank)
        else:
            lab.raises(lab.view.ranks[0].rank, f"OSError: shard {generation}")
        for name, other in made.labs.items():
            for rank in other.view.ranks if name != HURT else ():
                if grade == "trainer":
                    other.park(rank.rank, rank.step)
                else:
                    other.raises(rank.rank, "RuntimeError: Connection closed by peer")
        for _ in range(20):
            made.step(0.1)
        assert made.plan().generation == generation + 1
        trains(made)
    assert not rounds(made) and not any("suspicion" in text for lab in made.labs.values()
                                        for one in lab.incidents.values()
                                        for _, text in one.timeline)


def test_while_the_fault_cost_less_than_the_tests_nobody_is_tested_and_it_is_said() -> None:
    made = fleet(hang_limit_s=2.0, world=World({HURT: 0.0}))
    made.labs["a"].node.kept.runs["r"].history.restarts_s = [1.0] * 16
    costs = []
    for _ in range(8):
        hangs(made)
        if rounds(made):
            break
        (line,) = [text for text in told(made) if "is not tested" in text]
        costs.append(line)
        made.run(2)
        trains(made)
    assert len(costs) > 1 and "in 1 time, tests take 15.0 s" in costs[0], costs
    assert f"in {len(costs)} times, tests take" in costs[-1], costs
    assert rounds(made) and document(made, HURT).excluded


def test_a_hang_that_names_nobody_has_all_of_its_nodes_tested() -> None:
    made = fleet(world=World({HURT: 0.0}))
    hangs(made, "")
    made.run(4)
    assert rounds(made) == [("a", "b", "c", "d")]
    assert sorted(made.plan().members) == ["a", "b", "d"] and document(made, HURT).excluded
    assert "d passed its tests: it is under suspicion no more" in told(made)


@pytest.mark.parametrize("least", [3, 4])
def test_of_a_broken_link_one_end_goes_where_one_is_to_spare(least: int) -> None:
    made = fleet(least=least, world=World({("b", "c"): 0.0}))
    hangs(made, "")
    made.run(4)
    left = ["a", "b", "d"] if least == 3 else list("abcd")
    assert made.plan().generation == 2 and sorted(made.plan().members) == left
    assert "link b - c is broken" in open_notes(made)[0]
    assert not any(document(made, node).excluded for node in "abcd")
    trains(made, 30)
    assert made.plan().generation == 2


def test_who_is_slow_takes_part_where_none_is_to_spare() -> None:
    made = fleet(least=4, world=World({HURT: 0.5}))
    hangs(made)
    made.run(4)
    assert sorted(made.plan().members) == list("abcd") and not document(made, HURT).excluded
    assert open_notes(made)[-1].startswith("c takes part all the same: check peers: slow")
    assert "it takes part, for none is to spare" in "\n".join(told(made))


def test_no_restart_waits_longer_than_the_limit_and_what_is_unknown_excludes_nobody() -> None:
    made = fleet(world=World({HURT: 0.0}), limit_s=16.0)
    made.labs["a"].hold = {"run_check"}
    hangs(made)
    began_s = made.labs["a"].boot_s
    while made.plan().generation == 1:
        made.step(0.5)
        assert made.labs["a"].boot_s - began_s < 18.0
    assert made.labs["a"].boot_s - began_s > 12.0
    assert sorted(made.plan().members) == list("abcd") and not document(made, HURT).excluded
    assert "the tests came to no result, and it goes on: no outcome in time" in told(made)
    trains(made)
    hangs(made)  # tests that were cut off are not worth another try
    assert len(rounds(made)) == 1
    assert ("c, under suspicion, is not tested: tests were cut off at 16 s, and may take no more"
            in told(made)), told(made)
    for lab in made.labs.values():
        lab.settings = lab.node.settings = replace(lab.settings, gate=replace(
            lab.settings.gate, suspects_limit_s=40.0))
    trains(made)
    hangs(made)
    assert len(rounds(made)) == 2  # with a longer limit they are


def test_tests_that_were_refused_cost_nothing_and_what_was_lost_counts_on() -> None:
    made = fleet(world=World({HURT: 0.0}))
    lab = made.labs["a"]
    perform, refused = lab._perform, []

    def refuses(effect: Any) -> None:
        if effect.kind == "run_check" and not refused:
            refused.append(effect)
            lab.outcomes.append(EffectOutcome(effect.id, False, "a is tested for run s: ask again"))
        else:
            perform(effect)

    lab._perform = refuses  # type: ignore[method-assign]
    hangs(made)
    made.run(4)
    assert refused and made.plan().generation == 2
    seen = made.labs["a"].node.kept.runs["r"].between
    assert [one.times for one in seen.losses if one.node == HURT] == [1] and not seen.took_s
    trains(made)
    hangs(made)
    made.run(4)
    assert "in 2 times, tests take 15.0 s" in "\n".join(told(made))
    assert document(made, HURT).excluded


def test_the_wait_for_nodes_begins_behind_the_tests() -> None:
    """Else tests that take longer than it ended the run in the step that they end in."""
    made = fleet("abcde", nnodes=4, least=4, limit_s=120.0, world=World({HURT: 0.0}),
                 gang_limit_s=30.0)
    made.dead.add("e")
    made.run(20)
    lab = made.labs["a"]
    perform, waiting = lab._perform, []
    lab._perform = lambda effect: (  # type: ignore[method-assign]
        waiting.append(effect) if effect.kind == "run_check" else perform(effect))
    hangs(made)
    made.run(40)
    assert waiting and made.plan().generation == 1
    perform(waiting[0])
    made.run(20)
    assert document(made, HURT).excluded and made.plan().finished < 0
    made.dead.discard("e")
    made.run(20)
    assert sorted(made.plan().members) == ["a", "b", "d", "e"]


def test_what_was_found_long_ago_excludes_nobody() -> None:
    """None was to spare then; now one is, and the node may have been mended in between."""
    made = fleet("abcde", least=4, world=World({HURT: 0.5}))
    made.dead.add("e")
    made.run(20)
    hangs(made)
    made.run(4)
    assert not document(made, HURT).excluded and HURT in made.plan().members
    becomes(made, World())
    trains(made)
    made.dead.discard("e")
    trains(made, 400)
    made.labs["a"].raises(0, "ValueError: a user's own")
    for name, lab in made.labs.items():
        for rank in lab.view.ranks if name != "a" else ():
            lab.park(rank.rank, rank.step)
    made.run(6)
    assert made.plan().generation > 2 and not document(made, HURT).excluded


def test_one_end_of_a_link_that_was_mended_comes_back_after_an_hour() -> None:
    made = fleet(world=World({("b", "c"): 0.0}))
    hangs(made, "")
    made.run(4)
    assert sorted(made.plan().members) == ["a", "b", "d"]
    becomes(made, World())
    trains(made, 60)
    assert made.plan().generation == 2
    for lab in made.labs.values():
        lab.boot_s += 3600.0
    trains(made, 60)
    assert sorted(made.plan().members) == list("abcd")


def test_what_was_found_by_a_clock_that_was_set_back_holds_nobody_out() -> None:
    made = fleet(least=4, world=World({HURT: 0.5}))
    hangs(made)
    made.run(4)
    (key,) = [one for one in made.docs if one.startswith("tested/")]
    (*_, old) = found = msgspec.json.decode(made.docs[key].body, type=tuple[Found, ...])
    made.docs[key] = replace(made.docs[key], version=made.docs[key].version + 1, body=(
        msgspec.json.encode(tuple(replace(one, wall_s=one.wall_s + 3600.0) for one in found))))
    lab = made.labs[made.leader()]
    made.step()
    now, observed = lab.node._seen  # type: ignore[misc]
    ctx = lab.node._context(now, observed, lab.view, [], [], [], {})
    assert old.hurt and not any(
        one.hurt for one in start_gate.tests_in_force(ctx, goes_on=True))


def test_of_two_hurt_nodes_the_one_that_the_breaker_keeps_takes_part() -> None:
    """What excludes the first, and so opens the breaker for the second, is written down first."""
    made = fleet("abcdef", nnodes=6, least=3, world=World({"c": 0.0, "d": 0.0}))
    made.docs["node/x"] = replace(made.docs["run/r"], key="node/x", version=1,
                                  body=msgspec.json.encode(NodeDoc(
                                      excluded=True, reason="slow", fault="check_failed",
                                      strikes=(1e9 + made.labs["a"].boot_s,))))
    hangs(made, "")
    made.run(6)
    out = [node for node in "cd" if document(made, node).excluded]
    kept = [node for node in "cd" if node not in out]
    assert any("not excluded, the breaker is open" in text for text in told(made)), told(made)
    assert len(out) == 1 and set(kept) <= set(made.plan().members)


def test_a_cause_is_weighed_once_though_its_node_was_started_anew() -> None:
    made = fleet(hang_limit_s=2.0, world=World({HURT: 0.0}))
    hangs(made)
    case = made.labs[made.leader()].node.cases["r"]
    weighed = case.state.between.losses
    assert weighed and case.state.recovery is not None
    case.new_boot(3.0)
    assert case.state.between.losses == weighed
    assert case.state.between.broken_boot_s == case.state.progress.broken_boot_s
    assert not case.state.between.suspects and not case.state.between.effect


def test_the_wait_for_tests_is_not_taken_for_the_cost_of_a_restart() -> None:
    made = fleet(limit_s=16.0)
    made.labs["a"].hold = {"run_check"}
    hangs(made)
    while made.plan().generation == 1:
        made.step()
    trains(made)
    (took_s,) = made.labs["a"].node.kept.runs["r"].history.restarts_s
    assert took_s < 8.0


def test_a_suspect_that_dies_in_the_test_is_unknown_and_takes_part() -> None:
    made = fleet(world=World(dies={HURT: 2}))
    hangs(made)
    made.run(4)
    assert sorted(made.plan().members) == list("abcd")
    assert "the tests leave c unknown: it takes part" in told(made)


@pytest.mark.parametrize("why", ["limit 0", "two nodes", "no setting", "ignored"])
def test_where_it_is_off_or_too_few_could_vouch_nobody_is_tested(why: str) -> None:
    small = why == "two nodes"
    made = fleet("ac" if small else "abcd", 2 if small else 4, 2 if small else 3,
                 World({HURT: 0.0}), limit_s=30.0 * (why != "limit 0"))
    for lab in made.labs.values():
        if why == "no setting":
            lab.settings = lab.node.settings = replace(
                lab.settings, gate=replace(lab.settings.gate, peers=()))
        elif why == "ignored":
            lab.view = replace(lab.view, ignored_checks=("peers",))
    hangs(made)
    made.run(4)
    assert not rounds(made) and made.plan().generation == 2
    assert sorted(made.plan().members) == (["a", "c"] if small else list("abcd"))


def test_while_the_breaker_is_open_nobody_is_excluded() -> None:
    made = fleet("abcd", world=World({HURT: 0.0}))
    for node in ("x", "y"):
        made.docs[f"node/{node}"] = replace(made.docs["run/r"], key=f"node/{node}", version=1,
                                            body=msgspec.json.encode(NodeDoc(
                                                excluded=True, reason="slow", fault="check_failed",
                                                strikes=(1e9 + made.labs["a"].boot_s,))))
    hangs(made)
    made.run(4)
    assert rounds(made) and not document(made, HURT).excluded
    assert any("not excluded, the breaker is open: " in text for text in told(made))
    assert sorted(made.plan().members) == list("abcd")


def test_a_world_that_keeps_a_hurt_node_grows_with_one_that_is_well() -> None:
    made = fleet("abcde", 5, world=World({HURT: 0.0}))
    for node in ("x", "y"):
        made.docs[f"node/{node}"] = replace(made.docs["run/r"], key=f"node/{node}", version=1,
                                            body=msgspec.json.encode(NodeDoc(
                                                excluded=True, reason="slow", fault="check_failed",
                                                strikes=(1e9 + made.labs["a"].boot_s,))))
    made.dead.add("e")
    made.lost.add("e")
    made.run(4)
    trains(made, 4)
    hangs(made)
    made.run(4)
    assert not document(made, HURT).excluded
    assert sorted(made.plan().members) == list("abcd")
    generation = made.plan().generation
    made.dead.clear()
    made.lost.clear()
    back = made.labs["e"]
    back.view = replace(back.view, ranks=(), generation=0, state="idle")
    trains(made, 60)
    assert sorted(made.plan().members) == list("abcde") and made.plan().generation > generation


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_release_counts_though_the_clocks_of_two_nodes_are_an_hour_apart(ahead_s: float) -> None:
    made = fleet(world=World({HURT: 0.5}))
    hangs(made)
    made.run(4)
    assert document(made, HURT).excluded
    becomes(made, World())
    made.labs["b"].wall_ahead_s = ahead_s
    made.labs["b"].requests = (Request("q", "release_node", "node/c", "mended"),)
    trains(made, 20)
    made.run(6)
    assert not document(made, HURT).excluded
    assert made.plan().generation == 3 and sorted(made.plan().members) == list("abcd")


@pytest.mark.parametrize("by", ["a person", "its own tests"])
def test_an_excluded_node_comes_back_once_it_is_released(by: str) -> None:
    made = fleet(world=World({HURT: 0.5}))
    hangs(made)
    made.run(4)
    assert document(made, HURT).excluded
    becomes(made, World())
    trains(made, 20)
    assert document(made, HURT).excluded  # the other checks prove nothing of it
    lab = made.labs[HURT]
    if by == "a person":
        made.labs["a"].requests = (Request("q", "release_node", "node/c", "mended"),)
    else:
        lab.checks["peers"] = CheckVerdict("peers", "ok", "well", wall_s=1e9 + lab.boot_s + 1.0)
    trains(made, 20)
    made.run(6)
    assert not document(made, HURT).excluded
    assert made.plan().generation == 3 and sorted(made.plan().members) == list("abcd")
    assert not any(one.body.checks for one in lab.log if one.kind == "run_check"
                   and "excluded for check_failed" in one.reason)


def test_who_leads_next_goes_on_where_the_leader_died_amid_the_tests() -> None:
    made = fleet(least=2)
    made.labs["a"].hold = {"run_check"}
    hangs(made)
    assert rounds(made)
    made.dead.add("a")
    made.lost.add("a")
    made.run(40)
    assert made.plan().generation >= 2 and sorted(made.plan().members) == ["b", "c", "d"]


def test_whom_a_cause_puts_under_suspicion() -> None:
    hung = Cause("rank_hung", 1, "it stands still", rank=2, node="c")
    assert suspects_of(hung, BOOKS, ()) == ("c",)
    for fault in ("rank_exited", "rank_killed", "rank_stopped", "node_lost", "launcher_lost",
                  "checkpoint_bad", "rank_oom_killed", "collective_mismatch"):
        assert suspects_of(replace(hung, fault=fault), BOOKS, ()) == ()
    asks = {"gpu_memory_error": replace(BOOKS["gpu_memory_error"], ladder=("run_check",))}
    assert suspects_of(replace(hung, fault="gpu_memory_error"), asks, ()) == ("c",)
    assert suspects_of(replace(hung, fault="gpu_memory_error"), BOOKS, ()) == ()
    nobody = replace(hung, node="", rank=-1, among=("b", "c"))
    assert suspects_of(nobody, BOOKS, ()) == ("b", "c")
    assert suspects_of(nobody, BOOKS, ("c", "d")) == ("c",)
    assert suspects_of(replace(hung, charged=False), BOOKS, ()) == ()


def test_losses_add_up_and_are_bounded() -> None:
    found = added((), ("a", "b"), 2.0)
    found = added(found, ("b",), 3.0)
    assert [(one.node, one.times, one.lost_s) for one in found] == [("a", 1, 2.0), ("b", 2, 5.0)]
    assert len(added(found, [f"n{number}" for number in range(99)], 1.0)) == 64
    assert FIRST_S > 0.0
