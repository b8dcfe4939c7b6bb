"""When a pipeline is to be cut anew because one of its ranks has become slow or fast again: pure.

Owns the decision: each rank's seconds of computing go in, step by step, other cuts or none come
out.  Every rank gives the same numbers and so comes to the same answer without asking.  Must not
import torch, read a clock or talk; what moves and how is trainer/move.py's.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .partition import Costs, NoPlan, Piece, Terms, judged, plan

SKIPPED = 2  # steps behind a beginning: memory is touched for the first time
WINDOW, QUARTER = 8, 2  # steps whose median is what a rank takes; and a quarter of them
SLOW = 0.8  # of the fastest stage's speed: below it a stage is slow
PATIENCE = 8  # steps in a row for which it has to be so
GAIN = 0.1  # of a step, at least
HORIZON_STEPS = 100  # within which what is won must exceed what the move costs
PAUSE_STEPS, PAUSE_MAX = 20, 1280  # from a move to the next; doubled with every one


class Measured(NamedTuple):
    """What the pieces cost while the model was cut so, when that was measured first."""

    cuts: tuple[int, ...]
    scale: tuple[float, ...]  # by stage: seconds measured by those of the table


class Decided(NamedTuple):
    """Other cuts, or the present ones where none is better by enough."""

    cuts: tuple[int, ...]
    times: float  # the throughput that is expected, by the present one
    rank: int  # the slowest one
    speed: float  # of its stage, by the fastest stage's


class Balance:
    """One generation's ranks.  `stage_of` gives each rank's stage, `home` is the table's own cut,
    `cost_s` what a move is expected to take."""

    def __init__(
        self, pieces: Sequence[Piece], terms: Terms, stage_of: Sequence[int],
        cuts: Sequence[int], home: Sequence[int], cost_s: float,
        measured: Measured | None = None, moves: int = 0,
    ) -> None:
        self.pieces, self.terms, self.stage_of = tuple(pieces), terms, tuple(stage_of)
        self.home, self.cost_s = tuple(home), cost_s
        self.measured, self.moves = measured, moves
        self.since = 0 if moves else PAUSE_MAX  # steps since the last move
        self.silent = 0  # steps in which it is not said again that nothing can be gained
        self._begin(cuts)

    def _begin(self, cuts: Sequence[int]) -> None:
        self.cuts, self.skip, self.faster = tuple(cuts), SKIPPED, 0
        self.recent: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._calm()

    def _calm(self) -> None:
        self.word, self.streak, self.look_at = "", 0, PATIENCE
        self.looked: tuple[float, ...] = ()

    def moved(self, cuts: Sequence[int], cost_s: float) -> None:
        """They are in force, and going over to them took so long.  With the present ones: it was
        tried and left."""
        self.moves, self.since, self.cost_s = self.moves + 1, 0, max(cost_s, 0.0)
        self._begin(cuts)

    def pause(self) -> int:
        """Steps from the last move to the next one."""
        return min(PAUSE_MAX, PAUSE_STEPS * 2 ** min(self.moves - 1, 16)) if self.moves else 0

    def after_step(self, seconds: Sequence[float], left: int) -> Decided | None:
        """`seconds` that each rank computed for a micro-batch of this step; `left` steps follow."""
        self.since, self.silent = self.since + 1, max(0, self.silent - 1)
        if self.skip:
            self.skip -= 1
            return None
        self.recent.append(tuple(seconds))
        if len(self.recent) < WINDOW or min(self.recent[-1]) <= 0.0:
            return None
        times = [sorted(column) for column in zip(*self.recent)]
        took = [statistics.median(column) for column in times]
        by_stage = self._by_stage(took)
        if self.measured is None:
            # Copies of a stage compute the same: the fastest one says what it costs.
            self.measured = Measured(self.cuts, tuple(
                min(several) / (whole or 1.0)
                for several, whole in zip(by_stage, self._seconds(self.pieces))))
        expected = self._seconds(self.known_pieces())
        speeds = self._speeds(expected, took)
        if self._was_slow(speeds):
            return None
        # Slow is what is so when its better steps are set against the others' worse ones.
        better, worse = (self._speeds(expected, [column[at] for column in times])
                         for at in (QUARTER, WINDOW - 1 - QUARTER))
        return self._judge(speeds, min(better) < SLOW * max(worse), took, left)

    def _by_stage(self, took: Sequence[float]) -> list[list[float]]:
        return [[took[rank] for rank, stage in enumerate(self.stage_of) if stage == number]
                for number in range(self.terms.stages)]

    def _speeds(self, expected: Sequence[float], took: Sequence[float]) -> list[float]:
        """By stage; copies wait for the slowest one."""
        return [one / max(several) for one, several in zip(expected, self._by_stage(took))]

    def _was_slow(self, speeds: list[float]) -> bool:
        """Whether a stage is faster than it was when it was measured first, and not all are, as on
        a machine that was busy then.  After long enough that is what its pieces cost."""
        assert self.measured is not None
        usual = max(1.0, statistics.median(speeds))
        if self.cuts != self.measured.cuts or max(speeds) * SLOW < usual:
            self.faster = 0
            return False
        self.faster += 1
        if self.faster == PATIENCE:
            self.measured = Measured(self.cuts, tuple(
                scale / (speed if speed * SLOW >= usual else 1.0)
                for scale, speed in zip(self.measured.scale, speeds)))
            self.faster = 0
            self._calm()
        return True

    def _judge(
        self, speeds: list[float], slow: bool, took: list[float], left: int
    ) -> Decided | None:
        fastest = max(speeds)
        shares = tuple(speed / fastest for speed in speeds)
        if self.looked and any(not SLOW < now / then < 1 / SLOW
                               for now, then in zip(shares, self.looked)):
            self._calm()  # it is not as it was when nothing better was found
        word = "slow" if slow else "away" if self.cuts != self.home else ""
        if word != self.word:
            self._calm()
            self.word = word
        self.streak += 1
        if not word or self.streak < self.look_at or self.since < self.pause():
            return None
        # A plan may take a second: it is made anew only ever more seldom while nothing changes.
        self.look_at, self.looked = 2 * self.streak, shares
        stage = shares.index(min(shares))
        rank = max((one for one, number in enumerate(self.stage_of) if number == stage),
                   key=lambda one: took[one])
        found = self._better(speeds, left)
        if found is None:
            if word != "slow" or self.silent:
                return None
            self.silent = HORIZON_STEPS
            return Decided(self.cuts, 1.0, rank, shares[stage])
        return Decided(found[0], found[1], rank, shares[stage])

    def _better(self, speeds: list[float], left: int) -> tuple[tuple[int, ...], float] | None:
        """Other cuts and what they gain, if that is worth the move."""
        pieces, terms = self.known_pieces(), self.terms._replace(speeds=tuple(speeds))
        costs, others = Costs(pieces, terms), [self.home]
        if self.word == "slow":
            with contextlib.suppress(NoPlan):  # none in this memory
                others.insert(0, plan(pieces, terms).cuts)
        steps_s = {cuts: judged(costs.stages(cuts), terms).step_s for cuts in others
                   if self._room(costs, cuts)}
        if not steps_s:
            return None
        cuts = min(steps_s, key=lambda one: steps_s[one])
        now_s, then_s = judged(costs.stages(self.cuts), terms).step_s, steps_s[cuts]
        gain_s = now_s - then_s
        if gain_s < GAIN * now_s or gain_s * min(left, HORIZON_STEPS) <= self.cost_s:
            return None
        return cuts, now_s / then_s

    def _room(self, costs: Costs, cuts: tuple[int, ...]) -> bool:
        """Whether each rank has memory for its new stage and, while things move, the state of the
        old one."""
        for now, then in zip(costs.stages(self.cuts), costs.stages(cuts)):
            old = costs.state[now.end] - costs.state[now.first]
            if then.memory_bytes + old > self.terms.memory_bytes:
                return False
        return True

    def known_pieces(self) -> tuple[Piece, ...]:
        """The table's, in seconds as they were measured."""
        if self.measured is None:
            return self.pieces
        edges, found = [0, *self.measured.cuts, len(self.pieces)], list[Piece]()
        for scale, first, end in zip(self.measured.scale, edges, edges[1:]):
            found += [piece._replace(forward_s=piece.forward_s * scale,
                                     backward_s=piece.backward_s * scale)
                      for piece in self.pieces[first:end]]
        return tuple(found)

    def _seconds(self, pieces: Sequence[Piece]) -> list[float]:
        """Of each present stage's computing, without what it sends."""
        alone = Costs(pieces, self.terms._replace(link_bytes_s=math.inf, speeds=()))
        return [one.forward_s + one.backward_s for one in alone.stages(self.cuts)]

