"""The whole run, as any of its agents knows it: each node's part, and how old its word is.

Owns the view of other nodes in the documents that people read; their words are beats.  Decides
nothing.
"""

from __future__ import annotations

from typing import Any

from ..core.model import Beat, Plan, RankView, RunView
from ..daemon.state import AgentState

RANKS_SHOWN = 64  # of one node


def nodes(state: AgentState, view: RunView) -> list[dict[str, Any]]:
    """A row for each node that has a launcher of this run or a place in its plan; nothing where
    the run is of one node."""
    observed, now = state.snapshot.observed, state.snapshot.now
    plan = plan_of(state, view.run)
    beats = {beat.node: beat for beat in observed.beats if beat.run == view.run}
    planned = {*plan.members, *plan.spares} if plan is not None else set()
    names = {*beats, *planned, state.name}
    if state.config.core_settings().single_node or names == {state.name}:
        return []
    leader = next((one.holder for one in observed.store.leases if one.run == view.run), "")
    rows = []
    for name in sorted(names):
        beat = beats.get(name)
        here = name == state.name
        ranks = view.ranks if here else beat.ranks if beat is not None else ()
        rows.append({
            "node": name,
            "here": here,
            "leads": name == leader,
            "part": _part(plan, name),
            "word": _word(beat, here),
            "age_s": 0.0 if here else round(now.boot_s - beat.boot_s, 1) if beat else None,
            "generation": view.generation if here else beat.generation if beat else 0,
            "fatal": beat.fatal if beat is not None else "",
            "held": beat.held if beat is not None else "",
            "ranks": [_rank(rank) for rank in ranks[:RANKS_SHOWN]],
        })
    return rows


def plan_of(state: AgentState, run: str) -> Plan | None:
    return next((plan for plan in state.snapshot.decision.plans if plan.run == run), None)


def trains(rows: list[dict[str, Any]], plan: Plan | None) -> bool:
    """Whether every rank of the plan runs, as far as its nodes' words go."""
    running = [rank for row in rows if row["word"] in ("here", "heard") for rank in row["ranks"]
               if plan is not None and rank["state"] == "running"
               and rank["generation"] == plan.generation]
    return plan is not None and 0 < len(plan.ranks) == len(running)


def _part(plan: Plan | None, node: str) -> str:
    if plan is None:
        return ""
    placed = [rank for rank, place in plan.ranks if place == node]
    if placed:
        return "ranks " + ", ".join(map(str, sorted(placed)[:RANKS_SHOWN]))
    return "spare" if node in plan.spares else ""


def _word(beat: Beat | None, here: bool) -> str:
    if here:
        return "here"
    if beat is None:
        return "not heard of"
    return "lost" if beat.lost else "heard"


def _rank(rank: RankView) -> dict[str, Any]:
    return {"rank": rank.rank, "pid": rank.pid, "state": rank.state, "step": rank.step,
            "generation": rank.generation, "phase": rank.phase}
