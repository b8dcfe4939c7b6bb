"""Ctrl-C while a run starts: how long until the launcher and all that it started have ended.

Owns the moments: evenly over the time to the first step, imports of launcher, agent and ranks
among them.  SIGINT goes to the process group, as from a terminal; the promise is 1 s.

    python -m bench.interrupt [--runs 10] [--quick]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import common
from .common import BENCH, POLL_S, Failed, Place, Results
from .observe import StepFile

RANKS, LIMIT_S, GOAL_S = 2, 120.0, 1.0


def commands(where: Place) -> dict[str, list[str]]:
    script = [str(BENCH / "workload_script.py"), "--dir", str(where.home), "--steps-file",
              str(where.home / "steps"), "--steps", "1000000", "--every", "0"]
    return {
        "script": common.run_command(script, RANKS, "bench"),
        "trainer": common.train_command(RANKS, "bench", f"work_dir={where.home / 'work'}"),
    }


def first_step_s(which: str) -> float:
    """A script's first step; for the trainer the first line that tells of one."""
    with common.place(which) as where:
        began_s = time.monotonic()
        with common.running(commands(where)[which], where) as process:
            file = StepFile(where.home / "steps")
            try:
                while process.poll() is None and time.monotonic() < began_s + LIMIT_S:
                    file.poll()
                    if file.steps or "step " in common.log_text(where):
                        return time.monotonic() - began_s
                    time.sleep(POLL_S)
            finally:
                file.close()
            raise Failed(f"no step of the {which} within {LIMIT_S:g} s: {common.log_tail(where)}")


def measure(which: str, at_s: float) -> dict[str, Any]:
    with common.place(which) as where:
        command = commands(where)[which]
        row: dict[str, Any] = {"case": f"interrupt_{which}", "at_s": round(at_s, 3), "ok": False,
                               "why": "", "command": common.neutral(command, where)}
        with common.running(command, where) as process:
            time.sleep(at_s)  # the moment is what is varied
            if process.poll() is not None:
                return {**row, "why": f"ended by itself with {process.returncode}"}
            sent_s = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            row["exit_code"] = common.wait_exit(process, LIMIT_S)
            row["ended_s"] = round(time.monotonic() - sent_s, 4)
            while common.descendants(os.getpid()) and time.monotonic() < sent_s + LIMIT_S:
                common.reap_orphans(process)
                time.sleep(POLL_S)
            row["all_ended_s"] = round(time.monotonic() - sent_s, 4)
        row["ok"] = row["all_ended_s"] <= GOAL_S
        row["log"] = common.log_tail(where, 2)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.interrupt")
    parser.add_argument("--runs", type=int, default=10, help="of a script and of the trainer, each")
    parser.add_argument("--quick", action="store_true", help="two of each")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("interrupt", options.out)
    runs = 2 if options.quick else options.runs
    for which in ("script", "trainer"):
        whole_s = first_step_s(which)
        for number in range(runs):
            row = measure(which, whole_s * (number + 0.5) / runs)
            results.add({**row, "first_step_s": round(whole_s, 3)})
            print(f"{row['case']:18s} at {row['at_s']:6.2f} s: ended after "
                  f"{row.get('ended_s', '-')} s, all of it {row.get('all_ended_s', '-')}  "
                  f"{row['why']}", flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
