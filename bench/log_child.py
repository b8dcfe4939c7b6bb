"""What the child that reads the ranks' logs costs: its start, the sample in between, a diagnosis.

Owns one real child, fed as the launcher feeds it, over files of eight ranks that grow by 100 MB a
minute.  Waits for nothing: the files get what 15 s would write, then the sample is asked for.

    python -m bench.log_child      # one row in bench/results; about 10 s
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .common import BENCH, Results, become_subreaper, die_with_parent

RANKS = 8
SAMPLES = 20
SAMPLE_S = 15.0
MOST = 0.01  # of a core
UNSURE_MOST_S = 0.15  # of processor time, for a death whose logs hold no sure root
RATE_BYTES_S = 100e6 / 60  # of all ranks together
BUDGET_BYTES = 65536 * int(SAMPLE_S)
LINE = ("2026-11-20 10:%02d:%02d,123 [rank%d] INFO iteration %d/ 500000 | lm loss: 2.609532E+00 | "
        "grad norm: 0.038 | number of nan iterations:   0 | learning rate: 3.0E-04\n")
NO_ROOT = b"loader: a shard could not be read and nothing says why (rc=-7)\n"
ECC = b"RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


class Child:
    """The child as the launcher starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-P", "-m", "holdfast.agent.logs.child"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        preexec_fn=die_with_parent)

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Its answer, and how long it took as `wall_s`."""
        assert self.process.stdin and self.process.stdout
        ranks = [[rank, 0, -1, 0, -1] for rank in range(RANKS)]
        request = {"n": 1, "do": what, "folder": str(self.folder), "ranks": ranks, **more}
        begin_s = time.monotonic()
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return {**answer, "wall_s": time.monotonic() - begin_s}

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


def write(folder: Path, name: str, nbytes: float, last: bytes = b"") -> None:
    """Step lines to each rank's file."""
    for rank in range(RANKS):
        text = "".join(LINE % (n // 60 % 60, n % 60, rank, n) for n in range(1000)).encode()
        path = folder / f"rank-{rank}" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(text * max(1, round(nbytes / RANKS / len(text))) + last)


def unsure(times: int) -> list[float]:
    """Processor time of each look at 16 MB that hold an error, and no root that is sure."""
    spent_s = []
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as text:
        write(Path(text), "stdout.log", 0)
        write(Path(text), "stderr.log", RANKS * (2 << 20), NO_ROOT)
        for _ in range(times):
            child = Child(Path(text))
            try:
                before = child.ask("sample", bytes=0)
                found = child.ask("diagnose")
            finally:
                child.end()
            assert found["detail"]["root"] is None and found["read"] >= RANKS << 20
            spent_s.append(round(found["cpu_s"] - before["cpu_s"], 3))
    return spent_s


def measure(samples: int) -> dict[str, Any]:
    """All CPU times are the child's own, one for each sample."""
    with tempfile.TemporaryDirectory(prefix="holdfast-logs-") as text:
        folder = Path(text)
        for name in ("stdout.log", "stderr.log"):
            write(folder, name, 0)
        child = Child(folder)
        try:
            first = sample = child.ask("sample", bytes=BUDGET_BYTES)
            spent_s = []
            for _ in range(samples):
                write(folder, "stdout.log", RATE_BYTES_S * SAMPLE_S)
                before, sample = sample, child.ask("sample", bytes=BUDGET_BYTES)
                spent_s.append(round(sample["cpu_s"] - before["cpu_s"], 6))
            write(folder, "stderr.log", RANKS << 20, ECC)
            found = child.ask("diagnose")
        finally:
            child.end()
    share = fmean(spent_s) / SAMPLE_S
    unsure_s = unsure(min(samples, 5))
    fast = median(unsure_s) <= UNSURE_MOST_S
    return {
        "case": "log_child", "ok": share <= MOST and fast and bool(found["detail"]["root"]),
        "why": "",
        "start_wall_s": round(first["wall_s"], 3), "start_cpu_s": first["cpu_s"],
        "sample_cpu_s": spent_s, "core_share": round(share, 6),
        "sample_read_bytes": sample["read"], "sample_skipped_bytes": sample["skipped"],
        "diagnose_bytes": found["read"], "diagnose_wall_s": round(found["wall_s"], 3),
        "diagnose_cpu_s": round(found["cpu_s"] - sample["cpu_s"], 3),
        "diagnose_unsure_cpu_s": unsure_s,
        "root": (found["detail"]["root"] or {}).get("signature", ""),
        "rss_bytes": found["rss_bytes"],
    }


def main(arguments: list[str] | None = None) -> int:
    """0 when the sample costs at most 1 % of a core and a death without a sure root 0.15 s."""
    parser = argparse.ArgumentParser(prog="bench.log_child", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 samples")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    become_subreaper()  # before files are written: a SIGTERM takes them away
    results = Results("log_child", options.out)
    row = measure(3 if options.quick else SAMPLES)
    results.add(row)
    print(f"start      {row['start_wall_s']} s, {row['start_cpu_s']} s of CPU; "
          f"{row['rss_bytes'] >> 20} MB")
    print(f"sample     {100 * row['core_share']:.3f} % of a core at 100 MB/min; skips "
          f"{row['sample_skipped_bytes'] >> 20} MB in {SAMPLE_S:.0f} s")
    print(f"diagnosis  {row['diagnose_wall_s']} s for {row['diagnose_bytes'] >> 20} MB")
    print(f"no root    {median(row['diagnose_unsure_cpu_s'])} s of CPU, the grammar included")
    print(f"rows: {results.path}")
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
