"""What Holdfast costs a step: switched on and off inside one run, pair by pair.

Owns the comparison and its confidence interval, and the CPU-seconds and memory of the processes
beside the ranks.  Two runs: a plain script (optimizer hooks, ticker) and the trainer (phases, step
markers, ticker; snapshots in every second cadence).  In a pair one step has everything on and its
neighbour everything off, launcher, agent and their children stopped, in random order; a pair with a
snapshot in it counts for snapshots alone, whose steps are held against the same place of a cadence
without.

    python -m bench.overhead            # 150 pairs each: shows that it works, not the number
    python -m bench.overhead --full     # 4,500 pairs each: about 25 minutes a grade
    python -m bench.overhead --ranks 1  # with a core that no rank needs, as a node has them
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from . import common, memory
from .common import BENCH, ROOT, Failed, Place, Results
from .overhead_switch import BESIDE, WARM_STEPS

WINDOW, NEAR = 4, 12  # steps: of a snapshot, and before and behind them those they are held against
STEP_LIMIT_S = 5.0  # on average; a bound, never a condition
SCRAPE_S = 15.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Line(NamedTuple):
    step: int
    all_on: bool
    snapshots_on: bool
    ns: int
    cadence: int

    def has_snapshot(self) -> bool:
        return self.cadence > 0 and self.step % self.cadence == 0


def read_record(path: Path) -> tuple[tuple[int, int], list[Line]]:
    """((pid, ticker's thread id), finished steps)."""
    head, *rest = path.read_text().splitlines()
    _, pid, thread = head.split()
    lines = []
    for text in rest:
        step, hooks, snapshots, ns, cadence = (int(word) for word in text.split())
        lines.append(Line(step, bool(hooks), bool(snapshots), ns, cadence))
    return (int(pid), int(thread)), lines


def compare(on: list[float], off: list[float]) -> dict[str, Any]:
    """Relative cost of `on` over `off`, pairs in the same place; per cent with a 95 % interval."""
    base = statistics.fmean(off) if off else 0.0
    return relative(on, off, base, base)


def relative(
    on: list[float], off: list[float], base_ns: float, step_ns: float
) -> dict[str, Any]:
    """What `on` takes more than `off`, in per cent of `base_ns`."""
    if len(on) < 2:
        return {"pairs": len(on)}
    differences = [a - b for a, b in zip(on, off, strict=True)]
    low, high = common.bootstrap(differences)
    return {
        "pairs": len(on), "mean_percent": round(100 * statistics.fmean(differences) / base_ns, 3),
        "low_percent": round(100 * low / base_ns, 3),
        "high_percent": round(100 * high / base_ns, 3),
        "median_percent": round(100 * statistics.median(differences) / base_ns, 3),
        "step_s": round(step_ns / 1e9, 5),
        "sd_percent": round(100 * statistics.stdev(differences) / base_ns, 2),
    }


def whole_effect(lines: list[Line], pairs: int) -> dict[str, Any]:
    """Lines WARM_STEPS+1 .. are the pairs, two by two."""
    used = lines[WARM_STEPS : WARM_STEPS + 2 * pairs]
    on, off = [], []
    for first, second in zip(used[::2], used[1::2], strict=True):
        if first.has_snapshot() or second.has_snapshot():
            continue
        assert first.all_on != second.all_on
        a, b = (first, second) if first.all_on else (second, first)
        on.append(float(a.ns))
        off.append(float(b.ns))
    return compare(on, off)


def snapshots_effect(lines: list[Line], pairs: int) -> dict[str, Any]:
    """A snapshot's steps against the same place of a cadence without, over a whole cadence.

    The rank copies between two steps and does nothing of it later, so what a snapshot costs lies in
    the step that it falls into and what it leaves in caches in the few behind.  All other steps of
    a cadence are alike with and without it: compared as well, they added noise alone.
    """
    used = [line for line in lines[WARM_STEPS : WARM_STEPS + 2 * pairs] if line.cadence]
    cadence = used[-1].cadence if used else 0
    by_step = {line.step: line for line in used if line.cadence == cadence}
    extra: dict[int, tuple[bool, float]] = {}  # cadence -> (with its snapshot, its steps' excess)
    for line in by_step.values():
        around = [by_step.get(line.step + offset) for offset in range(-NEAR, WINDOW + NEAR)]
        if not line.has_snapshot() or None in around:
            continue
        known = [float(one.ns) for one in around if one is not None]
        usual = statistics.median(known[:NEAR] + known[-NEAR:])
        own = known[NEAR : NEAR + WINDOW]
        extra[line.step // cadence] = (line.snapshots_on, sum(own) - WINDOW * usual)
    on, off = [], []
    for number in sorted(extra):
        if number % 2 == 0 and number + 1 in extra:
            two = dict([extra[number], extra[number + 1]])
            if len(two) == 2:
                on.append(two[True])
                off.append(two[False])
    step_ns = statistics.fmean(line.ns for line in by_step.values()) if by_step else 0.0
    return {**relative(on, off, cadence * step_ns, step_ns), "cadence_steps": cadence}


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of effects that are measured on different steps, and so err independently."""
    if not all("mean_percent" in part for part in parts):
        return {}
    mean = sum(part["mean_percent"] for part in parts)
    below, above = (math.hypot(*(part["mean_percent"] - part[bound] for part in parts))
                    for bound in ("low_percent", "high_percent"))
    return {"mean_percent": round(mean, 3), "low_percent": round(mean - below, 3),
            "high_percent": round(mean + above, 3)}


def of_snapshots(row: dict[str, Any]) -> dict[str, Any]:
    """What a row's own steps say of snapshots, whichever code wrote it."""
    lines = [Line(step, bool(on), bool(snapshots), ns, cadence)
             for step, on, snapshots, ns, cadence in row["steps"]]
    found = snapshots_effect(lines, row["all"]["pairs"])
    return {"snapshots": found, "together": together([row["all"], found])}


# ------------------------------------------------------------------------------------ CPU


def process_cpu_s(pid: int) -> float:
    fields = common.stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def thread_cpu_s(pid: int, thread: int) -> float:
    with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def cpu_by_part(root: int, tickers: list[tuple[int, int]]) -> dict[str, float]:
    """CPU-seconds so far of launcher, agent, store children, standbys and tickers."""
    ranks = {pid for pid, _ in tickers}
    found: dict[str, float] = {}
    for pid in [root, *common.descendants(root)]:
        if pid in ranks:
            continue
        try:
            kind = memory.kind_of(pid, root, set())
            kind = "store and standby" if kind == "store" else kind
            found[kind] = found.get(kind, 0.0) + process_cpu_s(pid)
        except OSError:
            continue  # a short task that ended
    found["tickers"] = sum(thread_cpu_s(pid, thread) for pid, thread in tickers)
    return found


def cpu_window(where: Place, root: int, tickers: list[tuple[int, int]], seconds: float
               ) -> dict[str, Any]:
    """Everything on, one scrape of /metrics per 15 s, for `seconds`."""
    before, began_s, scrapes = cpu_by_part(root, tickers), time.monotonic(), 0
    next_scrape_s = began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        if now_s >= next_scrape_s:
            next_scrape_s += SCRAPE_S
            try:
                common.api(where, "bench", "/metrics")
                scrapes += 1
            except Failed:
                pass  # counted by its absence from `scrapes`
        time.sleep(0.1)  # the window is a length of time
    took_s = time.monotonic() - began_s
    after = cpu_by_part(root, tickers)
    cpu_s = {part: round(after[part] - before.get(part, 0.0), 4) for part in after}
    agent = [memory.rollup(pid) for pid in common.descendants(root)
             if memory.kind_of(pid, root, set()) == "agent"]
    return {
        "window_s": round(took_s, 2), "scrapes": scrapes, "cpu_s": cpu_s,
        "core_percent": {part: round(100 * value / took_s, 3) for part, value in cpu_s.items()},
        "agent_rss_mb": round(agent[0]["Rss"], 1) if agent else None,
        "agent_pss_mb": round(agent[0]["Pss"], 1) if agent else None,
    }


# ------------------------------------------------------------------------------------ runs


def command_of(grade: str, where: Place, shared: Path, ranks: int, pairs: int) -> list[str]:
    if grade == "script":
        script = [str(BENCH / "overhead_script.py"), str(where.home), str(pairs)]
        return common.run_command(script, ranks, "bench")
    return common.train_command(
        ranks, "bench", f"work_dir={shared}", "checkpoint.every=0", "steps=1000000",
        f"micro_batches={ranks}", "data=bench.overhead_data:Data",
        f'data_options.folder="{where.home}"', f"data_options.pairs={pairs}",
    )


def name_beside(where: Place, root: int) -> None:
    """Tells the rank that switches which processes are Holdfast's: all but ranks and theirs."""
    ranks = {read_record(record)[0][0] for record in where.home.glob("overhead-*")}
    below = {child for pid in ranks for child in common.descendants(pid)}
    beside = [root, *(pid for pid in common.descendants(root) if pid not in ranks | below)]
    new = where.home / f"{BESIDE}.new"
    new.write_text(" ".join(map(str, beside)))
    new.rename(where.home / BESIDE)


def let_go_on(where: Place) -> None:
    """A rank that ended in mid-measurement leaves them stopped."""
    if (where.home / BESIDE).exists():
        for pid in (where.home / BESIDE).read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGCONT)


def measure(grade: str, shared: Path, ranks: int, pairs: int, window_s: float) -> dict[str, Any]:
    with common.place(grade) as where:
        path = [str(ROOT), where.environ.get("PYTHONPATH", "")]
        where.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = command_of(grade, where, shared, ranks, pairs)
        row: dict[str, Any] = {"case": f"overhead_{grade}", "ranks": ranks, "ok": False, "why": "",
                               "command": common.neutral(command, where)}
        with common.running(command, where) as process:
            records = [where.home / f"overhead-{rank}" for rank in range(ranks)]
            try:
                wait_lines(process, records[0], WARM_STEPS)
                name_beside(where, process.pid)
                wait_lines(process, records[0], WARM_STEPS + 2 * pairs)
                tickers = [read_record(record)[0] for record in records]
                row["beside"] = cpu_window(where, process.pid, tickers, window_s)
            except Failed as error:
                return {**row, "why": str(error), "log": common.log_tail(where)}
            finally:
                let_go_on(where)
        lines = read_record(records[0])[1]
        row["all"] = whole_effect(lines, pairs)
        row["steps"] = [list(map(int, line)) for line in lines]
        if grade == "trainer":
            row |= of_snapshots(row)
    return {**row, "ok": True}


def wait_lines(process: Any, record: Path, count: int) -> None:
    deadline = time.monotonic() + 120.0 + STEP_LIMIT_S * count
    done, file = -1, None  # the first line is the ticker's
    try:
        while done < count:
            if process.poll() is not None:
                raise Failed(f"ended with {process.returncode} after {max(done, 0)} steps")
            if time.monotonic() > deadline:
                raise Failed(f"only {max(done, 0)} of {count} steps in time")
            if file is None and record.exists():
                file = open(record, "rb")  # closed below
            if file is not None:
                done += file.read().count(b"\n")
            time.sleep(0.1)  # a poll: nothing here is timed by it
    finally:
        if file is not None:
            file.close()


def show(row: dict[str, Any]) -> None:
    print(f"{row['case']}: {'ok' if row['ok'] else 'FAIL ' + row['why']}")
    for part in ("all", "snapshots"):
        found = row.get(part, {})
        if "mean_percent" in found:
            print(f"    {part:9s} {found['mean_percent']:+.3f} % of a step of "
                  f"{found['step_s']:.3f} s, 95 % interval {found['low_percent']:+.3f} to "
                  f"{found['high_percent']:+.3f}, {found['pairs']} pairs, "
                  f"sd {found['sd_percent']} %")
        elif found:
            print(f"    {part:9s} {found['pairs']} pairs: too few")
    if found := row.get("together", {}):
        print(f"    together  {found['mean_percent']:+.3f} %, 95 % interval "
              f"{found['low_percent']:+.3f} to {found['high_percent']:+.3f}")
    for part, value in row.get("beside", {}).get("core_percent", {}).items():
        print(f"    {part:9s} {value:6.3f} % of a core")
    if row["ok"]:
        print(f"    agent     rss {row['beside']['agent_rss_mb']} MB, "
              f"pss {row['beside']['agent_pss_mb']} MB", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.overhead")
    parser.add_argument("--full", action="store_true", help="4,500 pairs, CPU over 120 s")
    parser.add_argument("--quick", action="store_true", help="20 pairs, CPU over 5 s")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--grades", default="script,trainer")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    pairs, window_s = (4500, 120.0) if options.full else (20, 5.0) if options.quick else (150, 30.0)
    results = Results("overhead", options.out)
    with tempfile.TemporaryDirectory(prefix="hfb-") as folder:
        for grade in options.grades.split(","):
            row = measure(grade, Path(folder), options.ranks, options.pairs or pairs,
                          window_s)
            results.add(row)
            show(row)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
