"""Which other nodes are lost: known within a second, and never on one node's word.

Owns the counting.  Time is this observer's own ticks: one that was starved or frozen itself counts
none meanwhile, and so accuses nobody.  Each word says within how many ticks the next one comes, and
a peer's silence is counted in those.  A silent peer is asked by way of its kernel, which answers
while an agent is dead or stopped; what answers is not lost.  What does not is lost once a second
observer, whose own next word is not overdue, says the same.  One that speaks seldom is asked as
soon as two others, who hear more of it, say so.  Pure: no clock, no sockets.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable
from itertools import islice
from operator import itemgetter

import msgspec

ASK_TICKS = 2  # without a word, a tick being the time between two: a question costs little
SILENT_TICKS = 3  # before that nobody is accused, whatever his kernel does
FRESH_TICKS = 3  # a second observer must have been heard within these of his
PROBE_AGAIN_TICKS = 5
ACCUSERS = 2  # of one that speaks seldom, since its last word: then its kernel is asked
ASKED_AT_ONCE = 32  # of those


class Peer(msgspec.Struct):
    """One other node, as this one hears it."""

    missed: int = 0  # of its words, since the last that came
    unreachable: bool = False  # silent, and its kernel does not answer
    probe_at: int = ASK_TICKS  # words missed
    silent: frozenset[str] = frozenset()  # whom it does not reach, as it said last
    every: int = 1  # ticks of ours from one of its words to the next
    left: int = 1  # of them, until one more is missed
    sign_tick: int = 0  # of its last word or its kernel's last answer


class FailureDetector:
    """What this node knows of the others."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self._ticks = 0
        self._unreachable: list[str] = []  # by name
        # A peer -> who does not reach it -> since when, the newest last.
        self._accusers: dict[str, dict[str, int]] = {}
        self._asked: dict[str, int] = {}  # of the accused: in which tick last
        self._lost: frozenset[str] | None = frozenset()  # None: to be found anew

    def watch(self, names: Collection[str], every: int = 1) -> None:
        """These are the others now; one that is new has its time to be heard first, of which
        `every` says how much."""
        self.peers = {name: self.peers.get(name) or Peer(
            every=every, left=every, sign_tick=self._ticks) for name in names}
        self._unreachable = sorted(name for name, one in self.peers.items() if one.unreachable)
        told, self._accusers, self._lost = self._accusers, {}, None
        for accuser, peer in self.peers.items():
            for name in sorted(peer.silent & self.peers.keys()):
                since = told.get(name, {}).get(accuser, self._ticks)
                self._accusers.setdefault(name, {})[accuser] = since
        self._accusers = {name: dict(sorted(one.items(), key=itemgetter(1)))
                          for name, one in self._accusers.items()}
        self._asked = {name: at for name, at in self._asked.items() if name in self._accusers}

    def heard(self, name: str, silent: Iterable[str] = (), every: int = 1) -> None:
        """Its word came, whom it does not reach itself, and within how many ticks the next comes.
        """
        peer = self.peers.get(name)
        if peer is None:
            return
        said = frozenset(silent)
        if said != peer.silent:
            self._accuses(name, peer.silent, said)
        if peer.unreachable:
            self._unreachable.remove(name)
        if said != peer.silent or peer.unreachable or (said and peer.missed > FRESH_TICKS):
            self._lost = None
        self.peers[name] = Peer(silent=said, every=every, left=every, sign_tick=self._ticks)

    def _accuses(self, accuser: str, before: frozenset[str], now: frozenset[str]) -> None:
        for name in (before - now) & self._accusers.keys():
            self._accusers[name].pop(accuser, None)
            if not self._accusers[name]:
                del self._accusers[name]
                self._asked.pop(name, None)
        for name in sorted((now - before) & self.peers.keys()):
            self._accusers.setdefault(name, {})[accuser] = self._ticks

    def tick(self) -> list[str]:
        """A tick of ours has passed; returns whose kernel is to be asked now."""
        asked = []
        self._ticks += 1
        for name, peer in self.peers.items():
            peer.left -= 1
            if peer.left > 0:
                continue
            peer.left = peer.every
            peer.missed += 1
            if peer.missed >= peer.probe_at:
                peer.probe_at = peer.missed + PROBE_AGAIN_TICKS
                asked.append(name)
        if self._unreachable:
            self._lost = None  # an accuser may be overdue by now
        asked += islice((name for name in self._accusers if self._to_ask(name)), ASKED_AT_ONCE)
        self._asked |= {name: self._ticks for name in asked if name in self._accusers}
        return asked

    def _to_ask(self, name: str) -> bool:
        last = self._asked.get(name)
        return (last is None or last + PROBE_AGAIN_TICKS <= self._ticks) \
            and not self.peers[name].unreachable and self._is_doubted(name)

    def _is_doubted(self, name: str) -> bool:
        """By enough others, each since the last sign of it that came here."""
        peer, doubts = self.peers[name], 0
        if peer.every == 1:
            return False
        for accuser, since in reversed(self._accusers.get(name, {}).items()):  # the newest first
            if since < peer.sign_tick or doubts == ACCUSERS:
                break
            doubts += self.peers[accuser].missed <= FRESH_TICKS
        return doubts == ACCUSERS

    def probed(self, name: str, answers: bool) -> None:
        """What became of the question to its kernel; one heard of meanwhile is not silent."""
        peer = self.peers.get(name)
        if peer is None:
            return
        if answers or peer.missed >= SILENT_TICKS or self._is_doubted(name):
            if peer.unreachable == answers:
                self._unreachable.remove(name) if answers else insort(self._unreachable, name)
                self._lost = None
            peer.unreachable = not answers
        elif peer.missed >= ASK_TICKS:
            peer.probe_at = SILENT_TICKS  # said before it counts: asked again as soon as it does
        if answers:
            peer.sign_tick = self._ticks

    def accusers(self, name: str) -> int:
        """How many others, heard of just now, do not reach this peer."""
        return sum(self.peers[one].missed <= FRESH_TICKS for one in self._accusers.get(name, ()))

    def unreachable(self) -> list[str]:
        """Whom this node does not reach: its word for others, and no verdict."""
        return list(self._unreachable)

    def lost(self) -> frozenset[str]:
        """Whom neither this node nor a second one reaches."""
        if self._lost is None:
            self._lost = frozenset(
                name for name in self._unreachable
                if any(self.peers[one].missed <= FRESH_TICKS
                       for one in self._accusers.get(name, ())))
        return self._lost
