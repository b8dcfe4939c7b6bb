"""How often the root of a dead run's logs is named rightly, and what the search costs.

Owns the table: each of the catalogue's samples alone, and the cases of bench/classify_cases.py.
A user's error that is put on a node is counted apart, and is never to happen.

    python -m bench.classify                   # a table and one row in bench/results; about 8 s
    python -m bench.classify --outside FILE    # labelled excerpts from outside (or a folder)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.agent.core.parse.logs import scan
from holdfast.agent.logs import files

from . import classify_cases, classify_outside
from .classify_cases import Case
from .common import BENCH, Results

WANTED = 0.99
THROUGHPUT_BYTES = 48 << 20
BLAMABLE = ("infra", "network")


def cases() -> list[Case]:
    import tomllib

    rows = tomllib.loads(files.SHIPPED.read_text())["signature"]
    samples = [
        classify_cases.from_sample(row["id"], row["role"], row["culprit"], sample, number)
        for row in rows for number, sample in enumerate(row["samples"], 1)
    ]
    return samples + classify_cases.variants()


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """{name, expected, got, right, misblamed} of one case, through real files."""
    paths = []
    for name, text in case.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogatepass")
        paths.append(str(path))
    root = files.diagnose(paths).diagnosis.root
    got = root.signature if root else ""
    culprit = root.culprit if root else ""
    rank = root.rank if root else None
    right = got == case.root and (not got or culprit == case.culprit)
    if got and case.rank is not None:
        right = right and rank == case.rank
    innocent = case.culprit not in BLAMABLE
    return {"name": case.name, "expected": case.root, "got": got, "rank": rank, "right": right,
            "misblamed": innocent and culprit in BLAMABLE}


def throughput(signals: bool, families: bool = False) -> float:
    """MB/s of one core over the log of a healthy run, in CPU time."""
    row = ("2026-11-20 10:%02d:%02d,123 [rank%d] INFO iteration %d/ 500000 | lm loss: 2.609532E+00 "
           "| grad norm: 0.038 | number of nan iterations:   0 | learning rate: 3.0E-04\n")
    piece = "".join(row % (i // 60 % 60, i % 60, i % 8, i) for i in range(6600)).encode()
    known = files.load_families() if families else None
    scanner = scan.Scanner(files.load_catalogue(), signals=signals, families=known)
    begin_s = time.process_time()
    for _ in range(THROUGHPUT_BYTES // len(piece)):
        scanner.feed(piece)
    scanner.close()
    spent_s = time.process_time() - begin_s
    return THROUGHPUT_BYTES // len(piece) * len(piece) / 1e6 / spent_s


def measure(times: int) -> dict[str, Any]:
    found = []
    for case in cases():
        with tempfile.TemporaryDirectory(prefix="holdfast-classify-") as folder:
            found.append(judge(case, Path(folder)))
    right = sum(one["right"] for one in found)
    misblamed = sum(one["misblamed"] for one in found)
    kinds = {"mb_per_s": (False, False), "mb_per_s_signals": (True, False),
             "mb_per_s_dead": (True, True)}
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(times):  # in turn, so that a busy machine slows all of them
        for name, asked in kinds.items():
            speeds[name].append(round(throughput(*asked), 1))
    return {
        "case": "classify", "ok": right >= WANTED * len(found) and not misblamed, "why": "",
        "cases": len(found), "right": right, "misblamed": misblamed,
        "wrong": [one for one in found if not one["right"]],
        "judged": [[one["name"], one["got"], one["rank"]] for one in found], **speeds,
    }


def outside(path: Path, results: Results) -> int:
    """0 when each file of logs that no rule was written for reaches its goal."""
    fine = True
    for name, cases in classify_outside.read(path):
        rows = [classify_outside.judge(case) for case in cases]
        found = classify_outside.score(rows)
        fine = fine and classify_outside.good(found)
        results.add({"case": name, "ok": classify_outside.good(found), "why": "", **found,
                     "judged": [[one["id"], one["got"], one["expected"]] for one in rows]})
        print("\n".join(classify_outside.show(name, found, rows)))
    print(f"rows: {results.path}")
    return 0 if fine else 1


def main(arguments: list[str] | None = None) -> int:
    """0 when at least 99 % are right and nobody innocent is blamed."""
    parser = argparse.ArgumentParser(prog="bench.classify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the speed once, not thrice")
    parser.add_argument("--outside", type=Path, metavar="FILE_OR_DIR",
                        help="score labelled excerpts (JSON lines) in place of the own table")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    if options.outside:
        return outside(options.outside, Results("classify_outside", options.out))
    results = Results("classify", options.out)
    row = measure(1 if options.quick else 3)
    results.add(row)
    for one in row["wrong"]:
        print(f"wrong: {one['name']}: expected {one['expected'] or 'none'}, got {one['got']}")
    speed, speed_signals, speed_dead = (
        median(row[name]) for name in ("mb_per_s", "mb_per_s_signals", "mb_per_s_dead"))
    print(f"root right   {row['right']} of {row['cases']}")
    print(f"misblamed    {row['misblamed']}")
    print(f"throughput   {speed} MB/s of one core: 100 MB/min cost {100 * 1.667 / speed:.1f} %")
    print(f"with signals {speed_signals} MB/s")
    print(f"a dead run's {speed_dead} MB/s, with the look for families at its end")
    print(f"rows: {results.path}")
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
