"""Whether a node may lead in the place of one that two others know to be lost.

Owns what the store has shown of who leads since his peers hear nothing of him.  Nodes that are cut
off from one another may all reach the store: each side holds the other lost.  Whoever the store
shows to live is waited for until his lease ends; else the sides took the run from one another
without end.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from ..model import Lease, Plan
from . import members
from .layout import Member, World, arranged
from .plan import slots_of
from .state import Context

SIGN_S = 2.0  # a leader who lives has said within this whom he misses: a verdict and a write
NAMED_MAX = 4  # nodes that a reason names


class Takeover(NamedTuple):
    """In whose place this node leads at once ("" = in nobody's), and why it does not."""

    over: str = ""
    reason: str = ""


class Signs:
    """What this node saw of who leads a run; of this life of its agent."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}  # node -> since when it is known to be lost
        self._shown: tuple[str, int] = ("", -1)  # who led, and which version of the document stood
        self._shown_s = 0.0  # since when

    def see(self, ctx: Context, lease: Lease | None, version: int) -> None:
        """Each step, before anything is decided.  Only who leads changes the document."""
        now_s = ctx.now.boot_s
        self._lost_s = {beat.node: self._lost_s.get(beat.node, now_s)
                        for beat in ctx.observed.beats if beat.lost}
        shown = (lease.holder if lease is not None else "", version)
        if shown != self._shown:
            self._shown, self._shown_s = shown, now_s

    def of(
        self, ctx: Context, lease: Lease, plan: Plan | None, world: World,
        nodes: tuple[Member, ...],
    ) -> Takeover:
        """Whether the holder of the lease, who is not this node, is followed before it ends."""
        holder, node = lease.holder, ctx.view.node
        lost_s = self._lost_s.get(holder)
        if lost_s is None:
            return Takeover()
        if self._shown_s >= lost_s or (plan is not None and node in plan.unheard):
            return Takeover(reason=(
                f"{holder} leads the run, as the store shows, and this node and another hear "
                "nothing of it: they are cut off from one another, and the run is left to it"))
        if not arranged(world, nodes, slots_of(plan) if plan else [])[0]:
            return Takeover(reason=f"{holder} leads the run and is lost; too few nodes are left "
                            "here to go on without it before its lease ends")
        # Of two equal sides one leads already.  Who was heard of before may be cut off as well.
        heard = {beat.node for beat in ctx.observed.beats if beat.run == ctx.view.run
                 and not beat.lost and beat.boot_s >= lost_s} | {node}
        most = 2 * sum(one.node in heard for one in nodes) > len(nodes)
        left_s = lost_s + SIGN_S - ctx.now.boot_s
        if not most and left_s > 0.0:
            ctx.wake(left_s)
            return Takeover(reason=f"{holder} leads the run and is lost, and no more than half of "
                            "the nodes are heard of: waiting for a sign of it in the store")
        return Takeover(over=holder)


def unheard(ctx: Context, plan: Plan) -> tuple[str, ...]:
    """Of the nodes that the plan names those that this one, who leads, holds lost, until each is
    heard of again.  They read in the store that their leader lives.  One node alone is not written
    down: nobody is with it who makes sure, and so it takes the run from nobody."""
    beats = [beat for beat in ctx.observed.beats if beat.run == ctx.view.run]
    lost = {beat.node for beat in beats if beat.lost}
    back = {beat.node for beat in beats if members.is_fresh(beat, ctx.now, ctx.settings)}
    back.add(ctx.view.node)  # it leads now, whoever missed it before
    missed = sorted({*plan.members, *plan.spares} & (lost | (set(plan.unheard) - back)))
    return tuple(missed) if len(missed) > 1 else ()


def words(nodes: tuple[str, ...]) -> str:
    """Whom the leader misses, as the reason of a write."""
    if not nodes:
        return "every node is heard of again"
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return f"nothing is heard of {', '.join(nodes[:NAMED_MAX])}{more}, or it gets no ranks next"
