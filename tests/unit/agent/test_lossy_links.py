"""Who is lost where packets get lost, by seed and in virtual time: nobody who lives is accused, and
the dead are still known about as soon.

The model: pings over TCP each tenth of a second (among many nodes to the near ones, and each two
seconds to the others), where a lost packet holds up what comes behind it until it is sent again
(0.2 s, then twice as long each time); a question to a kernel and its answer are one packet each
way.  Observers stand still now and then, and count no tick meanwhile.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from holdfast.agent.peers.beats import SEND_S
from holdfast.agent.peers.choice import NEAR, near
from holdfast.agent.peers.conversation import PING_S
from holdfast.agent.peers.failure_detector import FailureDetector
from holdfast.agent.peers.kernel_questions import (
    CLOSED_GAP_S,
    CLOSED_LEAST,
    CLOSED_MOST,
    PROBE_GAP_S,
    PROBE_S,
    PROBES,
    Answer,
    KernelQuestions,
    Way,
)

RTO_S = 0.2
FAR_TICKS = 20
Answers = tuple[list[Answer], list[Answer]]  # of the closed port, and of the agent's own


class Network:
    """Agents that ping each other, and what becomes of it."""

    def __init__(self, seed: int, count: int, loss: float, starved: float = 0.0) -> None:
        """`loss`: of the packets of each way between two nodes.  `starved`: how often a second an
        observer stands still, for up to three."""
        self.random, self.loss, self.starved = random.Random(seed), loss, starved
        self.now_s, self.ticks = 0.0, 0
        self.dead: frozenset[int] = frozenset()
        self.nodes = range(count)
        self.detectors = [FailureDetector() for _ in self.nodes]
        self.questions = [KernelQuestions() for _ in self.nodes]
        self.near: list[set[str]] = []
        self.cut: set[tuple[int, int]] = set()
        self.questions_to: Counter[int] = Counter()
        for own, detector in enumerate(self.detectors):
            others = [f"{other:03}" for other in self.nodes if other != own]
            detector.watch(others)
            self.near.append(set(near(f"{own:03}", others)))
        self.frozen_s = [0.0] * count  # until when
        self.pairs = [(a, b) for a in self.nodes for b in self.nodes if a != b]
        self.blocked = dict.fromkeys(self.pairs, (0.0, RTO_S))  # (until when, the next wait)
        self.asked: dict[tuple[int, int], tuple[float, Answers]] = {}
        self.false: list[tuple[float, int, int]] = []
        self.known_s: dict[tuple[int, int], float] = {}  # (observer, dead one) -> held lost, when

    def step(self) -> None:
        self.now_s += PING_S
        self.ticks += 1
        for own in self.nodes:
            if own in self.dead or self.frozen_s[own] > self.now_s:
                continue
            if self.starved and self.random.random() < self.starved * PING_S:
                self.frozen_s[own] = self.now_s + self.random.uniform(0.2, 3.0)
                continue
            for name in self.detectors[own].tick():
                self._ask(own, int(name))
        for a, b in self.pairs:
            if (self.ticks + 7 * a + b) % self._every(a, b) == 0:
                self._ping(a, b)
        self._judge(self.now_s)
        self._answers()

    def _answers(self) -> None:
        """What is over before the next tick: its outcome, which the others hear at once."""
        for (own, other), (until_s, answers) in sorted(
            self.asked.items(), key=lambda one: one[1][0]
        ):
            is_over = until_s < self.now_s + PING_S and self.frozen_s[own] <= self.now_s
            if not is_over or own in self.dead:
                continue
            del self.asked[own, other]
            lives = self.questions[own].told(f"{other:03}", *answers)
            before = self.detectors[own].unreachable()
            if lives is not None:
                self.detectors[own].probed(f"{other:03}", lives)
            if self.detectors[own].unreachable() == before \
                    or self.detectors[own].accusers(f"{other:03}") >= NEAR:
                continue
            for second in self.nodes:
                if second != own and second not in self.dead:
                    self._ping(own, second)
            self._judge(until_s)

    def _every(self, a: int, b: int) -> int:
        return 1 if f"{b:03}" in self.near[a] else FAR_TICKS

    def _ping(self, a: int, b: int) -> None:
        if (a, b) in self.cut:
            return
        if a in self.dead or b in self.dead or self.frozen_s[a] > self.now_s:
            return
        until_s, wait_s = self.blocked[a, b]
        if until_s > self.now_s:
            return
        if self.random.random() < self.loss:
            self.blocked[a, b] = self.now_s + min(wait_s, SEND_S), 2 * wait_s
            return
        self.blocked[a, b] = 0.0, RTO_S
        if self.frozen_s[b] <= self.now_s:
            self.detectors[b].heard(
                f"{a:03}", self.detectors[a].unreachable(), self._every(a, b))
            self.questions[b].heard(f"{a:03}")

    def _ask(self, own: int, other: int) -> None:
        if (own, other) in self.asked:
            return
        self.questions_to[other] += 1
        closed, agent = self.questions[own].wanted(f"{other:03}")
        answers = (self._tries(own, other, closed, Answer.REFUSED),
                   self._tries(own, other, agent, Answer.TAKEN))
        took_s = max((len(tries) - 1) * gap_s + PROBE_S * (Answer.NONE in tries)
                     for tries, gap_s in zip(answers, (CLOSED_GAP_S, PROBE_GAP_S), strict=True))
        self.asked[own, other] = self.now_s + took_s, answers

    def _tries(self, own: int, other: int, count: int, answer: Answer) -> list[Answer]:
        lives = other not in self.dead and (own, other) not in self.cut
        return [answer if lives and self.random.random() < (1.0 - self.loss) ** 2 else Answer.NONE
                for _ in range(count)]

    def _judge(self, at_s: float) -> None:
        for own, detector in enumerate(self.detectors):
            if own in self.dead or self.frozen_s[own] > self.now_s:
                continue
            for name in detector.lost():
                if int(name) in self.dead:
                    self.known_s.setdefault((own, int(name)), at_s)
                else:
                    self.false.append((at_s, own, int(name)))

    def die(self, *nodes: int) -> float:
        """When, between two pings."""
        self.dead = frozenset(nodes)
        return self.now_s - self.random.uniform(0.0, PING_S)

    def all_know(self) -> bool:
        return self.known_s.keys() == {(own, one) for own in self.nodes if own not in self.dead
                                       for one in self.dead}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / PING_S)):
            self.step()


@pytest.mark.parametrize(("loss", "starved", "hours"), [
    (0.05, 0.05, 2.0), (0.3, 0.05, 0.5), (0.4, 0.02, 1.0)])
def test_nobody_who_lives_is_held_lost(loss: float, starved: float, hours: float) -> None:
    """With three questions to either port, whatever the loss, the hour at 0.4 is full of them."""
    network = Network(7, 3, loss, starved)
    network.run(hours * 3600.0)
    assert network.false == []


@pytest.mark.parametrize(("loss", "limit_s"), [(0.0, 0.6), (0.02, 1.5), (0.05, 1.6), (0.3, 4.0)])
def test_the_dead_are_known_to_all(loss: float, limit_s: float) -> None:
    """The 99th of a hundred deaths, each behind a time in which the loss is measured."""
    took: list[float] = []
    for seed in range(100):
        network = Network(seed, 4, loss)
        network.run(5.0)
        died_s = network.die(0)
        network.run(8.0)
        assert not network.false and network.all_know()
        took.append(max(network.known_s.values()) - died_s)
    took.sort()
    assert took[98] <= limit_s, (took[50], took[98], took[99])


@pytest.mark.parametrize(("loss", "limit_s"), [(0.0, 1.0), (0.05, 2.0)])
def test_the_dead_among_many_are_known_to_all(loss: float, limit_s: float) -> None:
    """Of 40 nodes eight are near the dead one; the others are asked on their word."""
    took: list[float] = []
    for seed in range(12):
        network = Network(seed, 40, loss)
        network.run(5.0)
        died_s = network.die(3 * seed)
        network.run(8.0)
        assert not network.false and network.all_know()
        took.append(max(network.known_s.values()) - died_s)
    took.sort()
    assert took[-1] <= limit_s, took


def test_a_whole_rack_of_many_is_known_to_all_by_the_longer_ticks() -> None:
    """Those in its middle have nobody left who is near to them."""
    network = Network(5, 40, 0.0)
    network.run(5.0)
    network.die(*range(10, 26))
    network.run(PING_S * FAR_TICKS * 5)
    assert not network.false and network.all_know()


@pytest.mark.parametrize(("loss", "starved", "minutes"), [(0.05, 0.05, 6.0), (0.3, 0.02, 2.0)])
def test_nobody_who_lives_among_many_is_held_lost(
    loss: float, starved: float, minutes: float
) -> None:
    network = Network(11, 24, loss, starved)
    network.run(minutes * 60.0)
    assert network.false == []


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_what_two_do_not_reach_is_lost_to_them_alone(loss: float) -> None:
    """The way of two nodes to a third is cut both ways; all others hear it, and go on to."""
    network = Network(3, 24, loss)
    network.run(5.0)
    third = 12
    network.cut = {pair for one in (2, 20) for pair in ((one, third), (third, one))}
    network.run(120.0)
    assert {(own, name) for _, own, name in network.false} == {(2, third), (20, third)}
    # The two ask it twice a second, and everybody else hardly more than any other node.
    usual = sorted(network.questions_to[one] for one in network.nodes if one != third)[12]
    assert network.questions_to[third] < 2 * 2.2 * 120.0 + 2 * usual + 60.0


def test_a_kernel_is_asked_as_often_as_the_loss_needs() -> None:
    way = Way()
    assert way.questions() == CLOSED_LEAST
    for _ in range(20):
        way.learn(10, 20)  # every second question gets no answer
    many = way.questions()
    assert 18 <= many <= CLOSED_MOST
    way.learn(0, 24)  # what does not answer at all is another matter
    assert way.questions() == many
    for _ in range(20):
        way.learn(24, 24)  # the link was mended
    assert way.questions() == CLOSED_LEAST


def test_what_is_known_of_the_way_outlives_a_silence_and_goes_with_the_node() -> None:
    questions = KernelQuestions()
    for _ in range(20):
        closed, _ = questions.wanted("b")
        questions.told("b", [Answer.REFUSED, *[Answer.NONE] * (closed - 1)], [])
        questions.heard("b")
    assert questions.wanted("b") == (CLOSED_MOST, PROBES)
    questions.keep(["c"])
    assert questions.wanted("b") == (CLOSED_LEAST, PROBES)
