"""Pre-flights of several nodes: whom they name, how many of the good, and how long they take.

Owns five cases.  `single` and `double`: seeded faults in a simulated fleet, for the same core.
`real` and `real_double`: seeded faults made on network namespaces, one on four or two on six of
them, found by `holdfast check --peers` itself.  `preflight`: eight healthy namespaces, from when
the last peer is ready to the report, and the whole command.  The real ones need root, iproute2 and
nftables.

    python -m bench.peers [--cases single double real real_double preflight] [--runs 100]
                          [--preflights 10]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from .common import BENCH, ROOT, Results

sys.path.insert(0, str(ROOT / "tests"))

from fleet import Flight, Place, World, names
from nodes.harness import Node, Nodes
from waiting import wait_for

from holdfast.agent.core.checks.judge import BROKEN, SLOW

TOKEN = {"HOLDFAST_CHECK_TOKEN": "a token of this measurement"}
CABLE_MBIT, LIMIT_S, LOAD = 400, 180.0, 0.01
# A node's weight on a busy machine: what is measured is the pre-flight, not who else is here.
WEIGHT = 32
REAL_NODES, DOUBLE_NODES, PREFLIGHT_NODES = 4, 6, 8
KINDS = ("slow cable", "slow link", "half a processor", "dark node", "cut link", "one-way link",
         "frozen node")


def drawn(draw: random.Random, nodes: Sequence[str], count: int) -> tuple[World, dict[Place, str]]:
    """A world with so many faults, and what must be named: a bad node hides its links."""
    network: dict[Place, float] = {}
    compute: dict[str, float] = {}
    wrong: list[str] = []
    truth: dict[Place, str] = {}
    places: list[Place] = [*nodes, *combinations(nodes, 2)]
    for place in draw.sample(places, count):
        kind = draw.choice(("broken", "slow", "compute", "wrong") if isinstance(place, str)
                           else ("broken", "slow"))
        truth[place] = BROKEN if kind in ("broken", "wrong") else SLOW
        if kind == "compute":
            compute[str(place)] = draw.uniform(0.4, 0.55)
        elif kind == "wrong":
            wrong.append(str(place))
        else:
            network[place] = 0.0 if kind == "broken" else draw.uniform(0.3, 0.7)
    dark = {one for one in truth if isinstance(one, str) and one in network}
    return World(network, compute, tuple(wrong), load=LOAD), {
        one: state for one, state in truth.items() if isinstance(one, str) or not dark & set(one)}


def simulated(count: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    nodes = names(draw.randint(4 if count == 1 else 6, 16))
    world, truth = drawn(draw, nodes, count)
    flight = Flight(len(nodes), world, seed)
    return judged(flight.named(), truth, {
        "nodes": len(nodes), "rounds": flight.report.rounds, "tests": flight.report.tests})


def judged(named: dict[Place, str], truth: dict[Place, str],
           more: dict[str, Any]) -> dict[str, Any]:
    excluded = [one for one in named if isinstance(one, str) and one not in truth]
    return {"ok": named == truth and not excluded, "good_excluded": len(excluded),
            "truth": _words(truth), "named": _words(named),
            "why": "" if named == truth else "named otherwise", **more}


def _words(found: dict[Place, str]) -> dict[str, str]:
    return {one if isinstance(one, str) else " - ".join(one): state for one, state in found.items()}


def real(seed: int) -> dict[str, Any]:
    """One fault on four namespaces."""
    return _hurt(random.Random(seed), REAL_NODES, (KINDS[seed % len(KINDS)],))


def real_double(seed: int) -> dict[str, Any]:
    """Two faults on six namespaces, at no node in common."""
    draw = random.Random(seed)
    return _hurt(draw, DOUBLE_NODES, tuple(draw.choices(KINDS, k=2)))


def _hurt(draw: random.Random, count: int, kinds: Sequence[str]) -> dict[str, Any]:
    places = draw.sample(range(count), 2 * len(kinds))
    truth: dict[Place, str] = {}
    frozen: list[int] = []
    with Nodes(count, CABLE_MBIT, WEIGHT) as nodes:
        for kind, a, b in zip(kinds, places[::2], places[1::2]):
            link: Place = tuple(f"n{one}" for one in sorted((a, b)))  # type: ignore[assignment]
            if kind == "slow cable":
                nodes.rate(a, 0.7 * CABLE_MBIT)
            elif kind == "slow link":
                nodes.link_rate(a, b, 0.7 * CABLE_MBIT)
            elif kind == "half a processor":
                nodes.cpu(a, 0.5)
            elif kind == "dark node":
                nodes.blackhole(a)
            elif kind == "frozen node":
                a = a or b  # whoever coordinates is missed by all, and nobody is left to report
                frozen.append(a)
            else:
                nodes.partition(a, b, one_way=kind == "one-way link")
            truth[link if kind.endswith("link") else f"n{a}"] = (
                SLOW if kind[:4] in ("slow", "half") else BROKEN)
        found = flown(nodes, "--join-wait", "4", "--deadline", "3", frozen=frozen)
    if "rows" not in found:
        return {"ok": False, "why": json.dumps(found)[:400], "kind": ", ".join(kinds),
                "good_excluded": 0}
    named: dict[Place, str] = {row["node"]: row["state"] for row in found["rows"]
                               if row["state"] in (SLOW, BROKEN)}
    named |= {tuple(one["nodes"]): one["state"] for one in found["links"]}
    return judged(named, truth, {
        "kind": ", ".join(kinds), "nodes": count, "rounds": found["rounds"],
        "took_s": found["took_s"], "wall_s": found["wall_s"]})


def flown(nodes: Nodes, *more: str, frozen: Sequence[int] = ()) -> dict[str, Any]:
    """The report of whoever coordinated, and the seconds of the whole command.  `frozen`: nodes
    that stand still in the middle of a test."""
    words = [sys.executable, "-P", "-m", "holdfast.agent.cli", "check", "--peers", nodes.peers,
             "--json", "--python", sys.executable, *more]
    begin_s = time.monotonic()
    processes = [node.start(words, TOKEN, output="check.out") for node in nodes]
    for one in frozen:
        _in_a_test(nodes[one], processes[one])
        nodes.freeze(one)
    for number, process in enumerate(processes):
        if number not in frozen:
            process.wait(LIMIT_S)
    wall_s = time.monotonic() - begin_s
    said: dict[str, Any] = {}
    for node in nodes:
        try:
            one = json.loads(node.said("check.out"))
        except ValueError:
            said.setdefault("why", node.said("check.out")[-400:])
            continue
        if one.get("coordinator") == one["node"] and len(one["rows"]) == len(nodes.all):
            bad = sum(row["state"] == "unknown" for row in one["rows"])
            if "rows" not in said or bad < said["unknown"]:
                said = {**one, "unknown": bad, "wall_s": wall_s}
    return said


def _in_a_test(node: Node, process: subprocess.Popen[bytes]) -> None:
    """The command, what stands beside torch, and a test's child."""
    wait_for(lambda: len(node.pids()) > 2 or process.poll() is not None)


def whole_preflight() -> dict[str, Any]:
    with Nodes(PREFLIGHT_NODES, CABLE_MBIT, WEIGHT) as nodes:
        found = flown(nodes)
    good = [row for row in found.get("rows", ()) if row["state"] == "good"]
    ok = len(good) == PREFLIGHT_NODES and not found["links"]
    return {"ok": ok, "why": "" if ok else json.dumps(found)[:400], "nodes": PREFLIGHT_NODES,
            "rounds": found.get("rounds"), "tests": found.get("tests"),
            "good_excluded": PREFLIGHT_NODES - len(good),
            "took_s": found.get("took_s"), "wall_s": found.get("wall_s")}


RUN = {"single": lambda seed: simulated(1, seed), "double": lambda seed: simulated(2, seed),
       "real": real, "real_double": real_double, "preflight": lambda seed: whole_preflight()}
CASES = tuple(RUN)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.peers")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=100, help="seeds of each case of faults")
    parser.add_argument("--preflights", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help="two of each")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("peers", options.out)
    for case in options.cases:
        number = options.preflights if case == "preflight" else options.runs
        good = excluded = 0
        for seed in range(options.first, options.first + (2 if options.quick else number)):
            found = RUN[case](seed)
            results.add({"case": f"peers_{case}", "seed": seed, "load": os.getloadavg()[0],
                         **found})
            good, excluded = good + found["ok"], excluded + found["good_excluded"]
            if case not in ("single", "double") or not found["ok"]:
                print(case, seed, found, flush=True)
        print(f"{case}: {good} as they must be, {excluded} good nodes excluded", flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
