"""Where to cut a chain of pieces into pipeline stages, and what the schedule will idle: pure.

Owns the plan: dynamic programming over the largest stage, by time with memory as a limit or by
memory with time as the tie's judge, and the simulated schedule that says the bubble.  Must not
import torch: pieces come in as numbers, a plan goes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

PIECES_MAX, STAGES_MAX = 512, 64
SCHEDULES = ("simple", "interleaved")  # GPipe, 1F1B
GOALS = ("speed", "memory")


class NoPlan(ValueError):
    """The pieces cannot be cut so; the text says why and what to set."""


class Piece(NamedTuple):
    """One module of the model, in the order of execution; all that is for one micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    state_bytes: int  # parameters, gradients and what the optimizer keeps
    activation_bytes: int  # kept from the forward to the backward pass
    cut_bytes: int  # that a cut behind this piece would send on: every value that is used later
    shared: tuple[str, ...] = ()  # parameters that other pieces have as well
    weight_bytes: int = 0  # of its parameters alone


class Terms(NamedTuple):
    """What a plan is made for."""

    stages: int
    micro_batches: int
    schedule: str = "simple"
    goal: str = "speed"
    link_bytes_s: float = math.inf  # between two stages
    memory_bytes: float = math.inf  # of one rank
    speeds: tuple[float, ...] = ()  # by stage, of what the pieces' times are for; () = all 1


class Stage(NamedTuple):
    """Pieces first up to end: what one rank computes, keeps and sends."""

    first: int
    end: int
    forward_s: float  # the way of what it sends is in it, once each way
    backward_s: float
    memory_bytes: float
    send_bytes: int


class Plan(NamedTuple):
    """The cuts, and what they come to."""

    stages: tuple[Stage, ...]
    step_s: float  # of one optimizer step, by simulation
    bubble: float  # part of all stages' time in which they wait
    formula: float  # of equal stages: (stages - 1) / (micro-batches + stages - 1)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Each is the number of the first piece of a stage after the first."""
        return tuple(stage.first for stage in self.stages[1:])

    def describe(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """For the run's manifest."""
        return {
            "stages": [
                {"pieces": [piece.name for piece in pieces[one.first : one.end]],
                 "forward_ms": round(1e3 * one.forward_s, 3),
                 "backward_ms": round(1e3 * one.backward_s, 3),
                 "memory_bytes": int(one.memory_bytes), "send_bytes": one.send_bytes}
                for one in self.stages],
            "step_ms": round(1e3 * self.step_s, 3), "bubble": round(self.bubble, 4),
            "bubble_of_equal_stages": round(self.formula, 4)}

    def words(self) -> str:
        whole_s = sum(one.forward_s + one.backward_s for one in self.stages) or 1.0
        shares = "; ".join(
            f"{one.end - one.first} pieces, {100 * (one.forward_s + one.backward_s) / whole_s:.0f} "
            f"% of the work, {one.memory_bytes / 1e6:.1f} MB" for one in self.stages)
        return (f"pipeline of {len(self.stages)} stages ({shares}), expected bubble "
                f"{100 * self.bubble:.0f} % (equal stages: {100 * self.formula:.0f} %)")


class Costs:
    """Sums over runs of pieces, and which cuts may be made."""

    def __init__(self, pieces: Sequence[Piece], terms: Terms) -> None:
        self.pieces, self.terms = pieces, terms
        self.forward = _sums(piece.forward_s for piece in pieces)
        self.backward = _sums(piece.backward_s for piece in pieces)
        self.state = _sums(piece.state_bytes for piece in pieces)
        self.activations = _sums(piece.activation_bytes for piece in pieces)
        self.allowed = [True] * (len(pieces) + 1)  # a cut before piece i
        self.tied: dict[int, str] = {}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for number, piece in enumerate(pieces):
            for name in piece.shared:
                first.setdefault(name, number)
                last[name] = number
        for name, begin in first.items():
            for cut in range(begin + 1, last[name] + 1):
                self.allowed[cut], self.tied[cut] = False, name

    def stage(self, first: int, end: int, number: int) -> Stage:
        """`number` counts from the front.  What is in flight there is what its memory holds."""
        terms, pieces = self.terms, self.pieces
        flight = terms.micro_batches
        if terms.schedule == "interleaved":
            flight = min(flight, terms.stages - number)
        send = pieces[end - 1].cut_bytes if end < len(pieces) else 0
        receive = pieces[first - 1].cut_bytes if first else 0
        memory = (self.state[end] - self.state[first]
                  + flight * (self.activations[end] - self.activations[first] + receive))
        speed = terms.speeds[number] if terms.speeds else 1.0
        return Stage(
            first, end,
            (self.forward[end] - self.forward[first]) / speed + send / terms.link_bytes_s,
            (self.backward[end] - self.backward[first]) / speed + receive / terms.link_bytes_s,
            memory, send)

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        """What these cuts come to."""
        firsts = [0, *cuts, len(self.pieces)]
        return tuple(self.stage(first, end, number)
                     for number, (first, end) in enumerate(zip(firsts, firsts[1:])))

    def rank(self, stage: Stage) -> tuple[float, float]:
        """What is to be small: the goal, then the other; infinite where it does not fit."""
        time_s = stage.forward_s + stage.backward_s
        if stage.memory_bytes > self.terms.memory_bytes:
            return math.inf, math.inf
        if self.terms.goal == "memory":
            return stage.memory_bytes, time_s
        return time_s, stage.memory_bytes


def plan(pieces: Sequence[Piece], terms: Terms) -> Plan:
    """The best cuts.  Raises NoPlan.

    The largest stage's goal is exactly the least there is; among plans alike in that the one whose
    other measure is the least of those that the table met.  stages x pieces^2 / 2 steps."""
    if not 1 <= terms.stages <= min(STAGES_MAX, len(pieces)) or len(pieces) > PIECES_MAX:
        raise NoPlan(
            f"{terms.stages} stages of {len(pieces)} pieces: set 1 to "
            f"{min(STAGES_MAX, len(pieces))} stages")
    costs, count = Costs(pieces, terms), len(pieces)
    # best[j]: the least of the largest over pieces up to j, and where the last cut before j is.
    best = {0: ((0.0, 0.0), ())}
    for number in range(terms.stages):
        last, found = number == terms.stages - 1, dict[int, tuple[Any, Any]]()
        for end in [count] if last else range(number + 1, count):
            if not costs.allowed[end] and end != count:
                continue
            for first, (worst, cuts) in best.items():
                if first >= end:
                    continue
                mine = costs.rank(costs.stage(first, end, number))
                rank = max(worst[0], mine[0]), max(worst[1], mine[1])
                if end not in found or rank < found[end][0]:
                    found[end] = rank, (*cuts, first)
        best = found
    if count not in best or math.isinf(best[count][0][0]):
        raise NoPlan(_why_not(costs))
    return judged(costs.stages(best[count][1][1:]), terms)


def judged(stages: Sequence[Stage], terms: Terms) -> Plan:
    """These stages, with what the schedule makes of them."""
    step_s = simulate(stages, terms)
    busy = sum(stage.forward_s + stage.backward_s for stage in stages) * terms.micro_batches
    bubble = 1.0 - busy / (step_s * len(stages)) if step_s else 0.0
    return Plan(tuple(stages), step_s, bubble,
                (len(stages) - 1) / (terms.micro_batches + len(stages) - 1))


def _why_not(costs: Costs) -> str:
    terms, free = costs.terms, sum(costs.allowed[1 : len(costs.pieces)])
    if free < terms.stages - 1:
        names = sorted(set(costs.tied.values()))
        return (f"{terms.stages} stages need {terms.stages - 1} cuts, and {free} are free: "
                f"{', '.join(names[:3])} {'is' if len(names) == 1 else 'are'} shared by pieces on "
                "both sides of the others; set fewer stages, or untie what is shared")
    return (f"no cut into {terms.stages} stages keeps every one below "
            f"{terms.memory_bytes / 1e6:.0f} MB: set more stages, or fewer micro_batches")


def order(number: int, terms: Terms) -> list[tuple[bool, int]]:
    """What stage `number` does one after the other: (is forward, micro-batch)."""
    many = terms.micro_batches
    if terms.schedule == "simple":
        return [(True, one) for one in range(many)] + [(False, one) for one in range(many)]
    ahead = min(many, terms.stages - number)
    done = [(True, one) for one in range(ahead)]
    for one in range(many - ahead):
        done += [(False, one), (True, ahead + one)]
    return done + [(False, one) for one in range(many - ahead, many)]


def simulate(stages: Sequence[Stage], terms: Terms) -> float:
    """Seconds of one step: each stage does its list in order, as soon as its neighbour is done."""
    count = len(stages)
    todo = [order(number, terms) for number in range(count)]
    free_s, place = [0.0] * count, [0] * count
    done: dict[tuple[int, bool, int], float] = {}
    left = sum(map(len, todo))
    while left:
        before = left
        for number, stage in enumerate(stages):
            while place[number] < len(todo[number]):
                forward, one = todo[number][place[number]]
                ready_s = _ready(done, number, forward, one, count)
                if ready_s is None:
                    break
                took_s = stage.forward_s if forward else stage.backward_s
                free_s[number] = max(free_s[number], ready_s) + took_s
                done[number, forward, one] = free_s[number]
                place[number] += 1
                left -= 1
        if left == before:
            raise NoPlan(f"schedule {terms.schedule!r} waits for itself")
    return max(free_s)


def _ready(
    done: dict[tuple[int, bool, int], float], number: int, forward: bool, one: int, count: int
) -> float | None:
    """When the neighbour's part is there; None while it is not."""
    if forward:
        return done.get((number - 1, True, one)) if number else 0.0
    if number == count - 1:
        return done.get((number, True, one))
    return done.get((number + 1, False, one))


def _sums(values: Iterable[float]) -> list[float]:
    found = [0.0]
    for value in values:
        found.append(found[-1] + value)
    return found
