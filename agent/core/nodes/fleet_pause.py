"""A pause of the whole fleet: one document in the store, which every agent obeys.

Owns that document.  Whoever was asked writes it; with a store of one node the fleet is that node.
What was known of it stands while the store is away, over a restart of the agent too, and what was
asked holds here at once: a person who says "hands off" does not wait for a store.
"""

from __future__ import annotations

import msgspec

from ..actions import PAUSE
from ..effects import drafts
from ..model import FLEET, Answer, Doc, Now, Request, StoreView
from ..run import members
from ..run.state import Context

KEY = f"{FLEET}/pause"


class PauseDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of fleet/pause."""

    paused: bool = False
    reason: str = ""
    by: str = ""
    request: str = ""
    since_wall_s: float = 0.0
    until_wall_s: float = 0.0  # it ends by itself then; 0 = a person ends it

    def stands(self, wall_s: float) -> bool:
        return self.paused and not 0.0 < self.until_wall_s <= wall_s


class PauseMemory(msgspec.Struct):
    """What a restart of the agent remembers."""

    known: PauseDoc = PauseDoc()  # as the store said last
    wanted: PauseDoc | None = None  # asked here, and still to be written
    in_force: PauseDoc = PauseDoc()  # of the last step


class FleetPause:
    """The fleet's pause as one node sees and writes it."""

    def __init__(self, memory: PauseMemory) -> None:
        self.memory = memory

    def ask(self, request: Request, reason: str, now: Now) -> None:
        pauses = request.action == PAUSE
        self.memory.wanted = PauseDoc(
            pauses, reason, request.by, request.id, now.wall_s,
            request.until_wall_s if pauses else 0.0)

    def standing(self, now: Now, store: StoreView) -> str:
        """Why the fleet is paused now, "" where it is not; called once a step, before anything is
        decided."""
        if store.up:
            self.memory.known = store.docs.decoded(KEY, read)
        doc = self.memory.wanted or self.memory.known
        self.memory.in_force = doc if doc.stands(now.wall_s) else PauseDoc()
        in_force = self.memory.in_force
        return (in_force.reason or "the fleet is paused") if in_force.paused else ""

    def step(self, ctx: Context) -> None:
        """Writes what was asked for until the store has it."""
        wanted = self.memory.wanted
        if wanted is None or not ctx.observed.store.up:
            return
        doc = members.doc_of(ctx.observed.store, KEY)
        if doc.body and read(doc) == wanted:
            self.memory.known, self.memory.wanted = wanted, None
            return
        draft = drafts.put(KEY, doc.version, msgspec.json.encode(wanted), wanted.reason)
        ctx.emit(doc.version, draft)

    def answer(self, request: Request) -> Answer | None:
        """None while the store does not have it."""
        if self.memory.wanted is not None and self.memory.wanted.request == request.id:
            return None
        if self.memory.known.paused == (request.action == PAUSE):
            return Answer(request.id, True, f"{request.action}: the fleet's document says so")
        said = "paused" if self.memory.known.paused else "resumed"
        return Answer(request.id, False, f"the fleet was {said} since: {self.memory.known.reason}")


def read(doc: Doc) -> PauseDoc:
    """No pause for an absent or unreadable body: content of the store is input from outside."""
    try:
        return msgspec.json.decode(doc.body, type=PauseDoc) if doc.body else PauseDoc()
    except (msgspec.DecodeError, RecursionError):
        return PauseDoc()
