"""Whether the attempt of a run that a launcher here was of still goes on somewhere, by the store.

Owns that judgement, for the user's own `holdfast accept`: it starts launchers again that the node's
or its own death ended.  Three answers and no guess: it goes on, it does not, or that cannot be
known now.  Nothing here gives a node ranks: a launcher that comes back stands before the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from ..core.model import Plan, StoreView, run_subject
from ..core.run.members import read_plan

RUNS_MAX = 64  # of one user's launchers on a node
GOES_ON: Final = "goes on"
OVER: Final = "over"
UNKNOWN: Final = "unknown"
HERE: Final = "here"  # a launcher serves it on this node

Run = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,48}$")]


class KnownAttempt(msgspec.Struct, forbid_unknown_fields=True):
    """A run, and which attempt of its name is meant; 0: that is to be told."""

    run: Run
    attempt: Annotated[int, Meta(ge=0)] = 0


class Still(msgspec.Struct, forbid_unknown_fields=True):
    """What `holdfast accept` asks."""

    runs: Annotated[list[KnownAttempt], Meta(max_length=RUNS_MAX)]


class Local(NamedTuple):
    """What this node itself knows of a run: whether a launcher serves it here now."""

    node: str
    is_served: bool


class Judged(NamedTuple):
    """What is known of one run, and the node whose launcher has to show it; "" for none."""

    state: str
    attempt: int
    text: str
    witness: str = ""


def judged(asked: KnownAttempt, uid: int, store: StoreView, local: Local) -> Judged:
    """By the store alone, for one run of this user's."""
    if not store.up:
        return Judged(UNKNOWN, 0, f"the store does not answer: {store.problem}")
    plan = store.docs.decoded(run_subject(asked.run), read_plan)
    if plan is None:
        return Judged(UNKNOWN, 0, "the store has no plan of it")
    if plan.owner != uid:
        return Judged(OVER, 0, "the run of this name is not known to be this user's")
    if plan.finished >= 0:
        return Judged(OVER, plan.attempt, f"it has ended with {plan.finished}")
    if asked.attempt and plan.attempt != asked.attempt:
        return Judged(OVER, plan.attempt, "the run of this name is another attempt")
    if local.is_served:
        # One whom the plan does not name may be of an attempt that is still to be planned.
        named = local.node in (*plan.members, *plan.spares)
        return Judged(HERE, plan.attempt if named else 0, "a launcher serves it here")
    return _led(plan, store, local.node)


def _led(plan: Plan, store: StoreView, node: str) -> Judged:
    """A document does not say whether anybody is left of the run.  Who leads renews a lease that
    ends by itself, and may lead another attempt that is not planned yet: then no launcher runs what
    is planned.  This node's own lease may be of its last life."""
    holder = next((one.holder for one in store.leases if one.run == plan.run), "")
    witness = next((place for _, place in plan.ranks if place != node), "")
    if holder in ("", node) or not witness:
        return Judged(UNKNOWN, plan.attempt, "no other node leads it now")
    return Judged(GOES_ON, plan.attempt, f"it goes on, and {holder} leads it", witness)


def confirmed(found: Judged, run: str, uid: int, said: Mapping[str, Any] | None) -> Judged:
    """With what the witness's agent says of itself; None: it does not answer.  Raises LookupError
    or TypeError for an answer that is none."""
    rows = said["answer"]["runs"] if said is not None else []
    owners = said["owners"] if said is not None else {}
    # A launcher that was just started has a generation of 0 until it begins with one.
    if any(row["run"] == run and row["connected"] and int(row["generation"]) >= found.attempt > 0
           and owners.get(run) == uid for row in rows):
        return found
    return Judged(UNKNOWN, found.attempt, f"{found.witness} does not tell that it runs it now")
