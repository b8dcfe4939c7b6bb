"""What virtual agents say to one another: the real conversation, carried over the virtual network.

Owns how a word travels (at once or late, in order, lost with its connection) and whether a kernel
answers.  What is said, who is lost and who has answered is agent/peers/conversation.py's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from ..core.model import Decision
from ..core.run import fences
from ..peers.beats import RETRY_S
from ..peers.conversation import PING_S, Conversation, Listener, Told, Way, Word
from ..peers.kernel_questions import ROUND_S
from .machine import Machine, Process
from .outgoing import Network, Weather


class Shell(Listener, Protocol):
    """What is needed of agent/simulate/edge.py."""

    machine: Machine
    network: Network
    weather: Weather
    rng: random.Random
    process: Process
    life: int

    @property
    def alive(self) -> bool: ...

    @property
    def words(self) -> VirtualPeers: ...

    def delay_s(self, least_s: float) -> float: ...


class Line(Way):
    """To one other agent."""

    def __init__(self, mine: VirtualPeers, there: Shell) -> None:
        super().__init__()
        self.mine, self.there = mine, there
        self.life = 0  # of the agent there with which it is connected
        self.arrives_s = 0.0  # the newest word; none overtakes another
        self.up_s = 0.0  # connected again from then on

    def urge(self) -> None:
        self.mine.speak(self)


class VirtualPeers(Conversation[Line]):
    """One life of a virtual agent among the others."""

    def __init__(self, edge: Shell, others: Iterable[Shell], lease_s: float) -> None:
        machine = edge.machine
        super().__init__(machine.name, f"{machine.name}-{edge.life}", edge, lambda: lease_s,
                         machine.boot_s)
        self.edge, self.loop = edge, machine.loop
        self.lines = {one.machine.name: Line(self, one) for one in others}
        self.watch()
        self._near = [one for name, one in self.lines.items() if name in self.near]
        self._far = [one for name, one in self.lines.items() if name not in self.near]
        self._turn = 0
        self._asking: set[str] = set()

    def begin(self) -> None:
        """Each agent's ticks fall at another moment."""
        if self.lines:
            self.edge.process.later(self.edge.rng.random() * PING_S, self._tick)

    def _tick(self) -> None:
        self.tick()
        self._turn = (self._turn + 1) % self.far_every()
        for line in (*self._near, *self._far[self._turn::self.far_every()]):
            self.speak(line)
        self.edge.process.later(PING_S, self._tick)

    def say(self, decision: Decision) -> None:
        """As agent/daemon/parts/peers.py tells of a step."""
        self.tell(Told(decision.beats, (), tuple(map(fences.known, decision.plans))))

    # ------------------------------------------------------------ words

    def speak(self, line: Line) -> None:
        """The next word, if there is a connection.  What is lost is lost with that, so that what
        it told is told again before anything else is said."""
        now_s, there, weather = self.loop.now_s, line.there, self.edge.weather
        if now_s < line.up_s:
            return
        if line.life != there.life:
            line.life = there.life
            line.begin()
        name = there.machine.name
        if not (there.alive and there.machine.up and not there.machine.frozen
                and self.edge.network.open(self.name, name)):
            line.begin()
            return
        word = self.word_for(name, now_s)
        if word.told is not None and weather.lost_beats \
                and self.edge.rng.random() < weather.lost_beats:
            line.begin()
            line.up_s = now_s + RETRY_S
            return
        if word.told is None and line.arrives_s <= now_s:
            there.words.take(self.name, word)
            return
        at_s = max(line.arrives_s, now_s + self.edge.delay_s(0.001))
        line.arrives_s = at_s
        there.process.later(at_s - now_s, partial(self._arrive, there, word))

    def _arrive(self, there: Shell, word: Word) -> None:
        there.words.take(self.name, word)

    # ------------------------------------------------------------ kernels

    def ask_kernel(self, name: str) -> None:
        if name in self._asking:
            return
        if self._answers(name):
            self.kernel_said(name, True)
            return
        self._asking.add(name)
        self.edge.process.later(ROUND_S, partial(self._late_answer, name))

    def _late_answer(self, name: str) -> None:
        self._asking.discard(name)
        self.kernel_said(name, self._answers(name))

    def _answers(self, name: str) -> bool:
        machine, open_ = self.lines[name].there.machine, self.edge.network.open
        return machine.up and not machine.frozen \
            and open_(self.name, name) and open_(name, self.name)
