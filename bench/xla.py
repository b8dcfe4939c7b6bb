"""What compiles cost on XLA's processor device, and whether a second start finds them.

Each start is a process of its own that builds the example, compiles a step's two graphs and takes
ten steps: without torch_xla's persistent cache, then with an empty one, then with what that one
left.

    HOLDFAST_TEST_XLA_PYTHON=... python -m bench.xla [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .common import BENCH, ROOT, Results

LIMIT_S = 300.0
START = """
import json, sys, time
begin = time.monotonic()
if sys.argv[2]:
    import torch_xla.runtime
    torch_xla.runtime.initialize_cache(sys.argv[2], readonly=False)
from holdfast.trainer.config import load
from holdfast.trainer.loop import prepare
from holdfast.trainer.engines.strategy import MicroBatch
job = prepare(load(None, [
    "device=xla", "batch=4", "checkpoint.every=0", "work_dir=" + sys.argv[1]]))
prepared = time.monotonic()
import torch_xla
import torch_xla.debug.metrics as metrics
engine, batch = job.strategy, job.data.batch(range(4))
engine._push()
times = []
for step in range(10):
    at = time.monotonic()
    engine.run([MicroBatch(0, step, batch, 1)], lambda number, loss: None, lambda: False)
    engine.update(1e-4, engine.norm())
    times.append(time.monotonic() - at)
count, total_ns, _ = metrics.metric_data("CompileTime")
print(json.dumps({"prepare_s": prepared - begin, "compiles": count, "compile_s": total_ns / 1e9,
                  "cache_hits": metrics.counter_value("PersistentCacheHit") or 0,
                  "cache_misses": metrics.counter_value("PersistentCacheMiss") or 0,
                  "step_s": sorted(times)[5],
                  "torch": torch_xla.__version__}))
sys.stdout.flush()
import os
os._exit(0)
"""


def start(python: str, work: Path, cache: str) -> dict[str, object]:
    """One start; its numbers, and the first thing that torch_xla said of its cache."""
    done = subprocess.run(
        [python, "-c", START, str(work), cache], capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT / ".types")}, check=True)
    said = [line for line in done.stderr.splitlines() if "executable" in line]
    row = dict(json.loads(done.stdout.splitlines()[-1]))
    return {**row, "said": said[0].partition("] ")[2] if said else ""}


def second_start(python: str) -> dict[str, object]:
    """A row for bench/engines.py: what a start with a warm cache still compiles."""
    with tempfile.TemporaryDirectory(prefix="hfb-") as scratch:
        for _ in range(2):
            row = start(python, Path(scratch), f"{scratch}/cache")
    return {**row, "case": "compiles", "runs": 1, "ok": row["compiles"] == 0, "why": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    python = os.environ.get("HOLDFAST_TEST_XLA_PYTHON")
    if not python:
        parser.error("set HOLDFAST_TEST_XLA_PYTHON to a Python with torch_xla 2.9")
    results = Results("xla", options.out)
    with tempfile.TemporaryDirectory(prefix="hfb-") as scratch:
        for number in range(options.rounds):
            cache = f"{scratch}/cache-{number}"
            for case, folder in (("no cache", ""), ("empty cache", cache), ("warm cache", cache)):
                row = start(python, Path(scratch), folder)
                results.add({"case": case, "round": number, **row})
                print(json.dumps({"case": case, **row}), flush=True)
    print(f"rows: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
