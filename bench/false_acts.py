"""A healthy run whose step time varies 50-fold, under default settings: nothing may act on it.

Owns the counting, from outside: a generation after the first, or a rank with another pid, is an
act.  The agent's own count of suspicions, and how many it took back, is stated beside.

A run whose longest pause is within what a script is always given proves nothing about acts by cost:
it is told as such, and is not good.

    python -m bench.false_acts             # ten minutes of each grade
    python -m bench.false_acts --full      # thirty
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import common
from .common import BENCH, ROOT, Failed, Place, Results
from .observe import PageWatch

RANKS = 2
POLL_S = 0.02
ASK_S = 5.0
START_LIMIT_S = 120.0
FLOOR_S = 60.0  # a script is given so long whatever a restart costs
TICKET = "graph_recompiled"
SETTLE_S = 120.0  # for the suspicions that are open at the end to be taken back


def command_of(grade: str, where: Place, shared: Path) -> list[str]:
    if grade == "script":
        return common.run_command([str(BENCH / "uneven_script.py")], RANKS, "bench")
    return common.train_command(
        RANKS, "bench", f"work_dir={shared}", f"checkpoint.dir={where.home / 'checkpoints'}",
        "checkpoint.every=50", "steps=1000000", f"micro_batches={RANKS}",
        "data=bench.uneven_data:Data",
    )


def watch(where: Place, process: Any, minutes: float) -> dict[str, Any]:
    """Follows the run for `minutes` after its first step, and on until the suspicions of that time
    are closed.  Failed when it ends by itself."""
    pages = PageWatch(process.pid)
    known: dict[str, dict[str, Any]] = {}
    pids: set[tuple[int, int]] = set()
    generations: set[int] = set()
    limit_s = time.monotonic() + START_LIMIT_S
    end_s, ask_s, refused = limit_s, 0.0, "never asked"
    while (now_s := time.monotonic()) < end_s or (
        now_s < end_s + SETTLE_S and judge(list(known.values()))["still_open"]
    ):
        if process.poll() is not None:
            raise Failed(f"ended by itself with {process.returncode}")
        for step in pages.poll():
            if not generations:
                end_s = now_s + 60.0 * minutes
            generations.add(step.generation)
            pids.add((step.rank, step.pid))
        if generations and now_s >= ask_s:
            ask_s = now_s + ASK_S
            try:
                found = common.incidents(where, "bench")
                known.update((item["id"], item) for item in found
                             if now_s < end_s or item["id"] in known)
                refused = ""
            except Failed as error:
                refused = str(error)
        time.sleep(POLL_S)
    if not generations:
        raise Failed(f"no step within {START_LIMIT_S:g} s")
    return {**judge(list(known.values())), **spread(pages), "api": refused,
            "generations": len(generations), "processes": len(pids),
            "acts": len(generations) - 1 + len(pids) - RANKS}


def judge(incidents: list[dict[str, Any]]) -> dict[str, Any]:
    """A compile in mid-training is told and kept as a ticket, which is no act."""
    tickets = [item for item in incidents
               if item.get("fault") == TICKET and item["state"] != "acted"]
    suspected = [item for item in incidents if item not in tickets
                 and any(text.startswith("suspected") for _, text in item["timeline"])]
    states = [item["state"] for item in suspected]
    return {
        "suspicions": len(suspected), "taken_back": states.count("taken_back"),
        "still_open": states.count("open"), "tickets": len(tickets),
        "acted_by_agent": sum(
            item["state"] in ("acted", "closed") for item in incidents if item not in tickets),
        "incidents": [{key: item.get(key) for key in
                       ("fault", "subject", "state", "reason", "timeline")}
                      for item in incidents[:200]],
    }


def verdict(row: dict[str, Any]) -> str:
    """What the run shows: none of its healthy pauses was acted on, some were, or nothing at all."""
    if row["acts"] or row["acted_by_agent"]:
        return "ACTED on a healthy run"
    if row["api"] or row["taken_back"] != row["suspicions"]:
        return "UNKNOWN: not every suspicion was seen taken back"
    return "none" if row["step_max_s"] > FLOOR_S else f"NOTHING SHOWN: no pause above {FLOOR_S:g} s"


def is_good(row: dict[str, Any]) -> bool:
    """Nothing acted, each suspicion was taken back, and something could have acted by cost."""
    return verdict(row) == "none"


def spread(pages: PageWatch) -> dict[str, Any]:
    ends = sorted(step.end_ns for step in pages.steps if step.rank == 0)
    took = [(b - a) / 1e9 for a, b in zip(ends, ends[1:], strict=False)]
    shortest, longest = common.percentile(took, 0.05), max(took, default=0.0)
    return {"steps": len(ends), "step_p5_s": common.rounded(shortest),
            "step_max_s": round(longest, 3),
            "fold": common.rounded(longest / shortest if took else None, 1)}


def measure(grade: str, minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder, common.place(grade) as where:
        path = [str(ROOT), where.environ.get("PYTHONPATH", "")]
        where.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = command_of(grade, where, Path(folder))
        row: dict[str, Any] = {
            "case": f"false_acts_{grade}", "ok": False, "why": "", "minutes": minutes,
            "command": common.neutral(command, where).replace(folder, "$SHARED"),
        }
        with common.running(command, where) as process:
            try:
                row.update(watch(where, process, minutes))
                row["verdict"] = verdict(row)
                row["ok"] = is_good(row)
                if not row["ok"]:
                    row["log"] = common.log_tail(where)
            except Failed as error:
                row["why"] = str(error)
                row["log"] = common.log_tail(where)
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.false_acts")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each grade")
    parser.add_argument("--full", action="store_true", help="thirty minutes of each grade")
    parser.add_argument("--quick", action="store_true", help="one minute, which shows nothing")
    parser.add_argument("--grades", default="script,trainer")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    minutes = 1.0 if options.quick else 30.0 if options.full else options.minutes
    results, good = Results("false_acts", options.out), True
    for grade in options.grades.split(","):
        row = measure(grade, minutes)
        results.add(row)
        keys = ("verdict", "acts", "acted_by_agent", "suspicions", "taken_back", "still_open",
                "steps", "fold", "step_max_s", "why", "api")
        print(f"{row['case']}: {'ok' if row['ok'] else 'FAIL'}  " + "  ".join(
            f"{key} {row[key]}" for key in keys if row.get(key) not in (None, "")), flush=True)
        nothing_wrong = row.get("verdict", "").startswith(("none", "NOTHING"))
        good = good and (nothing_wrong if options.quick else row["ok"])
    print(f"rows: {results.path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
