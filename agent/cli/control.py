"""The operator's commands: pause, exclude, drain, restart, close, inject, and reviews of incidents.

Owns the requests and the wait for their answers; the agent decides whether the caller may, and
keeps the reason in its journal.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any
from urllib.parse import quote

from holdfast.worker.exits import USAGE
from holdfast.worker.peers import user_name

from . import live
from .client import Agent, asking, choose, node_route, reach, run_route
from .text import Failure, line, print_json, seconds, show

CHECK_S = 600.0  # of the slowest checks an agent makes
ANSWER_S = 30.0  # a step takes milliseconds; an agent that is being restarted, seconds
LOOK_S = 0.05


@asking
def pause(options: argparse.Namespace) -> int:
    until = f" for {seconds(options.for_s)}" if options.for_s else ""
    return _hand(options, "pause", f"Holdfast will watch and not act{until}")


@asking
def resume(options: argparse.Namespace) -> int:
    return _hand(options, "resume", "Holdfast acts again")


def _hand(options: argparse.Namespace, verb: str, said: str) -> int:
    found = reach()
    body: dict[str, Any] = {"reason": options.reason, "by": user_name(os.getuid())}
    if getattr(options, "for_s", 0.0):
        body["for_s"] = options.for_s
    if options.fleet:  # each agent here, for a run's own has a store of its own
        return _ask(options, [agent for agent, _ in found], f"/api/v1/fleet/{verb}", body, "fleet",
                    said)
    if options.node:
        agents = [agent for agent, answer in found if answer["node"] == options.node]
        if not agents:
            nodes = ", ".join(sorted(answer["node"] for _, answer in found))
            raise Failure(f"no node {options.node!r} here (there are: {nodes})")
        # a node agent and private ones may share the node: each is asked
        return _ask(options, agents, node_route(options.node, verb), body,
                    f"node {options.node}", said)
    agent, _, run = choose(found, options.run)
    return _ask(options, [agent], run_route(run, verb), body, f"run {run}", said)


@asking
def restart(options: argparse.Namespace) -> int:
    agent, _, run = choose(reach(), options.run)
    body: dict[str, Any] = {"reason": options.reason, "by": user_name(os.getuid())}
    if options.rank is not None:
        body["rank"] = options.rank
    return _ask(options, [agent], run_route(run, "restart"), body, f"run {run}", "started again")


@asking
def incidents(options: argparse.Namespace) -> int:
    """To tell of them, or to review one."""
    if not options.ack and not options.label:
        return live.incidents(options)
    if not options.id:
        raise Failure("which incident? Give its ID, or the beginning of it", USAGE)
    return _review(options)


def _review(options: argparse.Namespace) -> int:
    """`incidents ID --ack | --label`: on each agent of the node that has it."""
    found = reach()
    if options.run:
        try:
            agent, answer, _ = choose(found, options.run)
            found = [(agent, answer)]
        except Failure:
            them = [agent for agent, _ in live.remembering([*found], options.run)]
            found = [pair for pair in found if pair[0] in them]
            if not found:
                raise
    one = live.one_incident(found, options.id)["id"]
    body: dict[str, Any] = {"reason": options.reason, "by": user_name(os.getuid())}
    if options.label:
        body["args"] = {"label": options.label == "true"}
    verb = "label" if options.label else "ack"
    agents = [agent for agent, _ in found
              if any(listed["id"] == one for listed in agent.get("/api/v1/incidents?all=1"))]
    answers = [agent.post(f"/api/v1/incidents/{quote(one, safe='')}/{verb}", body)
               for agent in agents]
    said = f"labelled {options.label}" if options.label else "acknowledged"
    return _done(options, answers, f"{one}: {said}")


@asking
def exclude(options: argparse.Namespace) -> int:
    return _node(options, "exclude", "no run gets ranks there until it is released")


@asking
def drain(options: argparse.Namespace) -> int:
    if not options.run and not options.node:
        raise Failure("what is to be drained? Give a node's name, or --run NAME", USAGE)
    if options.run:
        agent, _, run = choose(reach(), options.run)
        body = {"reason": options.reason, "by": user_name(os.getuid())}
        return _ask(options, [agent], run_route(run, "drain"), body, f"run {run}",
                    "its ranks save, and it ends with 75")
    return _node(options, "drain", "nothing of any run is left there, and none comes until it is "
                 "released", options.within)


@asking
def release(options: argparse.Namespace) -> int:
    return _node(options, "release", "runs may have ranks there again")


def _node(
    options: argparse.Namespace, verb: str, said: str, limit_s: float | None = None
) -> int:
    """Asks the node's own agents, else any agent that knows the node: the store tells all."""
    found = reach()
    own = [agent for agent, answer in found if answer["node"] == options.node]
    told = [agent for agent, answer in found
            if any(one["node"] == options.node for one in answer.get("nodes", ()))]
    if not own and not told:
        known = sorted({one["node"] for _, answer in found for one in answer.get("nodes", ())}
                       | {answer["node"] for _, answer in found})
        raise Failure(f"no node {options.node!r} is known here (there are: {', '.join(known)})")
    body = {"reason": options.reason, "by": user_name(os.getuid())}
    return _ask(options, own or told[:1], node_route(options.node, verb), body,
                f"node {options.node}", said, limit_s)


@asking
def check(options: argparse.Namespace) -> int:
    """`check --agent`: by the agent, which leaves a run's devices alone."""
    if not options.reason:
        raise Failure("--agent wants a --reason, for the journal", USAGE)
    agent, answer = reach()[0]
    body = {"reason": options.reason, "by": user_name(os.getuid()),
            "args": {"checks": options.name}}
    options.no_wait = False
    return _ask(options, [agent], node_route(answer["node"], "check"), body,
                f"node {answer['node']}", "checked: see holdfast why", CHECK_S)


@asking
def close(options: argparse.Namespace) -> int:
    found = reach()
    one = live.one_incident(found, options.id)["id"]
    # Each agent of the node has read the kernel's log for itself.
    agents = [agent for agent, _ in found
              if any(listed["id"] == one and listed["state"] != "closed"
                     for listed in agent.get("/api/v1/incidents"))]
    if not agents:
        raise Failure(f"incident {one} is closed already")
    route = f"/api/v1/incidents/{quote(one, safe='')}/close"
    body = {"reason": options.reason, "by": user_name(os.getuid())}
    return _ask(options, agents, route, body, one, "closed")


@asking
def inject(options: argparse.Namespace) -> int:
    agent, answer, run = choose(reach(), options.run)
    ranks = [one["rank"] for one in answer_run(answer, run).get("ranks", ())]
    if ranks and options.rank not in ranks:
        known = f"{min(ranks)} to {max(ranks)}"
        raise Failure(f"run {run} has no rank {options.rank} here: it has {known}")
    arguments: dict[str, Any] = {}
    if options.seconds is not None:
        arguments["seconds"] = options.seconds
    body = {
        "fault": options.fault, "rank": options.rank, "args": arguments,
        "reason": options.reason, "by": user_name(os.getuid())}
    done = agent.post(run_route(run, "inject"), body)
    return _done(options, [done], f"run {run}: {options.fault} on rank {options.rank}")


def answer_run(answer: dict[str, Any], run: str) -> dict[str, Any]:
    return next((one for one in answer["runs"] if one["run"] == run), {})


def _ask(
    options: argparse.Namespace, agents: list[Agent], route: str, body: dict[str, Any], what: str,
    said: str, wait_s: float | None = None,
) -> int:
    """Asks each of these agents, and waits until each has answered; Failure for a no."""
    asked = [(agent, agent.post(route, body)) for agent in agents]
    if options.no_wait:
        return _done(options, [answer for _, answer in asked], f"{what}: asked")
    wait_s = ANSWER_S if wait_s is None else wait_s
    limit_s = time.monotonic() + wait_s
    answers = [_answer(agent, answer, limit_s) for agent, answer in asked]
    for answer in answers:
        if answer["state"] == "refused":
            raise Failure(f"{what}: refused: {answer['text']}")
        if answer["state"] == "waiting":
            raise Failure(f"{what}: asked, and not answered within {wait_s:g} s; the agent still "
                          "has it: see `holdfast status`")
    return _done(options, answers, f"{what}: {said}")


def _answer(agent: Agent, asked: dict[str, Any], limit_s: float) -> dict[str, Any]:
    route = f"/api/v1/requests/{quote(asked['id'], safe='')}"
    while True:
        answer: dict[str, Any] = agent.get(route)
        if answer["state"] != "waiting" or time.monotonic() > limit_s:
            return {**asked, **answer}
        time.sleep(LOOK_S)


def _done(options: argparse.Namespace, answers: list[Any], said: str) -> int:
    if options.json:
        print_json(answers)
    else:
        show([line(said)])
    return 0
