"""Who is lost where packets get lost, by seed and in virtual time: nobody who lives is accused, and
the dead are still known about as soon.

The model: pings each tenth of a second over TCP, where a lost packet holds up what comes behind it
until it is sent again (0.2 s, then twice as long each time); a question to a kernel and its answer
are one packet each way.  Observers stand still now and then, and count no tick meanwhile.
"""

from __future__ import annotations

import random

import pytest

from holdfast.agent.peers.beats import SEND_S
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
Answers = tuple[list[Answer], list[Answer]]  # of the closed port, and of the agent's own


class Network:
    """Agents that ping each other, and what becomes of it."""

    def __init__(self, seed: int, count: int, loss: float, starved: float = 0.0) -> None:
        """`loss`: of the packets of each way between two nodes.  `starved`: how often a second an
        observer stands still, for up to three."""
        self.random, self.loss, self.starved = random.Random(seed), loss, starved
        self.now_s, self.dead = 0.0, -1
        self.nodes = range(count)
        self.detectors = [FailureDetector() for _ in self.nodes]
        self.questions = [KernelQuestions() for _ in self.nodes]
        for own, detector in enumerate(self.detectors):
            detector.watch(str(other) for other in self.nodes if other != own)
        self.frozen_s = [0.0] * count  # until when
        self.pairs = [(a, b) for a in self.nodes for b in self.nodes if a != b]
        self.blocked = dict.fromkeys(self.pairs, (0.0, RTO_S))  # (until when, the next wait)
        self.asked: dict[tuple[int, int], tuple[float, Answers]] = {}
        self.false: list[tuple[float, int, int]] = []
        self.known_s: dict[int, float] = {}  # observer -> when it held the dead one lost

    def step(self) -> None:
        self.now_s += PING_S
        for own in self.nodes:
            if own == self.dead or self.frozen_s[own] > self.now_s:
                continue
            if self.starved and self.random.random() < self.starved * PING_S:
                self.frozen_s[own] = self.now_s + self.random.uniform(0.2, 3.0)
                continue
            for name in self.detectors[own].tick():
                self._ask(own, int(name))
        for a, b in self.pairs:
            self._ping(a, b)
        self._judge(self.now_s)
        self._answers()

    def _answers(self) -> None:
        """What is over before the next tick: its outcome, which the others hear at once."""
        for (own, other), (until_s, answers) in sorted(
            self.asked.items(), key=lambda one: one[1][0]
        ):
            is_over = until_s < self.now_s + PING_S and self.frozen_s[own] <= self.now_s
            if not is_over or own == self.dead:
                continue
            del self.asked[own, other]
            lives = self.questions[own].told(str(other), *answers)
            if lives is not None:
                self.detectors[own].probed(str(other), lives)
            for second in self.nodes:
                if second not in (own, self.dead):
                    self._ping(own, second)
            self._judge(until_s)

    def _ping(self, a: int, b: int) -> None:
        if a == self.dead or b == self.dead or self.frozen_s[a] > self.now_s:
            return
        until_s, wait_s = self.blocked[a, b]
        if until_s > self.now_s:
            return
        if self.random.random() < self.loss:
            self.blocked[a, b] = self.now_s + min(wait_s, SEND_S), 2 * wait_s
            return
        self.blocked[a, b] = 0.0, RTO_S
        if self.frozen_s[b] <= self.now_s:
            self.detectors[b].heard(str(a), self.detectors[a].unreachable())
            self.questions[b].heard(str(a))

    def _ask(self, own: int, other: int) -> None:
        if (own, other) in self.asked:
            return
        closed, agent = self.questions[own].wanted(str(other))
        answers = (self._tries(other, closed, Answer.REFUSED),
                   self._tries(other, agent, Answer.TAKEN))
        took_s = max((len(tries) - 1) * gap_s + PROBE_S * (Answer.NONE in tries)
                     for tries, gap_s in zip(answers, (CLOSED_GAP_S, PROBE_GAP_S), strict=True))
        self.asked[own, other] = self.now_s + took_s, answers

    def _tries(self, other: int, count: int, answer: Answer) -> list[Answer]:
        lives = other != self.dead
        return [answer if lives and self.random.random() < (1.0 - self.loss) ** 2 else Answer.NONE
                for _ in range(count)]

    def _judge(self, at_s: float) -> None:
        for own, detector in enumerate(self.detectors):
            if own == self.dead or self.frozen_s[own] > self.now_s:
                continue
            for name in detector.lost():
                if int(name) == self.dead:
                    self.known_s.setdefault(own, at_s)
                else:
                    self.false.append((at_s, own, int(name)))

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
        network.dead, died_s = 0, network.now_s - network.random.uniform(0.0, PING_S)
        network.run(8.0)
        assert not network.false and set(network.known_s) == {1, 2, 3}
        took.append(max(network.known_s.values()) - died_s)
    took.sort()
    assert took[98] <= limit_s, (took[50], took[98], took[99])


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
