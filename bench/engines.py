"""The engines beside what they are measured against, over nodes whose links are shaped.

    python -m bench.engines [--runs 2] [--cases mics hops sdp slow plans faults compiles] [--quick]

Seven cases.  `mics`: groups inside two nodes against sharding over all four ranks, gathered in one
hop and in two, taking turns, and once with one micro-step instead of four; inside a node links are
16 times as fast as between them.  `hops`: sharding over all ranks of two nodes, gathered in two
hops and in one.  `sdp`: balanced parts against torch's all-reduce, over four nodes of two ranks and
two of four; `bound` is what the bytes alone allow, (w - 1) / w of the gradients in torch's ring
over w ranks by (n - 1) / n in parts over n nodes; `apart_in_time` is the most by which the bytes
that two nodes had sent at one moment differed, by those of a step.  `slow`: bench/repartition.py's
pipeline of which one rank becomes slow.  `plans`: bench/pipeline.py's partition and bubbles.
`faults`: bench/engines_faults.py's lost ranks.  `compiles`: bench/xla.py's starts, where
HOLDFAST_TEST_XLA_PYTHON is set.  Nodes are network namespaces (root, iproute2); what crosses
between them is counted at their interfaces, with headers.  All ranks share this machine's
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

from . import common, engines_faults, engines_table, pipeline, repartition, xla
from .cables import apart_in_time, inside, sent_so_far
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


FLAT = ("strategy=fsdp", "fsdp.hierarchical=false")


class Measured(NamedTuple):
    """One run of a world: medians over its steps but the first, and one step's gradients."""

    step_s: float
    sent: tuple[int, ...]  # bytes in a step, by node
    gradients: dict[str, Any]
    apart: float = 0.0  # of what nodes had sent at one moment, by a step's bytes


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
    with sent_so_far(nodes) as seen:
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
                    sent, whole(parts, settings, ranks), apart_in_time(seen, ends_s, sent))


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
    sharded = {"mics": ("strategy=mics", "mics.group=2"), "fsdp": FLAT, "hops": ("strategy=fsdp",)}
    found: dict[str, list[Measured]] = {name: [] for name in sharded}
    with Nodes(2, CABLE_MBIT, WEIGHT) as nodes:
        within_mbit = inside(nodes)
        for turn in range(runs):
            for name, settings in sharded.items():
                found[name].append(world(
                    nodes, 2, (*settings, "micro_batches=16"), f"{name}-{turn}"))
        once = world(nodes, 2, (*sharded["mics"], "micro_batches=4"), "mics-once")
        plain = world(nodes, 2, ("strategy=ddp", "micro_batches=16"), "ddp")
    ours, theirs = found["mics"], found["fsdp"]
    faster, than_hops = (statistics.median(
        other.step_s / one.step_s for one, other in zip(ours, found[name]))
        for name in ("fsdp", "hops"))
    sent = statistics.mean(max(one.sent) for one in ours)
    apart = max(distance(plain.gradients, found[name][0].gradients) for name in sharded)
    per_micro_step = sent / 4 / max(once.sent)
    yield {"case": "mics", "nodes": 2, "ranks": 4, "runs": runs, "cable_mbit": CABLE_MBIT,
           "mics_step_s": [round(one.step_s, 4) for one in ours],
           "fsdp_step_s": [round(one.step_s, 4) for one in theirs],
           "hops_step_s": [round(one.step_s, 4) for one in found["hops"]],
           "ddp_step_s": round(plain.step_s, 4), "throughput": round(faster, 2),
           "throughput_of_hops": round(than_hops, 2), "inside_mbit": round(within_mbit),
           "load": os.getloadavg()[0],
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
    """Eight ranks, on four nodes and on two."""
    for count in (4, 2):
        ranks = 8 // count
        found: dict[str, list[Measured]] = {"sdp": [], "ddp": []}
        with Nodes(count, CABLE_MBIT, WEIGHT) as nodes:
            for turn in range(runs):
                for name, made in found.items():
                    made.append(world(nodes, ranks, (f"strategy={name}", "micro_batches=8"),
                                      f"{name}-{turn}"))
        pairs = [ddp.step_s / one.step_s for one, ddp in zip(found["sdp"], found["ddp"])]
        faster = statistics.median(pairs)
        uneven = max(max(one.sent) / min(one.sent) for one in found["sdp"])
        yield {"case": "sdp", "nodes": count, "ranks": 8, "runs": runs, "cable_mbit": CABLE_MBIT,
               "sdp_step_s": [round(one.step_s, 4) for one in found["sdp"]],
               "ddp_step_s": [round(one.step_s, 4) for one in found["ddp"]],
               "throughput": round(faster, 2), "bound": round(7 / 8 * count / (count - 1), 2),
               "highest_by_lowest": round(uneven, 4), "load": os.getloadavg()[0],
               "apart_in_time": {name: [round(one.apart, 4) for one in made]
                                 for name, made in found.items()},
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
            for schedule in ("interleaved", "simple"):
                yield pipeline.bubble(stages, many, schedule)
    if "faults" in names:
        yield from engines_faults.faults(1 if quick else max(runs, 5))
    python = os.environ.get("HOLDFAST_TEST_XLA_PYTHON")
    if "compiles" in names and python:
        yield xla.second_start(python)


def main(arguments: list[str] | None = None) -> int:
    """0 when every row is within its goal."""
    parser = argparse.ArgumentParser(prog="bench.engines", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["mics", "hops", "sdp", "slow", "plans", "faults", "compiles"]
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
    print(engines_table.table(rows), f"rows: {results.path}", sep="\n\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
