"""Which run holds a GPU of this node: one at a time, whoever asks for it.

Owns the order among the runs of a node that ask for the same devices.  Each launcher says which it
would take (worker/devices.py); a run whose ranks live here has them, then one whose plan
has ranks for this node, then the one that asked first.  A spare keeps nobody away: several runs may
share it, and the first that needs it takes it.  Judged by the node's own agent, which sees all runs
of the node; other nodes read its word in its beats.  Pure.
"""

from __future__ import annotations

from ..model import RunView, Value, run_subject
from ..model.subject import RUN
from ..run import members
from ..run.state import Context

COMPUTES, PLANNED, ASKS, SPARE = range(4)  # how a run stands to the devices of this node
# Of two that have both waited so long the name decides: each may have come first on one of the
# nodes that both need.  A run that has begun is not one of them: it keeps the nodes of its plan,
# also while it waits for another.
TURN_S = 30.0
BACK_S = 5.0  # in which the launchers of an agent that has just begun are back
NAMED_MAX = 4  # devices that a reason names


class Holder(Value, frozen=True):
    """Who holds devices that another run asks for."""

    run: str
    devices: tuple[str, ...]
    user: int = -1

    @property
    def words(self) -> str:
        more = len(self.devices) - NAMED_MAX
        names = ", ".join(self.devices[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
        whose = f" (uid {self.user})" if self.user >= 0 else ""
        return f"GPU {names}: run {self.run}{whose} has it" if len(self.devices) == 1 \
            else f"GPUs {names}: run {self.run}{whose} has them"


def holder(ctx: Context) -> Holder | None:
    """The run because of which this one gets no ranks on this node now; None = nobody's."""
    view, asked = ctx.view, set(ctx.view.devices)
    if not asked:
        return None
    here = [one for one in ctx.observed.runs
            if one.run != view.run and one.state != "done" and not one.gone]
    for other in sorted(here, key=lambda one: one.run):
        shared = tuple(one for one in other.devices if one in asked)
        if shared and _goes_before(ctx, other, view):
            return Holder(other.run, shared, other.uid)
    return None


def awaited(ctx: Context) -> str:
    """The run whose launcher has still to come back to an agent that has just begun: which devices
    it has is not known; "" = none."""
    left_s = ctx.since_boot_s + BACK_S - ctx.now.boot_s
    if not ctx.view.devices or left_s <= 0.0:
        return ""
    here = {one.run for one in ctx.observed.runs}
    for _, doc in ctx.observed.store.docs.of(RUN):
        plan = members.read_plan(doc)
        if plan is not None and plan.run not in here and plan.finished < 0 and any(
                node == ctx.view.node for _, node in plan.ranks):
            ctx.wake(left_s)
            return plan.run
    return ""


def _goes_before(ctx: Context, other: RunView, view: RunView) -> bool:
    theirs, own = _standing(ctx, other), _standing(ctx, view)
    if theirs != own or own in (COMPUTES, SPARE):
        return theirs < own
    waited_s = ctx.now.boot_s - max(other.registered_boot_s, view.registered_boot_s)
    if own == PLANNED or waited_s >= TURN_S and not ctx.settings.single_node:
        return other.run < view.run
    return (other.registered_boot_s, other.run) < (view.registered_boot_s, view.run)


def _standing(ctx: Context, view: RunView) -> int:
    if any(rank.state != "ended" for rank in view.ranks):
        return COMPUTES
    plan = ctx.observed.store.docs.decoded(run_subject(view.run), members.read_plan)
    if plan is None or plan.finished >= 0 or plan.generation == 0:
        return ASKS
    if not any(node == view.node for _, node in plan.ranks):
        return SPARE
    # Between two generations its ranks have ended, and it goes on in place (StartGate.taken).
    return COMPUTES if 0 < view.generation >= plan.generation - 1 else PLANNED
