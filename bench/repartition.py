"""A pipeline of which one rank becomes slow: throughput before, slowed, and cut anew, in one run.

    python -m bench.repartition [--runs 3] [--case 2 0.01]

The trainer's own loop on eight ranks.  Blocks of the model wait instead of computing, and the slow
rank waits longer (tests/unit/trainer/slowed.py), so that two processors can show eight ranks: what
is slow is so by waiting and never by competing for processors.  What is possible at all is what the
schedule's simulation says of the best cut for the true speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .common import BENCH, ROOT, Results, become_subreaper

TESTS = ROOT / "tests/unit/trainer"
# One slow rank of n leaves less than n of them: of four no cut brings 80 % back, of eight 82 %.
STAGES, MANY, BLOCKS = 8, 24, 96
SLOW_RANK, SLOW_AT, STEPS, LIMIT_S = 2, 8, 34, 900.0
# Times as long as the others, and seconds of a block forwards: eight ranks of Python on two
# processors take 0.9 s of a step whatever a block waits, and no cut brings that back.
CASES = ((2.0, 0.002), (2.0, 0.01), (4.0, 0.002))
GOAL = 0.8  # of what was lost


def _rank(
    rank: int, port: int, folder: Path, slower: float, seconds: float, told: Any
) -> None:
    import multiprocessing

    # A library's lock is then a file of no name: bench ends the helper that would remove others.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(STAGES), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(TESTS))
    import torch

    torch.set_num_threads(1)
    from holdfast.trainer.config import load
    from holdfast.trainer.loop import train
    from holdfast.trainer.standalone import Standalone

    class Timed(Standalone):
        def __init__(self) -> None:
            super().__init__()
            self.ends_s = list[float]()
            self.said = list[tuple[int, str]]()

        def step_end(self, step: int, _loss: float) -> None:
            self.ends_s.append(time.monotonic())
            if rank == 0 and step == SLOW_AT:
                part = folder / "slow.part"
                part.write_text(json.dumps({str(SLOW_RANK): slower}))
                part.rename(folder / "slow")

        def report(self, fault: str, text: str) -> None:
            self.said.append((len(self.ends_s), text))

    timed = Timed()
    train(load(None, [
        "model=slowed:Model", f"model_options.blocks={BLOCKS}", f"model_options.seconds={seconds}",
        f"model_options.slow={folder}/slow", "data=tiny:Data", "batch=1", f"micro_batches={MANY}",
        "strategy=pipeline", f"pipeline.stages={STAGES}", f"steps={STEPS}", "checkpoint.every=0",
        f"work_dir={folder}"]), timed)
    if rank == 0:
        told.put((timed.ends_s, timed.said))
        told.close()
        told.join_thread()
    os._exit(0)


def simulated(slower: float) -> tuple[float, float, float]:
    """Of a step, by a block forwards: all alike, one slow, one slow with the best cut for that."""
    from holdfast.trainer.engines.partition import Costs, Piece, Terms, judged, plan

    pieces = [Piece(str(n), 1.0, 2.0, 0, 0, 0) for n in range(BLOCKS)]
    terms = Terms(STAGES, MANY, "interleaved")
    slow = terms._replace(speeds=tuple(
        1 / slower if stage == SLOW_RANK else 1.0 for stage in range(STAGES)))
    home = plan(pieces, terms)
    slowed = judged(Costs(pieces, slow).stages(home.cuts), slow)
    return home.step_s, slowed.step_s, plan(pieces, slow).step_s


def share(before_s: float, slowed_s: float, after_s: float) -> float:
    """Of the steps a second that were lost, what came back."""
    return (1 / after_s - 1 / slowed_s) / (1 / before_s - 1 / slowed_s)


def run(slower: float, seconds: float, folder: Path) -> dict[str, Any]:
    import multiprocessing
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(
        target=_rank, args=(rank, port, folder, slower, seconds, told), daemon=True)
        for rank in range(STAGES)]
    for rank in ranks:
        rank.start()
    try:
        ends_s, said = told.get(timeout=LIMIT_S)
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    steps_s = [b - a for a, b in zip(ends_s, ends_s[1:], strict=False)]  # [n] is step n + 2
    at, words = next(((at, text) for at, text in said if "cut anew" in text), (0, ""))
    until = at or (SLOW_AT + STEPS) // 2  # never cut anew: then nothing comes back
    before_s, slowed_s, after_s = (statistics.median(steps_s[a:b]) for a, b in (
        (2, SLOW_AT - 1), (SLOW_AT, until - 1), (until + 1, len(steps_s))))
    return {"before_s": before_s, "slowed_s": slowed_s, "after_s": after_s, "step": at,
            "words": words, "steps_s": [round(one, 3) for one in steps_s]}


def repartition(
    runs: int, cases: Sequence[tuple[float, float]] = CASES
) -> Iterator[dict[str, Any]]:
    for slower, seconds in cases:
        found = list[dict[str, Any]]()
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                found.append(run(slower, seconds, Path(folder)))
        best = share(*simulated(slower))
        back = [share(one["before_s"], one["slowed_s"], one["after_s"]) for one in found]
        middle = statistics.median(back)
        yield {"case": "slow-stage", "stages": STAGES, "micro_batches": MANY, "blocks": BLOCKS,
               "slower": slower, "block_s": seconds, "runs": runs, "slow_from": SLOW_AT,
               "cut_anew_behind": [one["step"] for one in found],
               **{name: [round(one[name], 4) for one in found]
                  for name in ("before_s", "slowed_s", "after_s")},
               "back": [round(one, 3) for one in back], "back_median": round(middle, 3),
               "possible": round(best, 3), "of_possible": round(middle / best, 3),
               "load": os.getloadavg()[0], "words": [one["words"] for one in found],
               "steps_s": [one["steps_s"] for one in found],
               "ok": middle >= GOAL, "why": ""}


def main(arguments: list[str] | None = None) -> int:
    """0 when every row is within its goal."""
    parser = argparse.ArgumentParser(prog="bench.repartition", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", type=float, nargs=2, action="append", metavar="N",
                        help="times slower, and seconds of a block; may be given again")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    become_subreaper()
    results, good = Results("engines", options.out), True
    for row in repartition(options.runs, options.case or CASES):
        results.add(row)
        good &= row["ok"]
        print({key: value for key, value in row.items() if key not in ("why", "steps_s")},
              flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
