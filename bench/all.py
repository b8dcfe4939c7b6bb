"""Every measurement, one after the other, then the table: what `make bench` runs.

Owns the order and the sizes.  One measurement that fails does not keep the next from running.

    python -m bench.all            # about 1 h 40: the table without the long runs
    python -m bench.all --full     # about three and a half hours: 4,500 pairs, 30 minutes unevenly
    python -m bench.all --quick    # about 20 minutes: one run of each, to see that all work
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import (
    classify,
    cluster,
    cluster_script,
    false_acts,
    kernel_latency,
    log_child,
    memory,
    overhead,
    recovery,
    report,
    startup,
    telemetry,
    torture,
)
from .common import BENCH, Failed

Main = Callable[[list[str]], int]


def sizes(quick: bool, full: bool) -> list[tuple[str, Main, list[str]]]:
    if quick:
        return [(name, main, ["--quick"]) for name, main in (
            ("startup", startup.main), ("memory", memory.main), ("recovery", recovery.main),
            ("overhead", overhead.main), ("false acts", false_acts.main),
            ("telemetry", telemetry.main), ("kernel latency", kernel_line),
            ("classify", classify.main), ("log child", log_child.main),
            *over_nodes())]
    return [
        ("startup", startup.main, ["--pairs", "7"]),
        ("memory", memory.main, ["--runs", "5"]),
        ("recovery", recovery.main, ["--runs", "10"]),
        ("overhead", overhead.main, ["--full"] if full else []),
        ("false acts", false_acts.main, ["--full"] if full else []),
        ("telemetry", telemetry.main, []),
        ("kernel latency", kernel_line, []),
        ("classify", classify.main, []),
        ("log child", log_child.main, []),
        *((name, main, []) for name, main in over_nodes()),
    ]


def over_nodes() -> list[tuple[str, Main]]:
    """Their nodes are network namespaces, which need root and some tools."""
    def where_possible(main: Main) -> Main:
        def measure(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except pytest.skip.Exception as missing:
                print(f"skip: {missing}")
                return 0
        return measure

    return [("cluster", where_possible(cluster.main)),
            ("cluster, script", where_possible(cluster_script.main)),
            ("torture", where_possible(torture.main))]


def kernel_line(arguments: list[str]) -> int:
    """Writes to the kernel's log, which not everybody may who wants the other numbers."""
    if not os.access("/dev/kmsg", os.W_OK):
        print("skip: /dev/kmsg may not be written here (needs root)")
        return 0
    return kernel_latency.main(arguments)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.all", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    worst = 0
    for name, run, given in sizes(options.quick, options.full):
        print(f"== {name}", flush=True)
        try:
            worst = max(worst, run([*given, "--out", str(options.out)]))
        except (OSError, Failed) as error:
            print(f"{name}: {error}", file=sys.stderr)
            worst = 1
    report.main(["--folder", str(options.out)])
    return worst


if __name__ == "__main__":
    sys.exit(main())
