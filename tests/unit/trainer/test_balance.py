"""When a pipeline is cut anew: noise, hysteresis, cost, pauses, and what the others come to."""

from __future__ import annotations

import random

import pytest

from holdfast.trainer.engines import balance
from holdfast.trainer.engines.balance import PATIENCE, SKIPPED, WINDOW, Balance, Measured
from holdfast.trainer.engines.partition import Costs, Piece, Terms, judged, plan

BLOCKS, STAGES = 24, 4
PIECES = [Piece(f"block.{n}", 1e-6, 2e-6, 4_000_000, 1000, 1000) for n in range(BLOCKS)]
TERMS = Terms(STAGES, 16, "interleaved", "speed", 1e12)
HOME = plan(PIECES, TERMS).cuts
REAL = 5000.0  # seconds by those of the table
SOON = SKIPPED + 2 * WINDOW + PATIENCE


class World:
    """Ranks of a pipeline whose speeds are set; goes over to whatever it is told to."""

    def __init__(self, pipelines=1, pieces=PIECES, terms=TERMS, noise=0.0, seed=0, **named):
        self.stage_of = list(range(STAGES)) * pipelines
        self.speeds = [1.0] * len(self.stage_of)
        self.pieces, self.noise, self.draw = pieces, noise, random.Random(seed)
        self.balance = Balance(pieces, terms, self.stage_of, HOME, HOME,
                               named.pop("cost_s", 0.5), **named)
        self.step, self.told = 0, []

    def seconds(self):
        edges = [0, *self.balance.cuts, len(self.pieces)]
        alone = [REAL * sum(p.forward_s + p.backward_s for p in self.pieces[a:b])
                 for a, b in zip(edges, edges[1:], strict=False)]
        return [alone[stage] / speed * max(0.1, self.draw.gauss(1.0, self.noise))
                for stage, speed in zip(self.stage_of, self.speeds, strict=True)]

    def steps(self, count, left=10_000):
        for _ in range(count):
            self.step += 1
            found = self.balance.after_step(self.seconds(), left)
            if found is not None:
                self.told.append((self.step, found))
                if found.cuts != self.balance.cuts:
                    self.balance.moved(found.cuts, 0.5)
        return self.moves()

    def moves(self):
        return [one for one in self.told if one[1].times > 1.0]


def sizes(cuts):
    edges = [0, *cuts, BLOCKS]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


def test_a_slow_rank_is_named_and_gets_as_much_less_as_it_is_slower():
    world = World()
    assert not world.steps(50) and sizes(HOME) == [6, 6, 6, 6]
    world.speeds[2] = 0.5
    ((step, found),) = world.steps(SOON)
    assert found.rank == 2 and found.speed == pytest.approx(0.5)
    assert WINDOW // 2 < step - 50 <= WINDOW + PATIENCE
    # 24 blocks at speeds 1, 1, 0.5, 1: 7 of 8 parts of 6.86 blocks' time.
    assert sizes(found.cuts) == [7, 7, 3, 7]
    # As the model of the schedule has it: the slowest stage takes 12 blocks' time, then 7.
    before, after = (judged(Costs(PIECES, TERMS._replace(speeds=(1, 1, 0.5, 1))).stages(cuts),
                            TERMS).step_s for cuts in (HOME, found.cuts))
    assert found.times == pytest.approx(before / after, rel=1e-3) and found.times > 1.5


def test_it_comes_back_when_the_rank_has_and_then_rests():
    world = World()
    world.steps(30)
    world.speeds[0] = 0.4
    ((first, _),) = world.steps(SOON)
    world.speeds[0] = 1.0
    _, (second, found) = world.steps(60)
    assert found.cuts == HOME and found.speed == pytest.approx(1.0)
    assert second - first >= balance.PAUSE_STEPS
    assert len(world.steps(2000)) == 2


def test_what_flaps_is_followed_ever_more_seldom():
    world, at = World(), []
    for turn in range(200):
        world.speeds[1] = 0.4 if turn % 2 == 0 else 1.0
        world.steps(30)
    at = [step for step, _ in world.moves()]
    pauses = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert all(pause >= min(balance.PAUSE_MAX, balance.PAUSE_STEPS * 2**n)
               for n, pause in enumerate(pauses)), pauses
    assert 3 <= len(at) <= 10, at  # of 200 turns, in 6000 steps


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_noise_moves_nothing(noise):
    for seed in range(5):
        world = World(pipelines=2, noise=noise, seed=seed)
        assert not world.steps(1000), (seed, world.told)


def test_a_slow_rank_is_found_in_noise():
    for seed in range(10):
        world = World(pipelines=2, noise=0.15, seed=seed)
        world.steps(40)
        world.speeds[6] = 0.5  # stage 3 of the second pipeline
        ((step, found),) = world.steps(40)
        assert found.rank == 6 and step <= 40 + SOON
        assert sizes(found.cuts)[2] in (3, 4)


def test_a_spike_is_none_and_neither_is_what_all_suffer():
    world = World()
    world.steps(30)
    world.speeds[3] = 0.1
    world.steps(WINDOW // 2 - 1)
    world.speeds[3] = 1.0
    assert not world.steps(50)
    world.speeds = [0.3] * STAGES  # the machine is busy
    assert not world.steps(50)
    world.speeds = [1.0] * STAGES
    assert not world.steps(50) and not world.told


def test_what_does_not_pay_is_said_now_and_then_and_left():
    dear = World(cost_s=1e6)
    dear.steps(30)
    dear.speeds[2] = 0.5
    dear.steps(200)
    (_, found), *again = dear.told
    assert (found.times, found.rank) == (1.0, 2) and len(again) <= 1
    late = World(cost_s=2.0)  # a step takes 1.4 s
    late.steps(30)
    late.speeds[2] = 0.5
    assert not late.steps(200, left=1) and late.told  # one step cannot win that
    assert late.steps(200)  # many can, and it looks again, ever more seldom


def test_no_rank_is_given_more_than_it_has_memory_for():
    # A stage of 6 blocks has 24 MB of state, one of 7 has 28, and its old 24 while things move.
    world = World(terms=TERMS._replace(memory_bytes=50e6))
    world.steps(30)
    world.speeds[2] = 0.5
    assert not world.steps(100) and world.told
    world = World(terms=TERMS._replace(memory_bytes=60e6))
    world.steps(30)
    world.speeds[2] = 0.5
    assert world.steps(100)


def test_a_rank_that_was_slow_when_it_was_measured_first_is_not_taken_for_a_fast_one():
    world = World()
    world.speeds[1] = 0.5
    world.steps(30)
    world.speeds[1] = 1.0
    assert not world.steps(200) and not world.told
    world.speeds[1] = 0.5
    ((_, found),) = world.steps(SOON)
    assert sizes(found.cuts) == [7, 3, 7, 7]


def test_a_machine_that_was_busy_when_it_was_measured_hides_no_slow_rank():
    world = World()
    world.speeds = [0.6] * STAGES
    world.steps(SKIPPED + WINDOW)
    world.speeds = [1.0, 1.0, 0.5, 1.0]
    ((step, found),) = world.steps(SOON)
    assert found.rank == 2 and found.speed == pytest.approx(0.5) and step < SOON + WINDOW
    assert sizes(found.cuts) == [7, 7, 3, 7]


def test_beside_a_copy_it_is_seen_though_it_was_slow_from_the_start():
    world = World(pipelines=2)
    world.speeds[5] = 0.5  # stage 2 of the second pipeline
    ((step, found),) = world.steps(SOON)
    assert found.rank == 5 and sizes(found.cuts) == [7, 3, 7, 7]


def test_what_was_measured_outlives_a_generation():
    world = World()
    world.steps(30)
    world.speeds[2] = 0.5
    ((_, found),) = world.steps(SOON)
    told = world.balance.measured
    again = World(measured=Measured(*map(tuple, told)), moves=1)
    again.balance._begin(found.cuts)
    again.speeds[2] = 0.5
    assert not again.steps(200)  # as it was: nothing to do
    again.speeds[2] = 1.0
    ((_, found),) = again.steps(SOON)
    assert found.cuts == HOME


def test_every_rank_comes_to_the_same():
    """Of equal numbers, whatever was pickled or parsed on the way; and of no others."""
    import json

    one, other = World(noise=0.1, seed=3), World()
    for step in range(400):
        if step == 100:
            one.speeds[0] = 0.5
        if step == 250:
            one.speeds[0] = 1.0
        numbers = one.seconds()
        found = one.balance.after_step(numbers, 1000)
        same = other.balance.after_step(json.loads(json.dumps(numbers)), 1000)
        assert found == same
        if found and found.cuts != one.balance.cuts:
            one.told.append((step, found))
            for balanced in (one.balance, other.balance):
                balanced.moved(found.cuts, 0.5)
    assert len(one.told) == 2
