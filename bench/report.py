"""Prints the tables from the raw rows; measures nothing.

Owns the choice of rows: for each case the newest invocation in the folder that is not --quick, or
the one that is named.  A ratio is between rows of one invocation, and of no other.  A run that did
not come back has no time: it shows in "came back", and the median is of those that did.

    python -m bench.report [--folder bench/results] [--invocation 20260101T000000Z]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .common import BENCH, percentile, read_rows
from .overhead import of_snapshots

Row = dict[str, Any]
NAMES = ("recovery", "startup", "memory", "overhead", "false_acts", "telemetry",
         "kernel_latency", "classify", "log_child", "checks", "peers", "cluster",
         "cluster_script", "torture")
# case -> (what a person calls it, the torchrun case to compare with)
RECOVERY = {
    "trainer_sigkill": ("trainer, SIGKILL", "torchrun_sigkill_prefix"),
    "trainer_sigkill_cold": ("trainer, SIGKILL, no standby", ""),
    "trainer_sigkill_3": ("trainer, SIGKILL, 3 ranks", ""),
    "trainer_sigkill_4": ("trainer, SIGKILL, 4 ranks", ""),
    "trainer_sigstop": ("trainer, SIGSTOP", ""),
    "trainer_stall": ("trainer, stall in a step", ""),
    "script_sigkill": ("script, SIGKILL", "torchrun_sigkill_prefix"),
    "script_sigstop": ("script, SIGSTOP, limit 2 s", ""),
    "torchrun_sigkill": ("torchrun as it comes, SIGKILL", ""),
    "torchrun_sigkill_prefix": ("torchrun with a fresh prefix, SIGKILL", ""),
    "torchrun_sigstop": ("torchrun, SIGSTOP", ""),
}
# What was promised: (field, share of the runs, at most so many seconds).
RECOVERY_GOALS = {
    "trainer_sigkill": (("recovery_s", 0.5, 0.5), ("recovery_s", 0.95, 0.8)),
    "trainer_sigstop": (("verdict_s", 0.5, 1.2), ("after_verdict_s", 0.5, 0.7)),
    "trainer_stall": (("after_verdict_s", 0.5, 0.7),),
    "script_sigkill": (("recovery_s", 0.5, 1.0),),
    "script_sigstop": (("recovery_s", 0.5, 3.2),),
}


def load(folder: Path, name: str, invocation: str) -> list[Row]:
    """Of each case the rows of one invocation; a quick one's only where there is no other."""
    rows = [row for path in sorted(folder.glob(f"{name}-*.jsonl")) for row in read_rows(path)
            if "invocation" in row]
    if invocation:
        return [row for row in rows if row["invocation"] == invocation]
    wanted = {case: max(map(_rank, mine)) for case, mine in by_case(rows).items()}
    return [row for row in rows if _rank(row) == wanted[row["case"]]]


def _rank(row: Row) -> tuple[bool, str]:
    return "--quick" not in row["arguments"].split(), row["invocation"]


def sources(name: str, rows: list[Row]) -> Iterator[str]:
    """A line for each invocation: which cases are of it, which code it was, and where it ran."""
    for invocation in sorted({row["invocation"] for row in rows}):
        mine = [row for row in rows if row["invocation"] == invocation]
        facts = mine[0]["machine"]
        of = ", ".join(case.removeprefix(f"{name}_") for case in by_case(mine))
        yield (f"Rows: `{name}`, invocation {invocation} ({of}), revision "
               f"{facts['revision'] or 'unknown'}; {facts['cores']} cores ({facts['cpu']}), "
               f"Python {facts['python']}, torch {facts['torch']}, load "
               f"{facts['load_1m']} at the start.\n")


def values(rows: Iterable[Row], key: str, failed: bool = False) -> list[float]:
    """Of the runs that ended well; with `failed` of all that have a number."""
    return [row[key] for row in rows
            if (row.get("ok", True) or failed) and row.get(key) is not None]


def spread(found: Sequence[float], digits: int = 2) -> str:
    """Median (p5 to p95), or (lowest to highest) of fewer than 20."""
    if not found:
        return "-"
    ends = (0.05, 0.95) if len(found) >= 20 else (0.0, 1.0)
    low, high = (percentile(found, share) for share in ends)
    return f"{percentile(found, 0.5):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(found: Sequence[float], other: Sequence[float]) -> str:
    if not found or not other:
        return "-"
    return f"{percentile(other, 0.5) / percentile(found, 0.5):.1f} x"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def goals(name: str, rows: list[Row]) -> str:
    """Each goal of a case as met or MISSED; a run without the number, or that did not end well,
    misses it."""
    said = []
    for key, share, most in RECOVERY_GOALS.get(name, ()):
        found = sorted(row.get(key, math.inf) if row["ok"] else math.inf for row in rows)
        reached = found[max(0, math.ceil(share * len(found)) - 1)]
        word = "met" if reached <= most else "MISSED"
        said.append(f"{word} ({key.removesuffix('_s').replace('_', ' ')} p{100 * share:.0f} "
                    f"{reached:.2f} of {most:g})")
    return "; ".join(said) or "-"


def recovery(rows: list[Row]) -> str:
    cases = by_case(rows)
    body = []
    for name, (title, against) in RECOVERY.items():
        mine = cases.get(name, [])
        if not mine:
            continue
        times = values(mine, "recovery_s", failed=True)
        equal = [row["digest_equal"] for row in mine if "digest_equal" in row]
        redone = values(mine, "redone_steps")
        body.append([
            title, f"{len(times)} of {len(mine)}", f"{sum(row['ok'] for row in mine)}",
            spread(times), spread(values(mine, "verdict_s")),
            spread(values(mine, "after_verdict_s")),
            f"{percentile(redone, 0.5):.0f}" if redone else "-",
            f"{sum(equal)} of {len(equal)}" if equal else "-",
            ratio(times, values((row for row in cases.get(against, ()) if row["invocation"]
                                 == mine[0]["invocation"]), "recovery_s", failed=True)),
            goals(name, mine),
        ])
    steps = values(rows, "step_s")
    stalls = cases.get("trainer_stall", [])
    lines = [table(["fault", "came back", "ended with 0", "first new step, s", "verdict, s",
                    "after the verdict, s", "steps redone", "weights equal",
                    "faster than torchrun", "goals, s"], body)]
    lines.append(f"A step takes {spread(steps, 3)} s. Seconds count from the fault to the first "
                 "step that no rank had finished before, on the slowest rank.")
    if stalls:
        still = spread(values(stalls, "still_at_suspicion_s"))
        right = sum(bool(row.get("right_rank")) for row in stalls)
        lines.append(f"Stall: suspected {still} s after the last finished step, "
                     f"right rank in {right} of {len(stalls)}.")
    return "\n\n".join(lines)


def startup(rows: list[Row]) -> str:
    cases = by_case(rows)
    ours, theirs = (values(cases.get(f"startup_{which}", []), "startup_s")
                    for which in ("holdfast", "torchrun"))
    body = [["holdfast run", str(len(ours)), spread(ours)],
            ["torchrun", str(len(theirs)), spread(theirs)]]
    pairs: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["ok"]:
            pair = pairs.setdefault((row["invocation"], row["pair"]), {})
            pair[row["case"]] = row["startup_s"]
    later = [pair["startup_holdfast"] - pair["startup_torchrun"]
             for pair in pairs.values() if len(pair) == 2]
    return (table(["launch to first finished step", "runs", "s"], body)
            + f"\n\nDifference within a pair: {spread(later)} s (below 0: Holdfast is first).")


def memory(rows: list[Row]) -> str:
    body = []
    for name, mine in by_case(rows).items():
        good = [row for row in mine if row["ok"]]
        body.append([f"**{name.removeprefix('memory_')}**", str(len(good)),
                     *(spread(values(good, key), 0) for key in
                       ("total_rss_mb", "total_pss_mb", "total_private_mb", "job_pss_mb"))])
        for item in good[-1]["processes"] if good else ():
            body.append([f"- {item['process']}", "", f"{item['rss_mb']:.0f}",
                         f"{item['pss_mb']:.0f}", f"{item['private_mb']:.0f}", ""])
    return table(["beside the ranks", "runs", "RSS, MB", "PSS, MB", "private, MB",
                  "whole job, PSS, MB"], body)


def overhead(rows: list[Row]) -> str:
    effects, beside = [], []
    for row in rows:
        if not row["ok"]:
            continue
        grade = f"{row['case'].removeprefix('overhead_')}, {row.get('ranks', 2)} ranks"
        if "snapshots" in row and "all" in row:
            row = {**row, **of_snapshots(row)}
        for part in ("all", "hooks", "snapshots", "together"):  # hooks: older rows
            found = row.get(part, {})
            if "mean_percent" in found:
                effects.append([
                    grade, part, str(found.get("pairs", "")),
                    f"{found['step_s']:.3f}" if "step_s" in found else "",
                    f"{found['mean_percent']:+.2f} %",
                    f"{found['low_percent']:+.2f} to {found['high_percent']:+.2f} %",
                ])
        window = row["beside"]
        for part, percent in sorted(window["core_percent"].items()):
            beside.append([grade, part, f"{window['cpu_s'][part]:.2f}",
                           f"{window['window_s']:.0f}", f"{percent:.2f} %"])
        beside.append([grade, "agent's memory", f"RSS {window['agent_rss_mb']} MB",
                       f"PSS {window['agent_pss_mb']} MB", ""])
    return (table(["grade", "switched", "pairs", "step, s", "cost", "95 % interval"], effects)
            + "\n\n" + table(["grade", "process", "CPU-s", "window, s", "of a core"], beside))


def false_acts(rows: list[Row]) -> str:
    head = ["minutes", "steps", "step p5, s", "longest, s", "acts", "suspicions", "taken back",
            "verdict"]
    keys = ("minutes", "steps", "step_p5_s", "step_max_s", "acts", "suspicions", "taken_back",
            "verdict")
    return table(["grade", *head], [
        [row["case"].removeprefix("false_acts_"), *(str(row.get(key, "-")) for key in keys)]
        for row in rows
    ])


def telemetry(rows: list[Row]) -> str:
    """Each promised number beside what was measured, then who used what in each window."""
    body = [[row["case"].removeprefix("telemetry_"), name, f"{row[name]:.2f}", f"{most:g}"]
            for row in rows if row["ok"] for name, most in row["goals"].items()]
    used = []
    for row in rows:
        for what, part in (("the node", row), ("host part", row.get("holdfast")),
                           ("host part, node exporter", row.get("node_exporter"))):
            for process, percent in (part or {}).get("core_percent", {}).items():
                kept = part["memory"].get(process, {})
                if percent or kept:
                    used.append([what, process, f"{percent:.2f} %", str(kept.get("rss_mb", "")),
                                 str(kept.get("pss_mb", "")), str(part["series"])])
    tables = [table(["case", "number", "measured", "at most"], body)] if body else []
    for row in rows:
        if row.get("absent"):
            tables.append(f"Not on the node of {row['case'].removeprefix('telemetry_')}: "
                          f"{', '.join(row['absent'])}.")
    if used:
        tables.append(table(["watched", "process", "of a core", "RSS, MB", "PSS, MB", "series"],
                            used))
    return "\n\n".join(tables)


def kernel_latency(rows: list[Row]) -> str:
    """All lines of a case together: a round is one agent's."""
    body = []
    for name, mine in by_case(rows).items():
        found = [1000 * one for row in mine for one in row.get("latency_s", ())]
        shares = [f"{percentile(found, share):.1f}" for share in (0.5, 0.99, 1.0)]
        body.append([name.removeprefix("kernel_latency_"), str(len(found)), *shares])
    return table(["cores", "lines", "p50, ms", "p99, ms (at most 100)", "worst, ms"], body)


def classify(rows: list[Row]) -> str:
    return table(["root right", "innocent blamed", "MB/s of a core", "with signals"], [
        [f"{row['right']} of {row['cases']}", str(row["misblamed"]), spread(row["mb_per_s"], 0),
         spread(row["mb_per_s_signals"], 0)] for row in rows
    ])


def log_child(rows: list[Row]) -> str:
    head = ["start, CPU-s", "a sample, CPU-ms", "of a core", "diagnosis, s", "RSS, MB"]
    return table(head, [
        [f"{row['start_cpu_s']:.2f}", spread([1000 * one for one in row["sample_cpu_s"]]),
         f"{100 * row['core_share']:.3f} %", f"{row['diagnose_wall_s']:.2f}",
         str(row["rss_bytes"] >> 20)] for row in rows
    ])


def checks(rows: list[Row]) -> str:
    mine = by_case(rows)
    body = [[words, spread(values(mine.get(f"checks_{name}", []), "took_s"))] for name, words in (
        ("round", "a round of `holdfast check`, nothing cached, s"),
        ("health", "`--for slurm-health`, from the cache, s"))]
    turns = [row for row in mine.get("checks_failing", []) if row["ok"]]
    for key, what in (("s", "s"), ("cpu_s", "s of processor time")) if turns else ():
        failing, passing = ([row[f"{which}_{key}"] for row in turns]
                            for which in ("failing", "passing"))
        body.append([f"a round in which `tensor` fails, {what}; in turns with it, one that passes",
                     f"{spread(failing)}; {spread(passing)}"])
    pairs = [row for row in mine.get("checks_busbw", []) if row["ok"]]
    for name in pairs[0]["check_bytes_per_s"] if pairs else ():
        ours, plain = ([row[f"{whose}_bytes_per_s"][name][0] / 1e9 for row in pairs]
                       for whose in ("check", "script"))  # [median, best]
        body.append([f"busbw of {name}, {pairs[0]['bytes'] >> 20} MB, GB/s; a plain torch script",
                     f"{spread(ours)}; {spread(plain)}"])
    return table(["", "median (lowest to highest)"], body)


def peers(rows: list[Row]) -> str:
    head = ["", "as they must be", "good nodes excluded", "s, median (lowest to highest)"]
    body = []
    for name, mine in sorted(by_case(rows).items()):
        body.append([name.removeprefix("peers_"),
                     f"{sum(row['ok'] for row in mine)} of {len(mine)}",
                     str(sum(row["good_excluded"] for row in mine)),
                     spread(values(mine, "took_s")) if "took_s" in mine[0] else "-"])
    return table(head, body)


CLUSTER = {
    "rank_kill": "SIGKILL of a rank", "exception": "an exception in a rank",
    "node_loss": "a node loses power, a spare is ready",
    "leader_and_etcd": "the node of the leader",
    "shrink": "a node loses power, no spare: 4 become 3",
}


def cluster(rows: list[Row]) -> str:
    """Each fault, then whose end it was; which weights came out at each world's end."""
    cases = by_case(rows)
    body, lines = [], []
    for name, title in CLUSTER.items():
        mine = cases.get(name, [])
        parts = [(title, mine)]
        if name in ("node_loss", "shrink"):
            parts += [("of them the node of the leader", [r for r in mine if r["leader"]]),
                      ("of them the one with etcd's leader",
                       [r for r in mine if r.get("etcd_leader")])]
        for words, part in parts:
            if part:
                known = [one for row in part for one in row.get("known_s", {}).values()]
                body.append([words, timers(part[0]), str(len(part)),
                             spread(values(part, "recovery_s")),
                             spread(known) + (f", longest {max(known):.2f}" if known else ""),
                             str(sum(row["redone_steps"] for row in part))])
    for name, mine in cases.items():
        if name.startswith("weights_"):
            lines += [f"{name.removeprefix('weights_')}, {row['steps']} steps in "
                      f"{row['generations']} generations, against a run without a fault: "
                      + ("the same weights to the last bit." if row["identical"] else
                         f"weights at most {row['weights_apart']:.1e} apart.")
                      if row["ok"] else f"{name.removeprefix('weights_')}: {row['why']}"
                      for row in mine]
    return "\n\n".join([table(["fault", "lease; etcd's timers", "runs", "first new step, s",
                               "named by each other agent, s", "steps redone"], body), *lines])


def timers(row: Row) -> str:
    """Rows before 2026-11-30 say them in their arguments alone."""
    return (f"{row['lease_s']:g} s; {row['etcd_ms'][0]} and {row['etcd_ms'][1]} ms"
            if "lease_s" in row else "-")


def cluster_script(rows: list[Row]) -> str:
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["case"].removeprefix("script_"), row["runner"]), []).append(row)
    return table(["fault", "runner", "runs", "began", "came back", "first new step, s"], [
        [*key, str(len(mine)), str(sum(row["ok"] for row in mine)),
         str(len(times := values(mine, "recovery_s"))), spread(times)]
        for key, mine in runs.items()])


def torture(rows: list[Row]) -> str:
    return table(["ranks killed", "attempted steps committed", "lost for each, s", "back, s",
                  "steps redone", "weights equal"], [
        [str(row["kills"]), f"{row['steps']} of {row['attempted']} "
         f"({100 * row['committed_share']:.1f} %)", f"{row['lost_s_each']:.2f}",
         f"{spread(row['back_s'])}, longest {max(row['back_s']):.2f}", str(row["redone_steps"]),
         str(row["equal"])] for row in rows])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.report")
    parser.add_argument("--folder", type=Path, default=BENCH / "results")
    parser.add_argument("--invocation", default="", help="instead of the newest of each case")
    options = parser.parse_args(arguments)
    written = (recovery, startup, memory, overhead, false_acts, telemetry, kernel_latency,
               classify, log_child, checks, peers, cluster, cluster_script, torture)
    writers = dict(zip(NAMES, written, strict=True))
    for name, write in writers.items():
        rows = load(options.folder, name, options.invocation)
        if not rows:
            continue
        print(f"## {name.replace('_', ' ')}\n\n{write(rows)}\n")
        print("\n".join(sources(name, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
