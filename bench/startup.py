"""Launch -> first finished step on all ranks: `holdfast run` beside torchrun, in turns.

Owns the pairs; which of the two goes first alternates.  Both run the same script and are read by
the same method.  Holdfast is started as people start it, through its command line, which replaces
itself by the launcher; the private agent starts beside it and is part of the price.

    python -m bench.startup [--pairs 7] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from . import common
from .common import BENCH, POLL_S, Failed, Place, Results
from .observe import StepFile

LIMIT_S = 120.0
RANKS = 2


def commands(where: Place) -> dict[str, list[str]]:
    script = [str(BENCH / "workload_script.py"), "--dir", str(where.home), "--steps-file",
              str(where.home / "steps"), "--steps", "2", "--every", "0"]
    flags = ["--standalone", "--nproc-per-node", str(RANKS)]
    return {
        "holdfast": [sys.executable, "-m", "holdfast.agent.cli", "run", *flags, "--run", "bench",
                     "--python", sys.executable, *script],
        "torchrun": common.torchrun_command(script, RANKS),
    }


def measure(which: str) -> dict[str, Any]:
    with common.place(which) as where:
        command = commands(where)[which]
        row: dict[str, Any] = {"case": f"startup_{which}", "ok": False, "why": "",
                               "command": common.neutral(command, where)}
        began_ns = time.monotonic_ns()
        with common.running(command, where) as process:
            file = StepFile(where.home / "steps")
            try:
                firsts = wait_first(process, file)
                row["first_s"] = {str(r): (ns - began_ns) / 1e9 for r, ns in firsts.items()}
                row["startup_s"] = round((max(firsts.values()) - began_ns) / 1e9, 4)
                row["exit_code"] = common.wait_exit(process, LIMIT_S)
                row["whole_s"] = round((time.monotonic_ns() - began_ns) / 1e9, 4)
                row["ok"] = row["exit_code"] == 0
            except Failed as error:
                row["why"] = str(error)
                row["log"] = common.log_tail(where)
            finally:
                file.close()
    return row


def wait_first(process: Any, file: StepFile) -> dict[int, int]:
    deadline = time.monotonic() + LIMIT_S
    while True:
        ended = process.poll() is not None
        file.poll()
        firsts = {s.rank: s.end_ns for s in file.steps if s.step == 1}
        if len(firsts) == RANKS:
            return firsts
        if ended:
            raise Failed(f"ended with {process.returncode} before its first step")
        if time.monotonic() > deadline:
            raise Failed(f"no first step within {LIMIT_S:g} s")
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.startup")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one pair")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("startup", options.out)
    for pair in range(1 if options.quick else options.pairs):
        for which in ("holdfast", "torchrun") if pair % 2 else ("torchrun", "holdfast"):
            row = measure(which)
            results.add({**row, "pair": pair})
            print(f"{row['case']:20s} {row.get('startup_s', '-')} s  {row['why']}", flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
