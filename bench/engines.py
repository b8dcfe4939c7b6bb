"""The engines beside what they are measured against, over nodes whose links are shaped.

    python -m bench.engines [--runs 2] [--cases mics hops sdp slow plans] [--quick]

Five cases.  `mics`: groups inside two nodes against sharding over all four ranks, taking turns, and
once with one micro-step instead of four.  `hops`: sharding over all ranks of two nodes, gathered in
two hops and in one.  `sdp`: balanced parts against torch's all-reduce, over four nodes of two
ranks.  `slow`: bench/repartition.py's pipeline of which one rank becomes slow.  `plans`:
bench/pipeline.py's partition and bubbles.  Nodes are network namespaces (root, iproute2); what
crosses between them is counted at their interfaces, with headers.  All ranks share this machine's
processors: what is computed is small, so that the links are what is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import common, pipeline, repartition
from .common import BENCH, ROOT, Failed, Results

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes

PORT, LIMIT_S, STEPS = 29400, 300.0, 6
CABLE_MBIT = 200.0
WEIGHT = 32  # of the nodes on a busy machine: what is measured is not who else is here
TESTS = ROOT / "tests/unit/trainer"
WIDTH = 640  # of bench's model: 1.2 million weights, 5 MB of gradients
MODEL = ("model=blocks:Model", "data=blocks:Data", f"model_options.width={WIDTH}", "batch=2",
         "data_options.samples=64", f"steps={STEPS}", "checkpoint.every=0",
         "snapshot.enabled=false", "optimizer.warmup_steps=0")


BESIDE = {"mics": "fsdp", "hops": "flat", "sdp": "ddp"}  # case -> what it is measured against
FLAT = ("strategy=fsdp", "fsdp.hierarchical=false")


class Measured(NamedTuple):
    """One run of a world: medians over its steps but the first, and one step's gradients."""

    step_s: float
    sent: tuple[int, ...]  # bytes in a step, by node
    gradients: dict[str, Any]


def world(nodes: Nodes, ranks: int, settings: Sequence[str], tag: str) -> Measured:
    """The trainer on all nodes at once, `ranks` on each."""
    import torch

    count = len(nodes.all)
    out = nodes.home / tag
    out.mkdir()
    places = [f"topology.{rank}=n{rank // ranks}" for rank in range(count * ranks)]
    started = [
        node.start(
            [sys.executable, "-m", "bench.engines_rank", str(node.number * ranks), str(ranks),
             str(count * ranks), nodes[0].address, str(PORT), str(out), *MODEL, *places,
             f"work_dir={out}", *settings],
            {"PYTHONPATH": os.pathsep.join([str(ROOT / ".types"), str(ROOT), str(TESTS)]),
             "OMP_NUM_THREADS": "1"}, output=f"{tag}.out") for node in nodes]
    codes = [process.wait(LIMIT_S) for process in started]
    if any(codes):
        raise Failed(f"{tag} ended with {codes}: " + nodes[0].said(f"{tag}.out")[-400:])
    rows = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count * ranks)]
    ends_s = [end_s for end_s, _ in rows[0]]
    sent = tuple(
        round((rows[node * ranks][-1][1] - rows[node * ranks][0][1]) / (STEPS - 1))
        for node in range(count))
    parts = [torch.load(out / f"gradients-{rank}.pt") for rank in range(count * ranks)]
    shutil.rmtree(out)
    return Measured(statistics.median(b - a for a, b in zip(ends_s, ends_s[1:], strict=False)),
                    sent, whole(parts, settings, ranks))


def whole(parts: list[dict[str, Any]], settings: Sequence[str], ranks: int) -> dict[str, Any]:
    """Of the shards of one group of ranks."""
    import torch

    if "strategy=ddp" in settings or "strategy=sdp" in settings:
        return parts[0]
    group = parts[:ranks] if "strategy=mics" in settings else parts
    return {name: torch.cat([part[name] for part in group if name in part]) for name in parts[0]}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of any gradient, by the largest gradient."""
    scale = max(float(gradient.abs().max()) for gradient in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / scale


def mics(runs: int) -> Iterator[dict[str, Any]]:
    """Two nodes of two ranks; four micro-steps, and mics once with one."""
    sharded = {"mics": ("strategy=mics", "mics.group=2"), "fsdp": FLAT}
    found: dict[str, list[Measured]] = {name: [] for name in sharded}
    with Nodes(2, CABLE_MBIT, WEIGHT) as nodes:
        for turn in range(runs):
            for name, settings in sharded.items():
                found[name].append(world(
                    nodes, 2, (*settings, "micro_batches=16"), f"{name}-{turn}"))
        once = world(nodes, 2, (*sharded["mics"], "micro_batches=4"), "mics-once")
        plain = world(nodes, 2, ("strategy=ddp", "micro_batches=16"), "ddp")
    ours, theirs = found["mics"], found["fsdp"]
    faster = statistics.median(one.step_s for one in theirs) / statistics.median(
        one.step_s for one in ours)
    sent = statistics.mean(max(one.sent) for one in ours)
    apart = max(distance(plain.gradients, found[name][0].gradients) for name in sharded)
    per_micro_step = sent / 4 / max(once.sent)
    yield {"case": "mics", "nodes": 2, "ranks": 4, "runs": runs, "cable_mbit": CABLE_MBIT,
           "mics_step_s": [round(one.step_s, 4) for one in ours],
           "fsdp_step_s": [round(one.step_s, 4) for one in theirs],
           "ddp_step_s": round(plain.step_s, 4), "throughput": round(faster, 2),
           "mics_sent": [one.sent for one in ours], "fsdp_sent": [one.sent for one in theirs],
           "mics_sent_one_micro_step": once.sent, "bytes_per_micro_step": round(per_micro_step, 3),
           "apart": apart, "ok": faster >= 2.8 and apart <= 1e-6 and per_micro_step <= 0.26,
           "why": ""}


def hops(runs: int) -> Iterator[dict[str, Any]]:
    """Sharded over two nodes of two and of four ranks, gathered in two hops and in one."""
    ways = {"hops": ("strategy=fsdp",), "flat": FLAT}
    for ranks in (2, 4):
        found: dict[str, list[Measured]] = {name: [] for name in ways}
        with Nodes(2, CABLE_MBIT, WEIGHT) as nodes:
            for turn in range(runs):
                for name, settings in ways.items():
                    found[name].append(world(
                        nodes, ranks, (*settings, f"micro_batches={4 * ranks}"), f"{name}-{turn}"))
        pairs = [flat.step_s / two.step_s for two, flat in zip(found["hops"], found["flat"])]
        apart = distance(found["flat"][0].gradients, found["hops"][0].gradients)
        sent = {name: statistics.mean(max(one.sent) for one in made)
                for name, made in found.items()}
        yield {"case": "hops", "nodes": 2, "ranks": 2 * ranks, "runs": runs,
               "cable_mbit": CABLE_MBIT,
               "hops_step_s": [round(one.step_s, 4) for one in found["hops"]],
               "flat_step_s": [round(one.step_s, 4) for one in found["flat"]],
               "throughput": round(statistics.median(pairs), 2),
               "hops_sent": [one.sent for one in found["hops"]],
               "flat_sent": [one.sent for one in found["flat"]],
               "bytes": round(sent["hops"] / sent["flat"], 3), "apart": apart,
               "ok": apart == 0.0 and sent["hops"] < sent["flat"], "why": ""}


def sdp(runs: int) -> Iterator[dict[str, Any]]:
    """Four nodes of two ranks."""
    found: dict[str, list[Measured]] = {"sdp": [], "ddp": []}
    with Nodes(4, CABLE_MBIT, WEIGHT) as nodes:
        for turn in range(runs):
            for name, made in found.items():
                made.append(world(nodes, 2, (f"strategy={name}", "micro_batches=8"),
                                  f"{name}-{turn}"))
    faster = statistics.median(one.step_s for one in found["ddp"]) / statistics.median(
        one.step_s for one in found["sdp"])
    uneven = max(max(one.sent) / min(one.sent) for one in found["sdp"])
    yield {"case": "sdp", "nodes": 4, "ranks": 8, "runs": runs, "cable_mbit": CABLE_MBIT,
           "sdp_step_s": [round(one.step_s, 4) for one in found["sdp"]],
           "ddp_step_s": [round(one.step_s, 4) for one in found["ddp"]],
           "throughput": round(faster, 2), "highest_by_lowest": round(uneven, 4),
           "sdp_sent": [one.sent for one in found["sdp"]],
           "ddp_sent": [one.sent for one in found["ddp"]],
           "apart": distance(found["ddp"][0].gradients, found["sdp"][0].gradients),
           "ok": faster >= 2.0 and uneven <= 1.01, "why": ""}


def cases(names: Sequence[str], runs: int, quick: bool) -> Iterator[dict[str, Any]]:
    if "mics" in names:
        yield from mics(runs)
    if "hops" in names:
        yield from hops(runs)
    if "sdp" in names:
        yield from sdp(runs)
    if "slow" in names:
        yield from repartition.repartition(1 if quick else max(runs, 3))
    if "plans" in names:
        yield pipeline.partition(5 if quick else 50)
        for stages, many in pipeline.CASES[:1] if quick else pipeline.CASES:
            yield pipeline.bubble(stages, many, "interleaved")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, of the rows of one invocation."""
    said = []
    for row in rows:
        if row["case"] in BESIDE:
            other = BESIDE[row["case"]]
            mine, theirs = (statistics.mean(max(sent) for sent in row[f"{name}_sent"]) / 1e6
                            for name in (row["case"], other))
            measured = (f"{row['throughput']} times {other}'s throughput; {mine:.1f} MB a node and "
                        f"step instead of {theirs:.1f}; gradients {row['apart']:.0e} apart")
            if "bytes_per_micro_step" in row:
                measured += f"; {row['bytes_per_micro_step']} of the bytes of one micro-step each"
            elif "highest_by_lowest" in row:
                measured += f"; highest / lowest node {row['highest_by_lowest']}"
            runs = f"{row['runs']} of each"
        elif row["case"] == "slow-stage":
            measured = (f"one of {row['stages']} ranks {row['slower']:.0f} times slower: "
                        f"{100 * row['back_median']:.0f} % of the lost throughput came back, "
                        f"{100 * row['of_possible']:.0f} % of what the best cut could bring back")
            runs = str(row["runs"])
        elif row["case"] == "bubble":
            measured = (f"{row['stages']} stages, {row['micro_batches']} micro-batches: "
                        f"{row['bubble']:.3f}, formula {row['formula']:.3f}")
            runs = f"best of {len(row['step_s'])} steps"
        else:
            measured, runs = f"worst {row['worst_ratio']} of brute force", f"{row['nets']} nets"
        said.append(f"| {row['case']} | {measured} | {runs} | {'yes' if row['ok'] else 'no'} |")
    return "\n".join(["| case | measured | runs | goal |", "|---|---|---|---|", *said])


def main(arguments: list[str] | None = None) -> int:
    """0 when every row is within its goal."""
    parser = argparse.ArgumentParser(prog="bench.engines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["mics", "hops", "sdp", "slow", "plans"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", type=int, default=2, help="of each strategy over nodes")
    parser.add_argument("--quick", action="store_true", help="one run, few plans")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    common.become_subreaper()
    results, rows = Results("engines", options.out), []
    for row in cases(options.cases, 1 if options.quick else options.runs, options.quick):
        results.add(row)
        rows.append(row)
        print({key: value for key, value in row.items() if key != "why"}, flush=True)
    print(table(rows), f"rows: {results.path}", sep="\n\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
