"""Whether the ranks of a script that are not to go on must have ended by now.

Owns how long a script's next generation waits for the permits of the one before.  A node that hears
nobody, but reads the store, has its ranks compute on with good reason until it reads that the
leader misses it: from then on it renews no permit.  What it read before that holds for one lease.
So it is with a node that was heard of just now and gets no ranks next, for a fault or by a person's
wish: what it is told may not arrive.  One that says that its ranks ended is not waited for.  The
trainer needs none of this: what an old generation commits is void.  Pure.
"""

from __future__ import annotations

from ..model import TRAINER, Plan
from . import members
from .layout import Member
from .state import Context

NAMED_MAX = 4  # nodes that a reason names


def may_renew(plan: Plan, node: str) -> bool:
    """Whether a node goes on with its ranks of this plan, whose leader does not miss it."""
    return node not in plan.unheard


def known(plan: Plan) -> tuple[str, int]:
    """(run, generation) as the other nodes are told it.  Where nodes are to renew no permit, the
    next generation is about to be planned: none that cannot read it in the store may renew its own
    by this node's answer."""
    return plan.run, plan.generation + bool(plan.unheard)


class Fences:
    """What this node saw of the ranks of a script elsewhere; of this life of its agent."""

    def __init__(self) -> None:
        self._seen = (-1, -1)  # version and generation of the document
        self._missed_s: dict[str, float] = {}  # node -> since when the document lists it as unheard
        self._ended: set[str] = set()  # where all ranks of this generation were seen ended
        self._leaving: set[str] = set()  # nodes with ranks of it that get none next

    def see(self, ctx: Context, plan: Plan | None, version: int) -> None:
        """Each step, before anything is decided."""
        if plan is None or ctx.view.grade == TRAINER:
            return
        if version - self._seen[0] > 1:
            self._missed_s = {}  # a version that was skipped may have cleared it
        if plan.generation != self._seen[1]:
            self._ended, self._leaving = set(), set()
        self._seen = (version, plan.generation)
        self._missed_s = {node: self._missed_s.get(node, ctx.now.boot_s) for node in plan.unheard}
        self._ended |= {
            beat.node for beat in ctx.observed.beats
            if beat.run == plan.run and beat.generation == plan.generation and beat.ranks
            and all(rank.state == "ended" for rank in beat.ranks)}

    def missed(self, ctx: Context, plan: Plan) -> set[str]:
        """The nodes with a script's ranks that are to renew no permit: this one, who leads, hears
        nothing of them, or has no ranks for them next."""
        if ctx.view.grade == TRAINER:
            return set()
        settings, now = ctx.settings, ctx.now
        heard = {beat.node: beat for beat in ctx.observed.beats if beat.run == plan.run}
        early = now.boot_s - ctx.since_boot_s <= members.STALE_LEASES * settings.lease_s
        carrying = self._carrying(ctx, plan)
        silent = {node for node in carrying - {ctx.view.node}
                  if (not members.is_fresh(heard[node], now, settings) if node in heard
                      else not early)}
        return silent | self._leaving & carrying

    def waits(
        self, ctx: Context, plan: Plan | None, made: Plan, nodes: tuple[Member, ...]
    ) -> str:
        """Why `made`, a script's next generation, may not be planned yet; "" = it may.  A node that
        it gives ranks ends the old ones itself, and no world forms before."""
        if plan is None or plan.finished >= 0 or ctx.view.grade == TRAINER:
            return ""
        fence_s = members.FENCE_LEASES * ctx.settings.lease_s
        self._leaving = self._carrying(ctx, plan) - {node for _, node in made.ranks}
        held = []
        for one in nodes:
            if one.node not in self._leaving:
                continue
            missed_s = self._missed_s.get(one.node)
            left_s = fence_s if missed_s is None else missed_s + fence_s - ctx.now.boot_s
            if left_s > 0.0:
                ctx.wake(left_s)
            if left_s > 0.0 or not (one.fresh or one.lost):
                held.append(one.node)
        more = f" and {len(held) - NAMED_MAX} more" if len(held) > NAMED_MAX else ""
        return f"waiting until the permits of this script's ranks on " \
               f"{', '.join(held[:NAMED_MAX])}{more} have run out: nobody has seen them end, and " \
               "they may compute until then" if held else ""

    def _carrying(self, ctx: Context, plan: Plan) -> set[str]:
        """The nodes on which ranks of this plan may live; of its own this one knows it first hand.
        Before the first generation there are none."""
        if plan.generation == 0:
            return set()
        nodes, own = {node for _, node in plan.ranks} - self._ended, ctx.view.node
        lives = any(rank.generation == plan.generation and rank.ended is None
                    for rank in ctx.view.ranks)
        return nodes if lives else nodes - {own}
