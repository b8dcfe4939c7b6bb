"""Commands that ask the agents what goes on: status, why, incidents, ledger.

Owns which answers are asked for and combined; report.py owns how they read.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from . import report
from .client import Agent, Answering, asking, choose, reach
from .ended import ended_run
from .text import Failure, Line, line, show
from .text import print_json as print_json

Found = list[tuple[Answering, dict[str, Any]]]


def of_run(name: str | None) -> Found:
    """The agents to be asked.  A run whose own agent has ended is asked from its journal, one that
    a node's agent remembers from that."""
    found: Found = []
    try:
        found = list(reach())
        if name:
            agent, answer, _ = choose(found, name)
            found = [(agent, answer)]
        return found
    except Failure:
        past = ended_run(name) if name else None
        if past is not None:
            return [past]
        remembered = remembering(found, name)
        if not remembered:
            raise
        return remembered


def remembering(found: Found, run: str | None) -> Found:
    """The agents that had this run and have it no more."""
    them: Found = []
    for agent, answer in found:
        with contextlib.suppress(Failure):  # of a release before there were jobs
            if any(one["run"] == run for one in agent.get("/api/v1/jobs")):
                them.append((agent, answer))
    return them


def of_fleet(found: Found, what: str) -> list[dict[str, Any]]:
    """What the nodes without an agent here say: a row each, its `answer` None where there is none.
    """
    here = {answer["node"] for _, answer in found}
    rows: dict[str, dict[str, Any]] = {}
    for agent, answer in found:
        if len(answer.get("nodes", ())) > 1:
            for row in agent.get(f"/api/v1/fleet/{what}")["nodes"]:
                known = rows.get(row["node"])
                if row["node"] not in here and (known is None or known["problem"]):
                    rows[row["node"]] = row
    return [rows[node] for node in sorted(rows)]


@asking
def status(options: argparse.Namespace) -> int:
    found: list[tuple[Agent, dict[str, Any]]] = []
    try:
        found = reach()
        if options.run and not report.is_elsewhere(found, options.run):
            agent, answer, _ = choose(found, options.run)
            found = [(agent, answer)]
    except Failure:
        if options.run and (ended_run(options.run) or remembering([*found], options.run)):
            raise Failure(f"run {options.run} has ended: `holdfast incidents --run {options.run}` "
                          f"and `holdfast ledger --run {options.run}` say how it went") from None
        raise
    if options.json:
        print_json([answer for _, answer in found])
        return 0
    show(report.status([answer for _, answer in found], options.run))
    show(line(f"page: {agent.address()}") for agent, _ in found if agent.address())
    return 0


@asking
def why(options: argparse.Namespace) -> int:
    found: Found = list(reach())
    answers = [answer for _, answer in found]
    if options.node:
        nodes = sorted({answer["node"] for answer in answers})
        answers = [answer for answer in answers if answer["node"] == options.node]
        if not answers:
            return _of_another(options, found, nodes)
    if options.json:
        keys = ("node", "faults", "collectors", "store_up", "paused", "fleet_paused",
                "breaker_open", "nodes")
        print_json([{key: answer.get(key) for key in keys} for answer in answers])
        return 0
    for answer in answers:
        show(report.why(answer))
    return 0


def _of_another(options: argparse.Namespace, found: Found, nodes: list[str]) -> int:
    """A node whose agent is not here: its own word, or what the others know of it."""
    rows = {one["node"]: one for _, answer in found for one in answer.get("nodes", ())}
    said = next((one for one in of_fleet(found, "status") if one["node"] == options.node), None)
    if said is not None and said["answer"] is not None and not said["problem"]:
        print_json([said]) if options.json else show(report.why(said["answer"]))
        return 0
    row = rows.get(options.node)
    if row is None:
        names = ", ".join(sorted({*nodes, *rows}))
        raise Failure(f"no node {options.node!r} here (there are: {names})")
    print_json([row]) if options.json else show(report.why_another(row))
    return 0


@asking
def incidents(options: argparse.Namespace) -> int:
    found = of_run(options.run)
    if options.refused:
        return _refused(options, found)
    if options.asked:
        return _asked(options, found)
    if options.alerts:
        return _alerts(options, found)
    if options.id:
        one = one_incident(found, options.id)
        print_json(one) if options.json else show(report.incident(one))
        return 0
    route = "/api/v1/incidents?all=1" if options.all else "/api/v1/incidents"
    others = of_fleet(found, "incidents")
    listed = _merged(
        [one for agent, _ in found for one in agent.get(route)],
        *([one | {"node": row["node"], "age_s": row["age_s"]} for one in row["answer"] or ()]
          for row in others))
    if options.run:
        listed = [one for one in listed if one.get("run") == options.run]
    if options.would_have:
        listed = [one for one in listed if one.get("would_have")]
    listed.sort(key=lambda one: -one["opened_wall_s"])
    if options.json:
        print_json(listed)
        return 0
    if options.run:
        show(_by_attempt(listed, options.would_have))
    else:
        show(report.incidents(listed, options.would_have))
        show(line(f"of several attempts under one name: holdfast incidents --run {run}")
             for run in _tried_again(listed))
    show(report.words(others))
    if listed:
        show([(), line("one of them, whole: holdfast incidents ID")])
    return 0


def _by_attempt(listed: list[dict[str, Any]], would_have: bool) -> list[Line]:
    """The incidents of one run, each attempt's under its number where there are several."""
    if not _tried_again(listed):
        return report.incidents(listed, would_have)
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for one in listed:
        groups.setdefault((one.get("attempt", 1), one.get("node", "")), []).append(one)
    lines: list[Line] = []
    for attempt, node in sorted(groups, key=lambda key: (-key[0], key[1])):
        lines += [line(f"attempt {attempt}{f' of {node}' if node else ''}"),
                  *report.incidents(groups[attempt, node], would_have), ()]
    return lines


def _tried_again(listed: list[dict[str, Any]]) -> list[str]:
    """The runs whose incidents are of several attempts.  Each node counts for itself: it may have
    come to a run later."""
    tries: dict[tuple[str, str], set[int]] = {}
    for one in listed:
        if one.get("run"):
            key = one["run"], one.get("node", "")
            tries.setdefault(key, set()).add(one.get("attempt", 1))
    return sorted({run for (run, _), numbers in tries.items() if len(numbers) > 1})


def _merged(*lists: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each incident once, by the first that tells it."""
    found: dict[str, dict[str, Any]] = {}
    for one in (one for told in lists for one in told):
        found.setdefault(one["id"], one)
    return list(found.values())


def _refused(options: argparse.Namespace, found: Found) -> int:
    """Of agents of before there is no such list."""
    listed = [one for agent, _ in found for one in agent.get("/api/v1/refusals")]
    listed.sort(key=lambda one: -one["wall_s"])
    print_json(listed) if options.json else show(report.refused(listed))
    return 0


def _asked(options: argparse.Namespace, found: Found) -> int:
    listed = [one for agent, _ in found for one in agent.get("/api/v1/requests")]
    listed.sort(key=lambda one: -one["wall_s"])
    print_json(listed) if options.json else show(report.asked(listed))
    return 0


def _alerts(options: argparse.Namespace, found: Found) -> int:
    listed = [one for agent, _ in found for one in agent.get("/api/v1/alerts")]
    listed.sort(key=lambda one: -one["taken_wall_s"])
    print_json(listed) if options.json else show(report.alerts(listed))
    return 0


def one_incident(found: Sequence[tuple[Answering, dict[str, Any]]], wanted: str) -> dict[str, Any]:
    """The incident whose id begins so; the exact one where several do."""
    matches: dict[str, tuple[Answering, str]] = {}
    for agent, _ in found:
        for one in agent.get("/api/v1/incidents?all=1"):
            if one["id"].startswith(wanted):
                matches[one["id"]] = (agent, one["id"])
    if not matches and found:
        agent = found[0][0]
        matches = {one["id"]: (agent, one["id"]) for row in of_fleet(list(found), "incidents")
                   for one in row["answer"] or () if one["id"].startswith(wanted)}
    if not matches:
        raise Failure(f"no incident {wanted!r}: `holdfast incidents --all` lists them")
    if len(matches) > 1 and wanted not in matches:
        raise Failure(f"{wanted!r} fits several: {', '.join(sorted(matches)[:8])}")
    agent, identity = matches.get(wanted) or next(iter(matches.values()))
    answer: dict[str, Any] = agent.get(f"/api/v1/incidents/{quote(identity, safe='')}")
    return answer


@asking
def ledger(options: argparse.Namespace) -> int:
    found = of_run(options.run)
    answers = {answer["node"]: agent.get("/api/v1/ledger") for agent, answer in found}
    others = of_fleet(found, "ledger")
    answers |= {row["node"]: row["answer"] for row in others if row["answer"] is not None
                and (not options.run or options.run in row["answer"].get("runs", {}))}
    if options.json:
        print_json(answers)
        return 0
    for index, (node, one) in enumerate(answers.items()):
        if len(answers) > 1:
            show([*([()] if index else []), line(f"node {node}")])
        if options.run and options.run not in one.get("runs", {}):
            raise Failure(f"the ledger of {node} does not know run {options.run!r} yet")
        show(report.ledger(one, options.run))
        show(report.attempts(one, options.run))
    if len(answers) > 1 and not options.run:
        show([(), line(f"all {len(answers)} nodes")])
        show(report.ledger(report.together(list(answers.values()))))
    show(report.words(others))
    return 0
