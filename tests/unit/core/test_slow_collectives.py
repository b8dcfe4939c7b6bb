"""Collectives that became slow are said, and what only looks like it is not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from holdfast.agent.core.detect.ranks.slow_collectives import FAULT
from holdfast.agent.core.model import GradientSum, Incident, Settings

from .driver import Cluster, Lab, replace

EACH = 100  # iterations between two that DDP measures
SIZE = 50_000_000
START = tuple(range(1, 11))  # DDP measures its first ten as well

Times = tuple[float, float]  # seconds of one rank: wait for the sums, compute


def show(
    lab: Lab, iteration: int, times: Sequence[Times], size: int = SIZE, in_all: bool = False,
) -> None:
    """What the ranks' pages hold behind one iteration that was measured."""
    for rank, (wait_s, compute_s) in enumerate(times):
        lab.change(rank, step=iteration, still_s=0.0, state="running", gradients=GradientSum(
            iteration, wait_s + 0.3 * compute_s, wait_s, compute_s, size, len(times), in_all))
    lab.step(EACH * 0.1)


def measure(
    lab: Lab, count: int, *times: Times, size: int = SIZE, in_all: bool = False,
) -> None:
    """So many measured iterations, each EACH behind the one before; noise of 5 %."""
    shown = lab.rank(0).gradients
    last = shown.iteration if shown and shown.iteration >= EACH else 0
    for number in range(1, count + 1):
        noise = 1.0 + 0.05 * (-1) ** number
        show(lab, last + number * EACH, [(w * noise, c / noise) for w, c in times], size,
             in_all)


def begun(**settings: object) -> Lab:
    """Two ranks whose first iterations are slower than those that count: nobody is warm."""
    lab = Lab(grade="script", settings=Settings(**settings) if settings else None)
    lab.begin()
    for iteration in START:
        show(lab, iteration, [(0.5, 0.4), (0.6, 0.4)])
    measure(lab, 5, (0.045, 0.20), (0.055, 0.19))
    return lab


def tickets(lab: Lab) -> list[Incident]:
    return [one for one in lab.incidents.values() if one.fault == FAULT]


def test_a_slow_link_is_a_ticket_that_closes_when_it_is_mended() -> None:
    lab = begun()
    measure(lab, 20, (0.046, 0.20), (0.055, 0.19))
    assert not tickets(lab)
    measure(lab, 4, (0.090, 0.20), (0.099, 0.19))
    assert not tickets(lab)  # four late steps are no state yet
    measure(lab, 1, (0.090, 0.20), (0.099, 0.19))
    (ticket,) = tickets(lab)
    assert (ticket.state, ticket.severity, ticket.culprit) == ("open", "warn", "culprit unknown")
    assert ticket.reason == (
        "collectives of run r take 2.0 times as long as in its first 500 steps since 01:54 UTC "
        "(step 2600): the rank that comes last waits 85.5 ms for its gradients, 42.7 ms then; "
        "compute is as before (211 ms, 211 ms)")
    (said,) = [one for one in lab.decision.verdicts if one.fault == FAULT]
    assert (said.detector, said.act, said.reason) == ("collectives", False, ticket.reason)
    assert len(lab.starts()) == 1 and not lab.finishes()  # nothing is done about it

    measure(lab, 10, (0.095, 0.20), (0.099, 0.19))
    assert len(tickets(lab)) == 1
    lab.restart_agent()  # what is known and what is open outlives it
    measure(lab, 1, (0.095, 0.20), (0.099, 0.19))
    assert [one.state for one in tickets(lab)] == ["open"]
    measure(lab, 5, (0.045, 0.20), (0.055, 0.19))
    assert [one.state for one in tickets(lab)] == ["closed"]
    assert "as fast as in its first steps again" in tickets(lab)[0].timeline[-1][1]
    assert not [one for one in lab.decision.verdicts if one.fault == FAULT]


def test_without_ddp_all_collectives_are_compared_and_the_words_say_so() -> None:
    lab = Lab(grade="script")
    lab.begin()
    measure(lab, 2, (0.001, 0.20), (0.001, 0.19), size=0)  # DDP's own, of a moment
    measure(lab, 5, (0.045, 0.20), (0.055, 0.19), size=0, in_all=True)
    pace = lab.node.paces()["r"]
    assert (len(pace.first), pace.bandwidth) == (5, 0.0)  # none is mixed with another
    measure(lab, 5, (0.090, 0.20), (0.099, 0.19), size=0, in_all=True)
    (ticket,) = tickets(lab)
    assert "waits 85.5 ms for its collectives in a step, 42.7 ms then" in ticket.reason
    lab.restart_agent()
    measure(lab, 5, (0.045, 0.20), (0.055, 0.19), size=0, in_all=True)
    assert [one.state for one in tickets(lab)] == ["closed"]
    mixed = lab.rank(0).gradients
    assert mixed is not None
    before = lab.node.paces()["r"]
    lab.change(0, gradients=replace(mixed, iteration=mixed.iteration + EACH))
    lab.change(1, gradients=replace(mixed, iteration=mixed.iteration + EACH, in_all=False))
    lab.step(1.0)
    assert lab.node.paces()["r"] == before


@pytest.mark.parametrize(("what", "times"), [
    ("one rank computes slowly, and the others wait for it", ((0.30, 0.20), (0.05, 0.45))),
    ("one rank computes a little slower", ((0.105, 0.20), (0.05, 0.24))),
    ("every rank computes slowly", ((0.045, 0.40), (0.055, 0.39))),
    ("a longer batch", ((0.045, 0.60), (0.055, 0.58))),
    ("a longer batch on a machine that is busier", ((0.100, 0.60), (0.110, 0.58))),
    ("a shorter batch, which hides less of the same sums", ((0.105, 0.13), (0.115, 0.12))),
    ("a little slower", ((0.058, 0.20), (0.070, 0.19))),
])
def test_what_is_no_slower_collective_is_not_said(what: str, times: tuple[Times, ...]) -> None:
    lab = begun()
    measure(lab, 15, *times)
    assert not tickets(lab), what


def test_waits_that_cost_nothing_are_not_said() -> None:
    lab = Lab(grade="script")
    lab.begin()
    measure(lab, 5, (0.0005, 0.20), (0.0006, 0.19))
    measure(lab, 15, (0.002, 0.20), (0.0025, 0.19))  # four times as long, and 1 % of a step
    assert not tickets(lab)


def test_a_first_window_with_as_late_steps_in_it_is_no_measure() -> None:
    lab = Lab(grade="script")
    lab.begin()
    measure(lab, 4, (0.045, 0.20), (0.055, 0.19))
    measure(lab, 1, (0.200, 0.20), (0.210, 0.19))
    measure(lab, 15, (0.090, 0.20), (0.099, 0.19))
    assert not tickets(lab)


def test_other_gradients_are_measured_anew() -> None:
    lab = begun()
    measure(lab, 15, (0.090, 0.20), (0.099, 0.19), size=2 * SIZE)
    assert not tickets(lab)


def test_old_iterations_and_those_of_a_part_of_the_world_teach_nothing() -> None:
    lab = begun()
    before = lab.node.paces()["r"]
    shown = lab.rank(0).gradients
    assert shown is not None
    slow = replace(shown, iteration=shown.iteration + EACH, wait_s=0.3, sum_s=0.4)
    for bad in (
        (slow, shown),  # the other shows what was taken already
        (replace(slow, world=1), replace(slow, world=1)),  # each sums alone
        (slow, None), (slow, replace(slow, wait_s=-1.0)), (slow, replace(slow, sum_s=1e9)),
    ):
        lab.change(0, gradients=bad[0])
        lab.change(1, gradients=bad[1])
        lab.step(1.0)
        assert lab.node.paces()["r"] == before


def test_a_new_generation_is_compared_once_it_is_warm() -> None:
    lab = begun()
    measure(lab, 8, (0.090, 0.20), (0.099, 0.19))
    assert [one.state for one in tickets(lab)] == ["open"]
    first = lab.node.paces()["r"].first
    lab.raises(1, "RuntimeError: no")
    lab.settle()
    assert lab.plan().generation == 2
    for iteration in START:
        show(lab, iteration, [(0.5, 0.4), (0.6, 0.4)])
    measure(lab, 4, (0.045, 0.20), (0.055, 0.19))
    assert [one.state for one in tickets(lab)] == ["open"]  # nobody knows better yet
    measure(lab, 1, (0.045, 0.20), (0.055, 0.19))
    assert lab.node.paces()["r"].first == first
    assert [one.state for one in tickets(lab)] == ["closed"]


def test_the_local_collectives_are_checked_in_the_next_gap_where_that_is_wanted() -> None:
    gate = msgspec.structs.replace(Settings().gate, between=("collectives",))
    lab = begun(gate=gate)
    lab.raises(1, "RuntimeError: no")
    asked = lab.settle()
    assert not [one for one in asked if one.kind == "run_check"]  # no reason to
    measure(lab, 10, (0.045, 0.20), (0.055, 0.19))
    measure(lab, 5, (0.090, 0.20), (0.099, 0.19))
    assert tickets(lab)
    lab.raises(1, "RuntimeError: no")
    (check,) = [one for one in lab.settle() if one.kind == "run_check"]
    assert check.body.checks == ("collectives",)  # type: ignore[union-attr]
    assert lab.plan().generation == 3


def test_over_nodes_only_who_leads_says_it() -> None:
    cluster = Cluster("ab", nnodes=2, grade="script")
    cluster.run(5)
    labs = list(cluster.labs.values())

    def measured(iteration: int, wait_s: float) -> None:
        for lab in labs:
            (rank,) = lab.view.ranks
            lab.change(rank.rank, step=iteration, gradients=GradientSum(
                iteration, wait_s + 0.05, wait_s, 0.2, SIZE, 2))
        cluster.run(2)

    for number in range(1, 6):
        measured(number * EACH, 0.05)
    for number in range(6, 12):
        measured(number * EACH, 0.15)
    assert {lab.name: len(tickets(lab)) for lab in labs} == {
        "a": int(cluster.leader() == "a"), "b": int(cluster.leader() == "b")}
    assert all(lab.node.paces()["r"].is_known for lab in labs)  # who leads next knows it too
