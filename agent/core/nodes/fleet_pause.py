"""A pause of the whole fleet: one document in the store, which every agent obeys.

Owns that document.  Whoever was asked writes it; with a store of one node the fleet is that node.
What was known of it stands while the store is away, over a restart of the agent too, and what was
asked holds here at once: a person who says "hands off" does not wait for a store.

How long it lasts is counted by each node for itself, from when it first saw the document on: the
time of day of two nodes may be hours apart, and only the difference of two readings of one clock
means something.  Whoever counted to the end first writes it down, for nodes that began to count
late (they joined, or started anew).
"""

from __future__ import annotations

import msgspec

from ..actions import PAUSE
from ..effects import drafts
from ..model import FLEET, Answer, Doc, Now, Request, StoreView
from ..run import members
from ..run.state import Context

KEY = f"{FLEET}/pause"
OVER = "the time of the pause is over"
ASIDE_LEASES = 2.0


class PauseDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of fleet/pause."""

    paused: bool = False
    reason: str = ""
    by: str = ""
    request: str = ""
    since_wall_s: float = 0.0
    until_wall_s: float = 0.0  # by the clock of `since_wall_s`; 0 = a person ends it


class PauseMemory(msgspec.Struct):
    """What a restart of the agent remembers."""

    known: PauseDoc = PauseDoc()  # as the store said last
    wanted: PauseDoc | None = None  # asked here, and still to be written
    in_force: PauseDoc = PauseDoc()  # of the last step
    counted: PauseDoc = PauseDoc()  # whose end the next two tell
    ends_boot_s: float = 0.0  # meaningless where it has no end
    boot_id: str = ""
    cluster: str = ""  # whose store `known` is of


class FleetPause:
    """The fleet's pause as one node sees and writes it."""

    def __init__(self, memory: PauseMemory) -> None:
        self.memory = memory
        self.was_read = False  # in this life of the agent: what is older may have been ended since

    def ask(self, request: Request, reason: str, now: Now) -> None:
        pauses = request.action == PAUSE
        self.memory.wanted = PauseDoc(
            pauses, reason, request.by, request.id, now.wall_s,
            request.until_wall_s if pauses else 0.0)

    def standing(self, now: Now, store: StoreView, alone: bool) -> str:
        """Why the fleet is paused now, "" where it is not; called once a step, before anything is
        decided.  `alone`: the store is this node's own."""
        memory = self.memory
        if store.up:
            self._read(store, alone)
        doc = memory.wanted or memory.known
        self._count(doc, now, alone)
        over = doc.until_wall_s > 0.0 and memory.ends_boot_s <= now.boot_s
        memory.in_force = doc if doc.paused and not over else PauseDoc()
        return (memory.in_force.reason or "the fleet is paused") if memory.in_force.paused else ""

    def _read(self, store: StoreView, alone: bool) -> None:
        """The last word stands though the store has no document of it: it came back empty and was
        seeded, for nobody deletes one.  Another cluster's store never had it."""
        memory = self.memory
        found = store.docs.get(KEY).version
        self.was_read = self.was_read or bool(found)
        if found or alone or store.cluster not in ("", memory.cluster):
            memory.known = store.docs.decoded(KEY, read)
        memory.cluster = store.cluster or memory.cluster

    def _count(self, doc: PauseDoc, now: Now, alone: bool) -> None:
        """What is left of a pause when this node first sees it in this boot.  Only where nobody
        else can have written it, its end is a time by this node's own clock."""
        if doc == self.memory.counted and now.boot_id == self.memory.boot_id:
            return
        left_s = doc.until_wall_s - (now.wall_s if alone else doc.since_wall_s)
        self.memory.counted, self.memory.boot_id = doc, now.boot_id
        self.memory.ends_boot_s = now.boot_s + max(0.0, left_s)

    def until_wall_s(self, now: Now) -> float:
        """When it ends by itself, by this node's clock; 0 where it does not, or nothing is paused.
        """
        if self.memory.in_force.until_wall_s <= 0.0:
            return 0.0
        return now.wall_s + self.memory.ends_boot_s - now.boot_s

    def step(self, ctx: Context) -> None:
        """Writes what was asked for until the store has it, and the end of what is over."""
        wanted, known = self.memory.wanted, self.memory.known
        if not ctx.observed.store.up:
            return
        if wanted is None:
            if known.paused and not self.memory.in_force.paused:
                self._end(ctx, known)
            elif known.request and self._is_lost(ctx):
                again = drafts.put(KEY, 0, msgspec.json.encode(known), known.reason)
                ctx.emit(0, again)  # refused where somebody was quicker
            return
        if wanted.paused and not self.memory.in_force.paused:
            self.memory.wanted = None  # its time went by while the store was away
            return
        doc = members.doc_of(ctx.observed.store, KEY)
        if doc.body and read(doc) == wanted:
            self.memory.known, self.memory.wanted = wanted, None
            return
        draft = drafts.put(KEY, doc.version, msgspec.json.encode(wanted), wanted.reason)
        ctx.emit(doc.version, draft)

    def _is_lost(self, ctx: Context) -> bool:
        """Whether this node writes the last word again that it knows.  Who has not read it in this
        life leaves that to the others for a while: they may know a newer one."""
        store, waited_s = ctx.observed.store, ctx.now.boot_s - ctx.since_boot_s
        return (store.cluster == self.memory.cluster and not store.docs.get(KEY).version
                and (self.was_read or waited_s > ASIDE_LEASES * ctx.settings.lease_s))

    def _end(self, ctx: Context, known: PauseDoc) -> None:
        """Over the very document that is over: against a newer one the write is refused."""
        ended = PauseDoc(False, OVER, known.by, known.request, ctx.now.wall_s)
        version = members.doc_of(ctx.observed.store, KEY).version
        ctx.emit(version, drafts.put(KEY, version, msgspec.json.encode(ended), OVER))

    def answer(self, request: Request) -> Answer | None:
        """None while the store does not have it."""
        if self.memory.wanted is not None and self.memory.wanted.request == request.id:
            return None
        known = self.memory.known
        if known.request == request.id or known.paused == (request.action == PAUSE):
            return Answer(request.id, True, f"{request.action}: the fleet's document says so")
        said = "paused" if known.paused else "resumed"
        return Answer(request.id, False, f"the fleet was {said} since: {known.reason}")


def read(doc: Doc) -> PauseDoc:
    """No pause for an absent or unreadable body."""
    return members.body_of(doc, PauseDoc) or PauseDoc()
