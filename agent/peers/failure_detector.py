"""Which other nodes are lost: known within a second, and never on one node's word.

Owns the counting.  Time is this observer's own ticks: one that was starved or frozen itself counts
none meanwhile, and so accuses nobody.  A silent peer is asked by way of its kernel, which answers
while an agent is dead or stopped; what answers is not lost.  It is asked as often as the loss of
packets on the way there makes needful.  What does not answer is lost once a second observer, heard
of just now, says the same.  Pure: no clock, no sockets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

SILENT_TICKS = 3  # without a word; a tick is PING_S of beats.py, and a question costs nothing
FRESH_TICKS = 3  # a second observer must have been heard within these
PROBE_AGAIN_TICKS = 5  # for one that does not answer
ALIVE_TICKS = 1  # for one that did, and stays silent: it may have died right behind its answer
PROBES_LEAST, PROBES_MOST = 6, 24  # questions to one kernel at a time
CHANCE = 1e-6  # that a living one answers none of them
PRIOR_LOST, PRIOR = 1.0, 10.0  # where nothing is known: one question in ten gets no answer
REMEMBERED = 100.0  # questions: loss of long ago says little of now


class Peer(msgspec.Struct):
    """One other node, as this one hears it."""

    missed: int = 0  # ticks of ours since its last word
    unreachable: bool = False  # silent, and its kernel does not answer
    probe_at: int = SILENT_TICKS
    silent: frozenset[str] = frozenset()  # whom it does not reach, as it said last
    asked: float = 0.0  # questions to its kernel while that lived, and those without an answer
    unanswered: float = 0.0


class FailureDetector:
    """What this node knows of the others."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    def watch(self, names: Iterable[str]) -> None:
        """These are the others now; one that is new has its time to be heard first."""
        self.peers = {name: self.peers.get(name) or Peer() for name in names}

    def heard(self, name: str, silent: Iterable[str] = ()) -> None:
        """Its word came, and whom it does not reach itself."""
        peer = self.peers.get(name)
        if peer is not None:
            self.peers[name] = Peer(
                silent=frozenset(silent), asked=peer.asked, unanswered=peer.unanswered)

    def tick(self) -> list[str]:
        """A tick of ours has passed; returns whose kernel is to be asked now."""
        asked = []
        for name, peer in self.peers.items():
            peer.missed += 1
            if peer.missed >= peer.probe_at:
                peer.probe_at = peer.missed + PROBE_AGAIN_TICKS
                asked.append(name)
        return asked

    def probes(self, name: str) -> int:
        """How often its kernel is to be asked at a time: so that one that lives is not taken for
        dead, and no oftener, for each question takes its time."""
        peer = self.peers.get(name) or Peer()
        lost = (peer.unanswered + PRIOR_LOST) / (peer.asked + PRIOR)
        wanted = math.ceil(math.log(CHANCE) / math.log(lost)) if lost < 1.0 else PROBES_MOST
        return min(PROBES_MOST, max(PROBES_LEAST, wanted))

    def probed(self, name: str, answers: int, asked: int = 1) -> None:
        """How many of the questions to its kernel were answered; one heard of meanwhile is not
        silent.  What gets no answer at all says nothing of the way there."""
        peer = self.peers.get(name)
        if peer is None:
            return
        if answers:
            kept = min(1.0, REMEMBERED / (peer.asked + asked))
            peer.asked = kept * (peer.asked + asked)
            peer.unanswered = kept * (peer.unanswered + asked - answers)
        if peer.missed >= SILENT_TICKS:
            peer.unreachable = not answers
            if answers:
                peer.probe_at = min(peer.probe_at, peer.missed + ALIVE_TICKS)

    def unreachable(self) -> list[str]:
        """Whom this node does not reach: its word for others, and no verdict."""
        return sorted(name for name, peer in self.peers.items() if peer.unreachable)

    def lost(self) -> frozenset[str]:
        """Whom neither this node nor a second one reaches."""
        fresh = [peer for peer in self.peers.values() if peer.missed <= FRESH_TICKS]
        return frozenset(name for name in self.unreachable()
                         if any(name in peer.silent for peer in fresh))
