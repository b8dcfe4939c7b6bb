"""Memory on the launcher's side: everything that runs and is not a rank, process by process.

Owns reading smaps_rollup.  RSS counts a page in every process that maps it, PSS divides it among
them: a forked store child or standby shares most of the launcher's pages, so both are stated.
Ranks that were forked share them too; `job` is the PSS of everything, ranks included.  `sharded` is
a model of 59 million weights under fsdp: what its standby needs, now and at its peak, beside the
shard and the model that it does not hold yet.

    python -m bench.memory [--runs 5] [--cases torchrun script trainer sharded] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import cases, common
from .cases import Case, Run
from .common import BENCH, Failed, Results

SETTLED_S = 6.0  # after the first step: a standby is begun 3 s after a start
STILL_S = 1.0  # in which a standby that has been built takes no processor time
KEYS = ("Rss", "Pss", "Private_Clean", "Private_Dirty")
WATCHED = {
    "torchrun": Case("memory_torchrun", "torchrun", "none"),
    "script": Case("memory_holdfast_script", "script", "none"),
    "trainer": Case("memory_holdfast_trainer", "trainer", "none"),
    "sharded": Case("memory_holdfast_sharded", "trainer", "none", settings=(
        "strategy=fsdp", "model_options.width=1024", "checkpoint.every=0")),
}


def peak_mb(pid: int) -> float:
    """The most that was resident.  Raises OSError when it is gone."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def rollup(pid: int) -> dict[str, float]:
    """MB by key, of one process.  Raises OSError when it is gone."""
    found = dict.fromkeys(KEYS, 0.0)
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            key, _, rest = line.partition(":")
            if key in found:
                found[key] = int(rest.split()[0]) / 1024
    return found


def words_of(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [word.decode(errors="replace") for word in file.read().split(b"\0")]
    except OSError:
        return []


def kind_of(pid: int, root: int, standbys: set[int]) -> str:
    if pid == root:
        return "launcher"
    if pid in standbys:
        return "standby"
    if "holdfast.agent" in words_of(pid):
        return "agent"
    parent = int(common.stat_fields(pid)[1])
    return "store" if parent == root else "other"


def census(run: Run) -> list[dict[str, Any]]:
    """Every process of the run that is no rank, nor a rank's child."""
    root = run.process.pid
    ranks = {step.pid for step in run.steps}
    below = {child for pid in ranks for child in common.descendants(pid)}
    views = run.watch.views() if run.watch is not None else []
    standbys = {view.pid for view in views if view.rank < 0}
    found = []
    for pid in [root, *common.descendants(root)]:
        if pid in ranks or pid in below:
            continue
        try:
            memory = rollup(pid)
            kind, peak = kind_of(pid, root, standbys), peak_mb(pid)
        except OSError:
            continue  # a short task of the launcher's
        found.append({
            "process": kind, "rss_mb": round(memory["Rss"], 1), "pss_mb": round(memory["Pss"], 1),
            "private_mb": round(memory["Private_Clean"] + memory["Private_Dirty"], 1),
            "peak_mb": round(peak, 1),
        })
    return found


def measure(which: str, shared: Path) -> dict[str, Any]:
    case = WATCHED[which]
    with common.place(which) as where:
        command = [word.replace(f"steps={cases.STEPS}", "steps=100000") for word in
                   cases.command_of(case, where, "bench", shared)]
        if "--steps" in command:
            command[command.index("--steps") + 1] = "100000"
        row: dict[str, Any] = {"case": case.name, "ok": False, "why": "",
                               "command": common.neutral(command, where)}
        with common.running(command, where) as process:
            run = Run(case, where, process, "bench")
            try:
                run.until(Settled(run), cases.START_LIMIT_S, "a settled run")
                found = census(run)
                row["ranks_pss_mb"] = round(sum(
                    rollup(pid)["Pss"] for pid in {step.pid for step in run.steps}), 1)
            except (Failed, OSError, IndexError) as error:  # the status of a zombie has no memory
                return {**row, "why": str(error), "log": common.log_tail(where)}
    totals = {f"total_{key}": round(sum(item[key] for item in found), 1)
              for key in ("rss_mb", "pss_mb", "private_mb")}
    job = round(totals["total_pss_mb"] + row["ranks_pss_mb"], 1)
    return {**row, "ok": True, "processes": found, **totals, "job_pss_mb": job}


class Settled:
    """Whether a run has trained for a while and its standbys have been built."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.busy: object = None  # the processor times of the standbys, when they changed last
        self.since_s = 0.0

    def __call__(self) -> bool:
        steps, now_s = self.run.steps, time.monotonic()
        views = self.run.watch.views() if self.run.watch is not None else []
        busy = [common.stat_fields(view.pid)[11:13] for view in views
                if view.rank < 0 < view.pid]  # the page of one that is being forked says 0
        if busy != self.busy:
            self.busy, self.since_s = busy, now_s
        return bool(steps) and now_s - steps[0].end_ns / 1e9 > SETTLED_S and (
            now_s - self.since_s > STILL_S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.memory")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=WATCHED, default=list(WATCHED))
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("memory", options.out)
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder:
        for _ in range(1 if options.quick else options.runs):
            for which in options.cases:
                row = measure(which, Path(folder))
                results.add(row)
                print(f"{row['case']}: rss {row.get('total_rss_mb', '-')} MB, "
                      f"pss {row.get('total_pss_mb', '-')} MB, whole job pss "
                      f"{row.get('job_pss_mb', '-')} MB  {row['why']}", flush=True)
                for item in row.get("processes", ()):
                    print(f"    {item['process']:9s} rss {item['rss_mb']:6.1f}  "
                          f"pss {item['pss_mb']:6.1f}  private {item['private_mb']:6.1f}  "
                          f"peak {item['peak_mb']:6.1f}")
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
