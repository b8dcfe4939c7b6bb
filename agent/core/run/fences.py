"""Whether the ranks of a script on a silent node must have ended by now.

Owns how long a script's next generation waits for the permits of the one before.  A node that hears
nobody, but reads the store, has its ranks compute on with good reason until it reads that the
leader misses it: from then on it renews no permit.  What it read before that holds for one lease.
The trainer needs none of this: what an old generation commits is void.  Pure.
"""

from __future__ import annotations

from ..model import SCRIPT, Plan
from . import members
from .layout import Member
from .state import Context

FENCE_LEASES = 1.2  # a permit's one, and a margin: for clocks, and until a killed process is gone
NAMED_MAX = 4  # nodes that a reason names


def may_renew(plan: Plan, node: str) -> bool:
    """Whether a node goes on with its ranks of this plan, whose leader does not miss it."""
    return node not in plan.unheard


class Fences:
    """What this node saw of the ranks of a script elsewhere; of this life of its agent."""

    def __init__(self) -> None:
        self._seen = (-1, -1)  # version and generation of the document
        self._missed_s: dict[str, float] = {}  # node -> since when the document lists it as unheard
        self._ended: set[str] = set()  # where all ranks of this generation were seen ended

    def see(self, ctx: Context, plan: Plan | None, version: int) -> None:
        """Each step, before anything is decided."""
        if plan is None or ctx.view.grade != SCRIPT:
            return
        if version - self._seen[0] > 1:
            self._missed_s = {}  # a version that was skipped may have cleared it
        if plan.generation != self._seen[1]:
            self._ended = set()
        self._seen = (version, plan.generation)
        self._missed_s = {node: self._missed_s.get(node, ctx.now.boot_s) for node in plan.unheard}
        self._ended |= {
            beat.node for beat in ctx.observed.beats
            if beat.run == plan.run and beat.generation == plan.generation and beat.ranks
            and all(rank.state == "ended" for rank in beat.ranks)}

    def missed(self, ctx: Context, plan: Plan) -> set[str]:
        """The nodes with a script's ranks of which this one, who leads, hears nothing: they are to
        read that they are missed."""
        if ctx.view.grade != SCRIPT:
            return set()
        settings, now = ctx.settings, ctx.now
        heard = {beat.node: beat for beat in ctx.observed.beats if beat.run == plan.run}
        early = now.boot_s - ctx.since_boot_s <= members.STALE_LEASES * settings.lease_s
        return {node for node in self._carrying(ctx, plan)
                if (not members.is_fresh(heard[node], now, settings) if node in heard
                    else not early)}

    def waits(self, ctx: Context, plan: Plan | None, nodes: tuple[Member, ...]) -> str:
        """Why a script's next generation may not be planned yet; "" = it may."""
        if plan is None or plan.finished >= 0 or ctx.view.grade != SCRIPT:
            return ""
        carrying, fence_s = self._carrying(ctx, plan), FENCE_LEASES * ctx.settings.lease_s
        held = []
        for one in nodes:
            if one.node not in carrying or one.fresh:
                continue
            missed_s = self._missed_s.get(one.node)
            left_s = fence_s if missed_s is None else missed_s + fence_s - ctx.now.boot_s
            if left_s > 0.0:
                ctx.wake(left_s)
            if left_s > 0.0 or not one.lost:
                held.append(one.node)
        more = f" and {len(held) - NAMED_MAX} more" if len(held) > NAMED_MAX else ""
        return f"waiting until the permits of this script's ranks on " \
               f"{', '.join(held[:NAMED_MAX])}{more} have run out: nothing is heard of them, and " \
               "they may compute until then" if held else ""

    def _carrying(self, ctx: Context, plan: Plan) -> set[str]:
        """The other nodes on which ranks of this plan may live."""
        return {node for _, node in plan.ranks} - self._ended - {ctx.view.node}
