"""Plans of pipelines and what parity says, against brute force, a formula and the truth.

    python -m bench.pipeline [--quick]

Three cases.  `partition`: 50 random nets of up to 20 pieces on up to 6 stages, against every cut
there is.  `bubble`: torch's own schedules over real ranks whose stages sleep instead of compute, so
that two cores can show four of them; what is measured is how long a step takes from outside.
`parity`: how often the 95 % interval holds the difference of runs whose truth is known.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

from .common import BENCH, Results, become_subreaper

# So long that what messages cost, 21 to 33 ms a step, does not stand for the schedule.
FORWARD_S, BACKWARD_S = 0.15, 0.3
STEPS = 4
CASES = ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16))


def partition(nets: int) -> dict[str, Any]:
    """The largest stage of the plan, divided by that of the best of all cuts."""
    from holdfast.trainer.engines.partition import Costs, NoPlan, Piece, Terms, plan

    worst, slowest_s, refused, agreed = 1.0, 0.0, 0, 0
    for seed in range(nets):
        draw = random.Random(seed)
        pieces = [Piece(str(n), t := draw.lognormvariate(-6, 1), t * draw.uniform(1.5, 2.5),
                        draw.randrange(1 << 24), draw.randrange(1 << 20), draw.randrange(1 << 18))
                  for n in range(draw.randrange(6, 21))]
        terms = Terms(draw.randrange(2, 7), draw.randrange(2, 17),
                      draw.choice(("simple", "interleaved")), draw.choice(("speed", "memory")),
                      draw.choice((1e7, 1e9, float("inf"))), draw.choice((6e7, float("inf"))))
        costs, least = Costs(pieces, terms), float("inf")
        for cuts in itertools.combinations(range(1, len(pieces)), terms.stages - 1):
            edges = [0, *cuts, len(pieces)]
            least = min(least, max(
                costs.rank(costs.stage(a, b, n))[0]
                for n, (a, b) in enumerate(zip(edges, edges[1:], strict=False))))
        begin_s = time.process_time()
        try:
            found = max(costs.rank(stage)[0] for stage in plan(pieces, terms).stages)
            worst = max(worst, found / least)
        except NoPlan:
            refused += 1
            agreed += least == float("inf")
        slowest_s = max(slowest_s, time.process_time() - begin_s)
    return {"case": "partition", "nets": nets, "worst_ratio": round(worst, 6),
            "slowest_plan_s": round(slowest_s, 4), "refused": refused,
            "ok": worst <= 1.03 and slowest_s <= 1.0 and refused == agreed, "why": ""}


def _stage(rank: int, stages: int, many: int, schedule: str, port: int, told: Any) -> None:
    """One rank of `bubble`: torch's schedule over a stage that sleeps."""
    import os

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, given: Any) -> Any:
            time.sleep(FORWARD_S)
            return given.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:  # type: ignore[override]
            time.sleep(BACKWARD_S)
            return gradient.clone()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, given: Any) -> Any:
            return Sleep.apply(given * self.weight)

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, stages, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages)
    stage = PipelineStage(Stage(), rank, stages, torch.device("cpu"))
    kind = ScheduleGPipe if schedule == "simple" else Schedule1F1B
    run = kind(stage, many, loss_fn=lambda made, _: made.sum())
    for _ in range(STEPS):
        dist.barrier()
        begin_s = time.monotonic()
        if rank == 0:
            run.step(torch.ones(many, 4))
        elif rank == stages - 1:
            run.step(target=torch.ones(many, 4))
        else:
            run.step()
        dist.barrier()
        if rank == 0:
            told.put(time.monotonic() - begin_s)
    dist.barrier()
    os._exit(0)


def bubble(stages: int, many: int, schedule: str) -> dict[str, Any]:
    """Of the fastest step: what a busy machine adds is not the schedule's."""
    import multiprocessing
    import socket

    from holdfast.trainer.engines.partition import Stage, Terms, judged

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=_stage, args=(rank, stages, many, schedule, port, told),
                             daemon=True) for rank in range(stages)]
    for rank in ranks:
        rank.start()
    try:
        times_s = [told.get(timeout=180) for _ in range(STEPS)]
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    plan = judged([Stage(n, n + 1, FORWARD_S, BACKWARD_S, 0.0, 0) for n in range(stages)],
                  Terms(stages, many, schedule))
    measured = 1.0 - many * (FORWARD_S + BACKWARD_S) / min(times_s)
    return {"case": "bubble", "stages": stages, "micro_batches": many, "schedule": schedule,
            "step_s": [round(one, 4) for one in times_s], "planned_step_s": round(plan.step_s, 4),
            "bubble": round(measured, 4), "formula": round(plan.formula, 4),
            "ok": abs(measured - plan.formula) <= 0.1 * plan.formula, "why": ""}


def parity(runs: int) -> dict[str, Any]:
    import numpy as np

    from holdfast.trainer.quality import parity as statistics

    measure, draw = statistics.metric("mrr@10"), np.random.default_rng(1)

    def pairs(count: int) -> tuple[Any, Any]:
        before = np.minimum(draw.geometric(0.25, count), 40)
        by = np.where(draw.random(count) < 0.7, 1, -1) * draw.integers(1, 4, count)
        moved = np.where(draw.random(count) < 0.2, before + by, before)
        return before, np.clip(moved, 1, 40)

    first, second = (measure.of(one) for one in pairs(2_000_000))
    truth, held, begin_s = float(second.mean() / first.mean() - 1.0), 0, time.process_time()
    for seed in range(runs):
        found = statistics.compare(*pairs(512), measure, statistics.Margin(0.001, True), seed)
        low, high = found.low, found.high
        held += low is not None and high is not None and low <= truth <= high
    return {"case": "parity", "runs": runs, "pairs": 512, "truth": round(truth, 5),
            "held": round(held / runs, 4), "ok": 0.92 <= held / runs <= 0.98, "why": "",
            "cpu_s_each": round((time.process_time() - begin_s) / runs, 5)}


def main(arguments: list[str] | None = None) -> int:
    """0 when every row is within its goal."""
    parser = argparse.ArgumentParser(prog="bench.pipeline", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few nets, one bubble, few runs")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    become_subreaper()
    results, good = Results("pipeline", options.out), True
    cases = CASES[:1] if options.quick else CASES
    rows = itertools.chain(
        [partition(5 if options.quick else 50), parity(50 if options.quick else 500)],
        (bubble(*case, name) for case in cases for name in ("simple", "interleaved")))
    for row in rows:
        results.add(row)
        good &= row["ok"]
        print({key: value for key, value in row.items() if key != "why"}, flush=True)
    print(f"rows: {results.path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
