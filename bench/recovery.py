"""Fault -> first step never finished before, on all ranks; torchrun's beside ours.

Owns the order: the cases take turns within one invocation, so that the machine's noise is shared,
and every run is one row.  Before them, one run without a fault for each world size gives the
digest that the others' final weights must have.  Exit code 1 when a goal was missed.

    python -m bench.recovery                       # 10 runs each, the trainer's kill 20
    python -m bench.recovery --quick               # 1 run of each
    python -m bench.recovery --cases trainer_sigkill,torchrun_sigkill --runs 5
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import report
from .cases import BY_NAME, CASES, Case, measure
from .common import BENCH, Results, read_rows


def rounds(cases: list[Case], runs: int) -> Iterator[Case]:
    """Round robin; each round begins with another case.  One run means one of each."""
    left = {case.name: max(1, round(runs * case.share)) if runs > 1 else 1 for case in cases}
    turn = 0
    while any(left.values()):
        for number in range(len(cases)):
            case = cases[(turn + number) % len(cases)]
            if left[case.name]:
                left[case.name] -= 1
                yield case
        turn += 1


def references(cases: list[Case], shared: Path, results: Results) -> dict[tuple[bool, int], str]:
    """(is trainer, ranks) -> digest of a run that nothing happened to."""
    found: dict[tuple[bool, int], str] = {}
    for case in cases:
        key = (case.grade == "trainer", case.ranks)
        if key in found:
            continue
        grade = "trainer" if key[0] else "script"
        row = measure(Case(f"{grade}_uninterrupted_{case.ranks}", grade, "none",
                           ranks=case.ranks), shared)
        results.add(row)
        show(row)
        found[key] = row.get("digest", "")
    return found


def show(row: dict[str, Any]) -> None:
    parts = [f"{row['case']:26s}", "ok  " if row["ok"] else "FAIL"]
    for key in ("recovery_s", "verdict_s", "after_verdict_s", "redone_steps", "digest_equal"):
        if key in row:
            parts.append(f"{key} {row[key]}")
    print("  ".join([*parts, row["why"]]), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.recovery", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one run of each case")
    parser.add_argument("--cases", default=",".join(BY_NAME), help="names, comma between")
    parser.add_argument("--no-reference", action="store_true", help="no digests to compare with")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    unknown = set(options.cases.split(",")) - set(BY_NAME)
    if unknown:
        parser.error(f"no case {sorted(unknown)}; there are {', '.join(BY_NAME)}")
    cases = [case for case in CASES if case.name in options.cases.split(",")]
    results = Results("recovery", options.out)
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder:
        shared = Path(folder)
        expected = {} if options.no_reference else references(cases, shared, results)
        for case in rounds(cases, 1 if options.quick else options.runs):
            row = measure(case, shared)
            wanted = expected.get((case.grade == "trainer", case.ranks), "")
            if wanted and row.get("digest"):
                row["digest_equal"] = row["digest"] == wanted
            results.add(row)
            show(row)
    found = [row for row in read_rows(results.path)
             if row["invocation"] == results.common["invocation"]]
    print(report.recovery(found), *report.sources("recovery", found), sep="\n\n")
    print(f"rows: {results.path}")
    missed = any("MISSED" in report.goals(case.name, [row for row in found
                                                      if row["case"] == case.name])
                 for case in cases)
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
