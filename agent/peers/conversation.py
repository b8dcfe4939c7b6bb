"""What this node and the others have said to one another: whose word stands, who has answered whom.

Owns the words: what goes into the next one to a node, what one that came changes, and since when a
node is known to have answered, by which permits live while the store is away.  No sockets and no
clock of its own: beats.py carries the words between machines, the simulator in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ..core.model import Beat
from .choice import LINES_MAX, NEAR, near
from .failure_detector import FailureDetector

PING_S = 0.1
FAR_MOST_S = 2.0  # between two words
OLD_LINES = 16  # releases that do not say when they speak again do after 1 / 16 s for each
EVERY_MAX = LINES_MAX // OLD_LINES  # ticks between two words that are believed
NODES_MAX = 2 * LINES_MAX  # of which something is kept
BEATS_MAX = 4 * LINES_MAX
GONE_S = 600.0  # a node that was not heard of for so long, and is nowhere any more, is forgotten
PINGS_KEPT = 64  # whose answers may still come
SLOW_LEASES = 0.2  # of a lease between two beats without news
FAR_LEASES = 0.2  # and between two words: the beat after one that a word missed is not stale yet
BACK_LEASES = 2.0  # a new agent has its node's launchers again by then, or its node is lost by age


class Endpoint(msgspec.Struct, frozen=True):
    """Where the store of a run's generation is."""

    run: str
    generation: int
    host: str
    port: int


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message's content, beside the ping's."""

    beats: tuple[Beat, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    known: tuple[tuple[str, int], ...] = ()  # run -> generation of the newest document it knows


class Word(msgspec.Struct):
    """One message to one node: a ping, and now and then what the node is to know."""

    number: int
    ack: int  # number of its own newest word that came
    instance: str  # who speaks, which is another one after each start
    to: str  # whom it takes the other for
    silent: Sequence[str]  # whom it does not reach
    told: Told | None = None
    is_news: bool = False
    every: int = 0  # ticks of PING_S until the next one, at most; 0 = it does not say


class Listener(Protocol):
    """What the agent does with what others say."""

    def beats_came(self, told: Told, is_news: bool) -> None: ...

    def nodes_lost(self, nodes: frozenset[str]) -> None: ...

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        """The answer to any JSON value that a node asks with."""


def news_of(told: Told) -> tuple[object, ...]:
    """What others must know at once; steps and times move by themselves.  Whoever leads acts on a
    stopped rank within a second, unless it knows by then what else was stopped."""
    return (told.endpoints, told.known, *(
        (one.run, one.generation, one.fatal, one.held, one.shutdown, one.suspended,
         len(one.commits),
         *((rank.rank, rank.state, rank.generation, rank.proc_state == "T") for rank in one.ranks))
        for one in told.beats))


class Way:
    """What was said to one other node, and which of it is known to have been heard.  Each
    connection keeps the order, and loses nothing but its end."""

    def __init__(self) -> None:
        self.number = 0
        self.sent: deque[tuple[int, float]] = deque(maxlen=PINGS_KEPT)
        self.heard_number = 0  # of the other's last ping
        self.acked_boot_s = 0.0  # when the newest ping left that the other has heard
        self.begin()

    def begin(self) -> None:
        """A new connection: what was told on the one before may not have come."""
        self.told_at_s, self.news_number = -1e9, -1

    def urge(self) -> None:
        """The next word is wanted at once."""

    def acked(self, number: int) -> None:
        """The other has heard the ping of this number; what left before that asks no more."""
        sent = self.sent
        while sent and sent[0][0] <= number:
            at, boot_s = sent.popleft()
            if at == number:
                self.acked_boot_s = max(self.acked_boot_s, boot_s)


AnyWay = TypeVar("AnyWay", bound=Way)


class Conversation(Generic[AnyWay]):
    """One life of an agent among the others."""

    def __init__(
        self, name: str, instance: str, listener: Listener, lease_s: Callable[[], float],
        boot_s: Callable[[], float],
    ) -> None:
        self.name, self.instance, self.listener = name, instance, listener
        self.lease_s, self.boot_s = lease_s, boot_s
        self.detector = FailureDetector()
        self.told = Told()
        self.news_number = 0
        self.instances: dict[str, str] = {}  # of the others, as they said last
        self.lines: dict[str, AnyWay] = {}  # to those that this one keeps in touch with
        self.near: frozenset[str] = frozenset()  # of these
        self.lost: frozenset[str] = frozenset()
        self._news: tuple[object, ...] = ()
        self._beats: dict[str, dict[str, Beat]] = {}  # node -> run -> beat
        self._count = 0  # of them
        self._known: dict[str, dict[str, int]] = {}  # node -> run -> generation
        self._endpoints: dict[str, tuple[Endpoint, ...]] = {}  # node -> as it tells them now
        self._spoken: dict[str, tuple[str, frozenset[str]]] = {}  # node -> life, runs told of last

    def every(self, name: str) -> int:
        """Ticks of PING_S between two words to this node.  Of many the near ones get one as often
        as of few, which tells soon who dies; the others get theirs the more seldom the more they
        are, but often enough that their beats are fresh and their permits stand."""
        return 1 if name in self.near else self.far_every()

    def far_every(self) -> int:
        far_s = min(PING_S * len(self.lines) / NEAR, FAR_LEASES * self.lease_s(), FAR_MOST_S)
        return max(1, int(far_s / PING_S + 0.01))

    def watch(self) -> None:
        """To be called when the connections are others."""
        before, self.near = self.near, frozenset(near(self.name, self.lines))
        self.detector.watch(self.lines, self._old_every())
        for name in self.near - before if before else ():
            self.lines[name].urge()  # it waits for longer than it has to

    def _old_every(self) -> int:
        return max(1, -(-len(self.lines) // OLD_LINES))

    def forget(self, present: Collection[str]) -> None:
        """What nodes said that are nowhere any more, once their last beat is old."""
        old_s = self.boot_s() - GONE_S
        for name in self.instances.keys() - set(present):
            beats = self._beats.get(name, {})
            if all(beat.boot_s < old_s for beat in beats.values()):
                self._count -= len(beats)
                for kept in (self._beats, self._known, self.instances, self._spoken,
                             self._endpoints):
                    kept.pop(name, None)

    # ------------------------------------------------------------- who is silent

    def tick(self) -> None:
        """To be called each PING_S; asks the kernels of those that are silent."""
        for name in self.detector.tick():
            self.ask_kernel(name)
        self._judge()

    def ask_kernel(self, name: str) -> None:
        """Begin to ask, unless it is being asked; its answer goes to `kernel_said`."""
        raise NotImplementedError

    def kernel_said(self, name: str, answers: bool | None) -> None:
        """None: it could not be asked."""
        before = self.detector.unreachable()
        if answers is not None:
            self.detector.probed(name, answers)
        self._judge()
        if self.detector.unreachable() != before and self.detector.accusers(name) < NEAR:
            for other in self.lines.values():
                other.urge()  # a second observer waits for this node's word

    def _judge(self) -> None:
        lost = self.detector.lost()
        if lost is not self.lost and lost != self.lost:
            new, self.lost = lost - self.lost, lost
            self.listener.nodes_lost(new)

    # ------------------------------------------------------------- speaking

    def tell(self, told: Told) -> None:
        """What the others are to know; at once where it is news."""
        self.told = told
        news = news_of(told)
        if news != self._news:
            self._news = news
            self.news_number += 1
            for line in self.lines.values():
                line.urge()

    def word_for(self, name: str, now_s: float) -> Word:
        """The next one to this node; `now_s`: of a clock by which beats without news are due."""
        way = self.lines[name]
        is_news = way.news_number != self.news_number
        way.number += 1
        way.sent.append((way.number, self.boot_s()))
        word = Word(way.number, way.heard_number, self.instance, self.instances.get(name, ""),
                    self.detector.unreachable(), every=self.every(name))
        if is_news or now_s - way.told_at_s > SLOW_LEASES * self.lease_s():
            way.news_number, way.told_at_s = self.news_number, now_s
            word.told, word.is_news = self.told, is_news
        return word

    # ------------------------------------------------------------- hearing

    def heard(self) -> tuple[Beat, ...]:
        """The newest beat of each node and run, those of lost nodes marked."""
        return tuple(
            msgspec.structs.replace(beat, lost=True) if node in self.lost else beat
            for node, beats in self._beats.items() for beat in beats.values())

    def endpoint(self, run: str) -> Endpoint | None:
        """The newest of this run that a node tells now, and that is not lost."""
        told = (one for name, endpoints in self._endpoints.items() if name not in self.lost
                for one in endpoints if one.run == run)
        return max(told, key=lambda one: one.generation, default=None)

    def answered_s(self, name: str, run: str, generation: int) -> float:
        """When the newest ping left that this node has answered (CLOCK_BOOTTIME); 0.0 where it has
        not, or knows a higher generation of the run."""
        line, known = self.lines.get(name), self._known.get(name)
        if line is None or known is None or known.get(run, 0) > generation:
            return 0.0
        return line.acked_boot_s

    def take(self, name: str, word: Word) -> None:
        """A node's word came."""
        known = name in self.instances or name in self.lines
        if not known and len(self.instances) >= NODES_MAX:
            return  # until `forget` has made room
        self.instances[name] = word.instance
        every = min(word.every, EVERY_MAX) if word.every > 0 else self._old_every()
        self.detector.heard(name, word.silent, every)
        if word.told is not None:
            self._keep(name, word.told)  # before its answer counts: it may know of something newer
        line = self.lines.get(name)
        if line is not None:
            line.heard_number = word.number
            if word.to == self.instance:
                line.acked(word.ack)
        self._judge()
        if word.told is not None:
            self.listener.beats_came(word.told, word.is_news)

    def _keep(self, name: str, told: Told) -> None:
        """A node speaks for itself alone, and what it does not say any more is over.  An agent that
        has just begun says nothing yet of runs whose launchers are about to come back to it: what
        the one before it said of them stands, and ages."""
        now_s = self.boot_s()
        life = self.instances.get(name, "")
        before, runs = self._spoken.get(name, ("", frozenset()))
        self._known[name] = dict(told.known[:BEATS_MAX])
        self._endpoints.pop(name, None)
        if told.endpoints:
            self._endpoints[name] = told.endpoints[:BEATS_MAX]
        old_s = now_s - BACK_LEASES * self.lease_s()
        had = self._beats.pop(name, {})
        kept = {run: beat for run, beat in had.items()
                if beat.boot_s >= old_s and not (life == before and run in runs)}
        room = BEATS_MAX - self._count + len(had)
        for beat in told.beats:
            if beat.node == name and (beat.run in kept or len(kept) < room):
                kept[beat.run] = msgspec.structs.replace(beat, boot_s=now_s)
        self._count += len(kept) - len(had)
        if kept:
            self._beats[name] = kept
        self._spoken[name] = life, frozenset(beat.run for beat in told.beats[:BEATS_MAX])
