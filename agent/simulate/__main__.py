"""`python -m holdfast.agent.simulate`: many seeds with progress, or one with its whole trace.

Owns arguments, processes and output.  This is the simulator's edge: the only file here that may
look at a real clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from ..system.arguments import Parser, number
from .run import Report, run_storm
from .storms import STORMS

FAILURES_SHOWN = 3
CHUNK = 20
SEED_MAX = 1 << 31
EXAMPLES = """examples:
  holdfast simulate --seeds 0:200 --storm network
  holdfast simulate --seed 42 --trace

exit code 0 when every invariant held over every seed
"""


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        seeds = range(int(first), int(last)) if last else range(int(first), int(first) + 1)
    except ValueError:
        seeds = range(0)
    if not 0 <= seeds.start < seeds.stop <= SEED_MAX:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: give FIRST:LAST, for example 0:200, up to {SEED_MAX}")
    return seeds


def run_seeds(seeds: range, storm: str, processes: int = 1) -> list[Report]:
    """Every report in order of seed, over `processes` processes."""
    work = partial(run_storm, storm=storm)
    if processes < 2:
        return [work(seed) for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(work, seeds, chunksize=CHUNK))


def summary(reports: list[Report], wall_s: float) -> dict[str, object]:
    """Totals over many seeds."""
    losses: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for report in reports:
        losses.update(report.losses_s)
        faults.update(report.faults)
        ends.update(report.outcomes.values())
    bad = Counter(report.invariant for report in reports if not report.ok)
    return {
        "seeds": len(reports), "failed": sum(bad.values()), "by_invariant": dict(bad),
        "failing_seeds": [report.seed for report in reports if not report.ok][:50],
        "ettr": round(sum(r.ettr for r in reports) / max(1, len(reports)), 4),
        "generations": sum(r.generations for r in reports),
        "outcomes": dict(ends), "faults": dict(faults.most_common()),
        "losses_s": {name: round(value, 1) for name, value in losses.most_common()},
        "events": sum(r.events for r in reports),
        "wall_s": round(wall_s, 2), "ms_per_seed": round(1e3 * wall_s / max(1, len(reports)), 2),
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every invariant held over every seed."""
    parser = Parser(
        prog="holdfast simulate", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the real policy on a virtual cluster in a storm of faults.",
        epilog=EXAMPLES)
    parser.add_argument("--seeds", type=_seeds, help="first:last (default 0:100)")
    parser.add_argument("--seed", type=number(int, 0, SEED_MAX), help="one seed")
    parser.add_argument("--trace", action="store_true", help="print every event of --seed")
    parser.add_argument("--storm", choices=sorted(STORMS), default="default", metavar="NAME",
                        help=", ".join(sorted(STORMS)))
    parser.add_argument("--processes", type=number(int, 1, 256), default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.trace and options.seed is None:
        parser.error("--trace belongs to --seed")
    if options.seed is not None and (options.seeds or options.processes > 1):
        parser.error("--seed is one alone: leave out --seeds and --processes, or --seed")
    options.seeds = options.seeds or range(100)
    if options.seed is not None:
        report = run_storm(options.seed, options.storm, sink=print if options.trace else None)
        if options.trace:
            report.trace = []
        print(json.dumps(report.as_dict()) if options.json else report.text())
        return 0 if report.ok else 1
    began_s = time.monotonic()
    reports: list[Report] = []
    step = max(CHUNK * options.processes, len(options.seeds) // 20)
    for start in range(options.seeds.start, options.seeds.stop, step):
        part = range(start, min(start + step, options.seeds.stop))
        reports += run_seeds(part, options.storm, options.processes)
        bad = sum(not report.ok for report in reports)
        if not options.json:
            print(f"{len(reports)}/{len(options.seeds)} seeds, {bad} failed, "
                  f"{time.monotonic() - began_s:.1f} s", file=sys.stderr)
    total = summary(reports, time.monotonic() - began_s)
    if options.json:
        print(json.dumps(total))
    else:
        for report in [each for each in reports if not each.ok][:FAILURES_SHOWN]:
            print(report.text(), end="\n\n")
        for name, value in total.items():
            print(f"{name:>16}: {value}")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
