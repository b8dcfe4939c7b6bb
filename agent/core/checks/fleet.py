"""Whether a node with a confirmed critical may be drained: what the others have, and how many are.

Owns the marks that nodes leave each other in the scheduler, and the judgement over them.  A node is
drained when the others do not have the same, and while few are drained by us.  Where a job is about
to start the number of those counts for nothing: the job goes elsewhere or fails here.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..model import Settings, Value
from ..nodes.breaker import is_open

ANNOUNCE, WAIT, DRAIN, HOLD, LEAVE, OUT = "announce", "wait", "drain", "hold", "leave", "out"
REASON_MAX = 240
COMMON = "a common cause, no node is drained for it"
MARK = re.compile(r"holdfast: (\w+) critical(?: @(\d+))?")


class FleetNode(Value, frozen=True):
    """A node as its scheduler sees it: our announcement stands in `comment`, why it is drained in
    `reason`."""

    name: str
    partitions: tuple[str, ...] = ()
    drained: bool = False
    reason: str = ""
    comment: str = ""


class Decision(Value, frozen=True):
    """What is to be done about a node that fails a check, and why.  OUT: it is drained already, by
    whomever."""

    act: str
    why: str
    tells: bool = False  # of the nodes with a common cause, the one that says so

    @property
    def refuses(self) -> bool:
        """Whether no job may begin there, also one that got the node before it was drained."""
        return self.act in (DRAIN, OUT)


def announcement(check: str, now_s: float) -> str:
    return f"holdfast: {check} critical @{int(now_s)}"


def reason(check: str, why: str) -> str:
    """In the scheduler's words: the check, and its sentence with value and limit."""
    return f"holdfast: {check} critical: {why}"[:REASON_MAX]


def check_of(text: str) -> str:
    """The check that our mark names; "" for somebody else's words."""
    found = MARK.match(text)
    return found[1] if found else ""


def decide(name: str, check: str, why: str, nodes: Sequence[FleetNode], now_s: float,
           wait_s: float, share: float, settings: Settings) -> Decision:
    """`why`: the verdict's sentence; `wait_s`: how long an announcement stands before it is acted
    on, so that nodes with the same can be seen; `share`: of a partition, drained by us at most."""
    here = next((one for one in nodes if one.name == name), None)
    if here is None:
        return Decision(LEAVE, f"the scheduler knows no node {name}")
    announced = MARK.match(here.comment)
    if not here.drained and (announced is None or announced[1] != check):
        return Decision(ANNOUNCE, f"{check} is critical")
    age_s = now_s - float(announced[2] or 0) if announced is not None else 0.0
    if not here.drained and age_s < wait_s:
        left_s = wait_s - age_s
        return Decision(WAIT, f"drained in {left_s:.0f} s, unless other nodes have the same")
    same = [one for one in nodes if check in (
        check_of(one.comment), check_of(one.reason) if one.drained else "")]
    common, counted = is_open({check: tuple(one.name for one in same)}, check, len(nodes), settings)
    if common:
        told = any(COMMON in one.comment for one in same)
        return Decision(HOLD, f"{counted}: {COMMON}",
                        not told and name == min(one.name for one in same))
    if here.drained:
        return Decision(OUT, f"drained already: {here.reason}")
    beside = [one for one in nodes if set(one.partitions) & set(here.partitions)] or [here]
    ours = sum(one.drained and bool(check_of(one.reason)) for one in beside)
    most = max(1, int(share * len(beside)))
    if ours + 1 > most:
        return Decision(HOLD, f"{ours} of {len(beside)} nodes are drained by these checks, and "
                              f"{most} may be (checks.drain_share)")
    return Decision(DRAIN, reason(check, why))
