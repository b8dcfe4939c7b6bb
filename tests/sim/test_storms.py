"""The real core under storms: every invariant over many seeds, and what dropped wake-ups cost.

HOLDFAST_SIM_SEEDS (default 1,000) is how many seeds the default storm gets, HOLDFAST_SIM_PROCESSES
(default 2) over how many processes.  Each other storm gets an eighth, those of large worlds a
twenty-fifth: together more than 2,000 worlds of several nodes and 750 of one, and `make storms`
runs twice as many.
"""

from __future__ import annotations

import os
from dataclasses import replace

import frozen
import pytest

from holdfast.agent.core.model import Effect, NodeTests
from holdfast.agent.simulate import STORMS, Report, run_storm
from holdfast.agent.simulate.__main__ import main, run_seeds
from holdfast.agent.simulate.cluster import Cluster, Shape
from holdfast.agent.simulate.edge import Edge
from holdfast.agent.simulate.run import shape_of

SEEDS = int(os.environ.get("HOLDFAST_SIM_SEEDS", "1000"))
PROCESSES = int(os.environ.get("HOLDFAST_SIM_PROCESSES", "2"))
SHOWN = 3
LARGE = ("devices", "fleet", "suspects")  # a seed of these takes as long as two to four others


def seeds_of(storm: str, of_default: int = SEEDS) -> int:
    """How many seeds a storm gets, where the default storm gets so many."""
    if storm == "default":
        return of_default
    return of_default // (25 if storm in LARGE else 8) + 1


def assert_all_hold(reports: list[Report]) -> None:
    bad = [report for report in reports if not report.ok]
    assert not bad, f"{len(bad)} of {len(reports)} seeds\n\n" + "\n\n".join(
        report.text() for report in bad[:SHOWN]
    )


@pytest.mark.parametrize("storm", sorted(STORMS))
def test_every_invariant_holds_and_nothing_behaves_in_another_way(storm: str) -> None:
    """A change that is meant writes the digests anew (tests/sim/frozen.py) and says why."""
    seeds = seeds_of(storm)
    judged = frozen.judge(range(frozen.SEEDS), storm, PROCESSES)
    assert_all_hold([report for report, _ in judged])
    assert frozen.changed(storm, [digest for _, digest in judged]) == []
    assert_all_hold(run_seeds(range(frozen.SEEDS, seeds), storm, PROCESSES))


def test_more_than_2000_seeds_are_worlds_of_several_nodes_and_750_of_one() -> None:
    nodes = [shape_of(seed, storm).nodes
             for storm in STORMS for seed in range(seeds_of(storm, 1000))]
    assert sum(many > 1 for many in nodes) > 2000
    assert nodes.count(1) > 750


@pytest.mark.parametrize("shape", [Shape(1, 0, 1, 2), Shape(2, 1, 1, 1)], ids=["one", "many"])
def test_dropped_wake_ups_cost_only_latency(shape: Shape) -> None:
    """The same seed with every wake-up, with half and with none ends the same way.

    A first generation that starts a second later may not be there yet when a kill was drawn: one
    generation for the start and one for each kill that found its rank, however it was noticed.
    """
    for seed in range(max(10, SEEDS // 100)):
        reports = [run_storm(seed, "calm", shape=shape, dropped_wakes=d) for d in (0.0, 0.5, 1.0)]
        assert_all_hold(reports)
        ends = [report.outcomes for report in reports]
        assert ends[0] == ends[1] == ends[2], f"seed {seed}: {ends}"
        extra = [report.generations - report.struck for report in reports]
        assert extra == [1, 1, 1], f"seed {seed}: generations beyond the kills {extra}"


def test_crashes_ask_for_no_tests_between_nodes_and_ranks_that_stand_still_do() -> None:
    asked: list[tuple[str, ...]] = []

    def watch(cluster: Cluster) -> None:
        def left(_: Edge, effect: Effect) -> None:
            if isinstance(effect.body, NodeTests) and effect.body.suspects:
                asked.append(effect.body.suspects)

        for edge in cluster.edges.values():
            edge.on_effect = left

    kind = STORMS["suspects"]
    crashes = replace(kind, name="crashes", weights={"rank_killed": 2.0, "rank_exited": 1.0})
    seeds = range(max(10, SEEDS // 80))
    assert_all_hold([run_storm(seed, crashes, hook=watch) for seed in seeds])
    assert not asked
    assert_all_hold([run_storm(seed, kind, hook=watch) for seed in seeds])
    assert len(asked) >= len(seeds) / 2


def test_storms_hold_on_ticks_alone() -> None:
    """With every wake-up dropped all invariants hold, liveness among them."""
    for seed in range(max(20, SEEDS // 50)):
        assert_all_hold([run_storm(seed, "default", dropped_wakes=1.0)])


def test_a_large_world_runs() -> None:
    """Thirty-two nodes, one trainer over 24 of them."""
    report = run_storm(1, "calm", shape=Shape(24, 8, 1, 1))
    assert_all_hold([report])
    assert report.outcomes == {"run-0": "progress"}
    assert 0.3 < report.ettr <= 1.0


def test_the_command_prints_totals_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3", "--storm", "calm", "--json"]) == 0
    assert '"seeds": 3' in capsys.readouterr().out
    assert main(["--seed", "2", "--storm", "calm", "--trace"]) == 0
    assert "begins at step 0 from fresh" in capsys.readouterr().out
