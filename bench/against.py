"""The same measurements on another checkout and on this one, in turns: whether the new is dearer.

Owns the turns and the ratios, never a measurement: each turn is the other benches' own command, run
in its checkout by that checkout's interpreter.  A pair is one turn of each, and every other pair
begins with the other checkout, so that a machine that slows down or warms up favours neither.  Only
ratios within a pair count: whatever else ran on the machine, both had it.

    git worktree add --detach ../old REVISION      # then a .venv in it, as README says
    python -m bench.against ../old [--pairs 5] [--what slow_set steady kernel_line start]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import common
from .common import ROOT

LIMIT_S = 600.0


class Measured(NamedTuple):
    """One command of the other benches, and the numbers of its rows that are compared."""

    command: tuple[str, ...]
    case: str
    numbers: dict[str, Callable[[dict[str, Any]], float]]


WHAT = {
    "slow_set": Measured(("bench.telemetry", "--cases", "slow_set"), "telemetry_slow_set", {
        "slow_set_cpu": lambda row: statistics.median(row["agent_s"]),
        "slow_set_step_cpu": lambda row: statistics.median(row["step_s"]),
        "slow_set_children_cpu": lambda row: row["slow_set_children_cpu_ms"],
    }),
    "steady": Measured(("bench.telemetry", "--cases", "steady"), "telemetry_steady", {
        "steady_cpu": lambda row: row["agent_core_percent"],
        "steady_rss": lambda row: row["agent_rss_mb"],
    }),
    "kernel_line": Measured(
        ("bench.kernel_latency", "--rounds", "1", "--cases", "quiet"), "kernel_latency_quiet", {
            "kernel_line_p50": lambda row: common.percentile(row["latency_s"], 0.5),
            "kernel_line_p99": lambda row: common.percentile(row["latency_s"], 0.99),
        }),
    "start": Measured(("bench.startup", "--quick"), "startup_holdfast", {
        "start": lambda row: row["startup_s"],
    }),
}


def turn(checkout: Path, measured: Measured) -> dict[str, Any]:
    """The row of one command in one checkout; `ok` is false in it when it has no numbers."""
    python = checkout / ".venv/bin/python"
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder:
        command = [str(python), "-m", *measured.command, "--out", folder]
        try:
            ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True,
                                   timeout=LIMIT_S, preexec_fn=common.die_with_parent)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"ok": False, "why": str(error)[:500]}
        rows = [row for path in Path(folder).glob("*.jsonl") for row in common.read_rows(path)
                if row["case"] == measured.case]
    return rows[-1] if rows else {"ok": False, "why": ended.stderr[-500:]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.against", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout, with its own .venv")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--out", type=Path, required=True, help="the file of rows")
    options = parser.parse_args(arguments)
    checkouts = {"old": options.old.resolve(), "new": ROOT}
    failed = 0
    common.become_subreaper()
    for what in options.what:
        measured = WHAT[what]
        ratios: dict[str, list[float]] = {name: [] for name in measured.numbers}
        for pair in range(options.pairs):
            numbers = {}
            for which in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                row = turn(checkouts[which], measured)
                with open(options.out, "a") as file:
                    file.write(json.dumps({**row, "which": which, "pair": pair}) + "\n")
                if row["ok"]:
                    numbers[which] = {name: of(row) for name, of in measured.numbers.items()}
                else:
                    print(f"{what}, {which}, pair {pair}: FAIL {row['why']}", flush=True)
                    failed = 1
            for name, of_pairs in ratios.items() if len(numbers) == 2 else ():
                of_pairs.append(numbers["new"][name] / numbers["old"][name])
        for name, values in ratios.items():
            if values:
                show(name, values)
    return failed


def show(name: str, ratios: list[float]) -> None:
    low, high = common.bootstrap(ratios)
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{name:22s} new / old: median {statistics.median(ratios):.3f}, mean's 95 % interval "
          f"{low:.3f} to {high:.3f}, {len(ratios)} pairs: {each}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
