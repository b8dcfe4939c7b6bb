"""All nodes, as any of their agents knows them: each one's part of a run, and how old its word is.

Owns the view of other nodes in the documents that people read; their words are beats, or answers
to daemon/other_nodes.py's questions.  Decides nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.detect.ranks import known_causes
from ..core.model import Beat, Documents, Plan, RankView, RunView, node_subject, run_subject
from ..core.run.members import read_node, read_plan
from ..daemon.state import AgentState
from . import visibility

RANKS_SHOWN = 64  # of one node
RUNS_SHOWN = 256  # that have no launcher here


class Word(NamedTuple):
    """What one node says, or said last.  `owners`: run or incident -> uid."""

    node: str
    age_s: float | None  # None: nothing was ever heard
    problem: str  # why it says nothing now; "" = it does
    answer: Any
    owners: dict[str, int]


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
            "part": _part(plan, name, observed.store.docs),
            "word": _word(beat, here),
            "age_s": 0.0 if here else round(now.boot_s - beat.boot_s, 1) if beat else None,
            "generation": view.generation if here else beat.generation if beat else 0,
            "fatal": beat.fatal if beat is not None else "",
            "held": beat.held if beat is not None else "",
            "ranks": [_rank(rank) for rank in ranks[:RANKS_SHOWN]],
        })
    return rows


def elsewhere(state: AgentState) -> list[dict[str, Any]]:
    """The runs of which other nodes have launchers, and this one has none."""
    observed = state.snapshot.observed
    here = {view.run for view in observed.runs}
    runs = sorted({beat.run for beat in observed.beats if beat.run} - here)
    return [_run_elsewhere(state, run) for run in runs[:RUNS_SHOWN]]


def _run_elsewhere(state: AgentState, run: str) -> dict[str, Any]:
    observed, now = state.snapshot.observed, state.snapshot.now
    beats = [beat for beat in observed.beats if beat.run == run]
    plan = observed.store.docs.decoded(run_subject(run), read_plan)
    leader = next((one.holder for one in observed.store.leases if one.run == run), "")
    generation = max([plan.generation if plan is not None else 0,
                      *(beat.generation for beat in beats)])
    ranks = [rank for beat in beats for rank in beat.ranks if rank.generation == generation]
    return {
        "run": run, "uid": max(beat.uid for beat in beats), "leader": leader,
        "grade": beats[0].grade, "generation": generation,
        "step": min((rank.step for rank in ranks), default=0),
        "running": sum(rank.state == "running" for rank in ranks),
        "world": len(plan.ranks) if plan is not None else 0,
        "nodes": [{"node": beat.node, "word": _word(beat, False),
                   "part": _part(plan, beat.node, observed.store.docs),
                   "age_s": round(now.boot_s - beat.boot_s, 1)}
                  for beat in sorted(beats, key=lambda beat: beat.node)],
    }


def row(what: str, word: Word, who: visibility.Reader) -> dict[str, Any]:
    """One node's answer as this reader may see it."""
    answer = as_read(what, word, who) if word.answer is not None else None
    return {"node": word.node, "age_s": word.age_s, "problem": word.problem, "answer": answer}


def as_read(what: str, word: Word, who: visibility.Reader) -> Any:
    """The answer alone: whose a run is says the node that has it."""
    who = who._replace(of_run=word.owners.get, of_incident=word.owners.get)
    if what == "status":
        return visibility.status(word.answer, who)
    if what == "incident":
        return visibility.incidents([word.answer], who)[0]
    return visibility.incidents(word.answer, who) if what == "incidents" else word.answer


def plan_of(state: AgentState, run: str) -> Plan | None:
    return next((plan for plan in state.snapshot.decision.plans if plan.run == run), None)


def trains(rows: list[dict[str, Any]], plan: Plan | None) -> bool:
    """Whether every rank of the plan runs, as far as its nodes' words go."""
    running = [rank for row in rows if row["word"] in ("here", "heard") for rank in row["ranks"]
               if plan is not None and rank["state"] == "running"
               and rank["generation"] == plan.generation]
    return plan is not None and 0 < len(plan.ranks) == len(running)


def _part(plan: Plan | None, node: str, docs: Documents) -> str:
    """A plan may name who leads and is excluded, for others' permits ask it: no spare is that."""
    if plan is None:
        return ""
    placed = [rank for rank, place in plan.ranks if place == node]
    if placed:
        return "ranks " + ", ".join(map(str, sorted(placed)[:RANKS_SHOWN]))
    if docs.decoded(node_subject(node), read_node).excluded:
        return "excluded"
    return "spare" if node in plan.spares else ""


def _word(beat: Beat | None, here: bool) -> str:
    if here:
        return "here"
    if beat is None:
        return "not heard of"
    if beat.lost:
        return "lost"
    live = [rank for rank in beat.ranks if rank.state in ("starting", "running")]
    stands = beat.suspended and all(map(known_causes.stands_still, live))
    return "suspended" if stands else "heard"


def _rank(rank: RankView) -> dict[str, Any]:
    return {"rank": rank.rank, "pid": rank.pid, "state": rank.state, "step": rank.step,
            "generation": rank.generation, "phase": rank.phase}
