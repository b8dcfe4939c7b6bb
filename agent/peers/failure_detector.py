"""Which other nodes are lost: known within a second, and never on one node's word.

Owns the counting.  Time is this observer's own ticks: one that was starved or frozen itself counts
none meanwhile, and so accuses nobody.  A silent peer is asked by way of its kernel, which answers
while an agent is dead or stopped; what answers is not lost.  What does not is lost once a second
observer, heard of just now, says the same.  Pure: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

ASK_TICKS = 2  # without a word; a tick is PING_S of conversation.py, and a question costs little
SILENT_TICKS = 3  # before that nobody is accused, whatever his kernel does
FRESH_TICKS = 3  # a second observer must have been heard within these
PROBE_AGAIN_TICKS = 5


class Peer(msgspec.Struct):
    """One other node, as this one hears it."""

    missed: int = 0  # ticks of ours since its last word
    unreachable: bool = False  # silent, and its kernel does not answer
    probe_at: int = ASK_TICKS
    silent: frozenset[str] = frozenset()  # whom it does not reach, as it said last


class FailureDetector:
    """What this node knows of the others."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    def watch(self, names: Iterable[str]) -> None:
        """These are the others now; one that is new has its time to be heard first."""
        self.peers = {name: self.peers.get(name) or Peer() for name in names}

    def heard(self, name: str, silent: Iterable[str] = ()) -> None:
        """Its word came, and whom it does not reach itself."""
        if name in self.peers:
            self.peers[name] = Peer(silent=frozenset(silent))

    def tick(self) -> list[str]:
        """A tick of ours has passed; returns whose kernel is to be asked now."""
        asked = []
        for name, peer in self.peers.items():
            peer.missed += 1
            if peer.missed >= peer.probe_at:
                peer.probe_at = peer.missed + PROBE_AGAIN_TICKS
                asked.append(name)
        return asked

    def probed(self, name: str, answers: bool) -> None:
        """What became of the question to its kernel; one heard of meanwhile is not silent."""
        peer = self.peers.get(name)
        if peer is None:
            return
        if peer.missed >= SILENT_TICKS:
            peer.unreachable = not answers
        elif peer.missed >= ASK_TICKS and not answers:
            peer.probe_at = SILENT_TICKS  # said before it counts: asked again as soon as it does

    def unreachable(self) -> list[str]:
        """Whom this node does not reach: its word for others, and no verdict."""
        return sorted([name for name, peer in self.peers.items() if peer.unreachable])

    def lost(self) -> frozenset[str]:
        """Whom neither this node nor a second one reaches."""
        unreachable = self.unreachable()
        if not unreachable:
            return frozenset()
        fresh = [peer for peer in self.peers.values() if peer.missed <= FRESH_TICKS]
        return frozenset(name for name in unreachable
                         if any(name in peer.silent for peer in fresh))
