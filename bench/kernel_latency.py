"""A kernel line -> its verdict: how long the running agent takes, on a quiet and on a busy machine.

Owns the lines, the busy loops, and the child that is the agent: the daemon as it is, which says in
its output when a step came out with a new verdict of detector `kernel`.  It watches the
node of bench.telemetry meanwhile, 8 GPUs and all, its fast set every second.  The clock starts just
before the write to /dev/kmsg.  Needs root; sysctl kernel.printk_devkmsg is set and set back.

    python -m bench.kernel_latency [--rounds 5] [--quick] [--cases quiet busy busy_nice]

Each round is a new agent and 60 lines, of 60 GPUs; between two lines lies more than a step's gap.
`busy` has two loops a core beside it, all at the same niceness; the unit's Nice=-10 is measured as
`busy_nice`.  Exit code 1 when a round had no number, or a case missed its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from . import common, telemetry_node
from .common import BENCH, Failed, Place, Results

SWITCH = Path("/proc/sys/kernel/printk_devkmsg")
CASES = ("quiet", "busy", "busy_nice")
LINES = 60
GAP_S = 0.05
LIMIT_S = 20.0
P99_MS = 100.0  # the promise: not more than this
NICE = -10  # of deploy/systemd/holdfast.service
LINE = "<3>NVRM: Xid (PCI:0000:%02x:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
AGENT = """
import asyncio, json, sys, time
from holdfast.agent.__main__ import _make_node
from holdfast.agent.config.load import load
from holdfast.agent.daemon.daemon import Daemon, Options
told = set()
class Told(Daemon):
    def _follow(self, decision, now_s):
        for verdict in decision.verdicts:
            if verdict.detector == "kernel" and verdict.subject not in told:
                told.add(verdict.subject)
                device = verdict.subject.rpartition("/")[2]
                print("verdict", device, time.monotonic_ns(), flush=True)
        super()._follow(decision, now_s)
state, run, node = sys.argv[1:]
settings = json.loads(node) | {"agent.state_dir": state, "agent.runtime_dir": run,
                               "collectors.kmsg_users": True}
settings = {key: (value, "bench") for key, value in settings.items()}
asyncio.run(Told(load(None, settings), Options(False, "", None, settings), _make_node).run())
"""


@contextmanager
def kernel_log() -> Iterator[Any]:
    """The kernel's log, open for writing without its limit of ten lines in five seconds."""
    with open("/dev/kmsg", "wb", buffering=0) as log:
        before = SWITCH.read_text().strip()
        try:
            SWITCH.write_text("on\n")
            yield log
        finally:
            SWITCH.write_text(before + "\n")


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Loops that end with this process, however it ends."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(loops):
            started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"],
                                            preexec_fn=common.die_with_parent))
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def measure(case: str, log: Any) -> dict[str, Any]:
    """One agent and its lines."""
    row: dict[str, Any] = {"case": f"kernel_latency_{case}", "ok": False, "why": ""}
    loops = 2 * (os.cpu_count() or 1) if case.startswith("busy") else 0
    with common.place("kernel") as where:
        node = telemetry_node.build(where.home / "node")
        where.environ.update(node.environ())
        command = [sys.executable, "-c", AGENT, str(where.home / "s"), str(where.home / "r"),
                   json.dumps(node.settings())]
        if case.endswith("nice"):
            command = ["nice", "-n", str(NICE), *command]
        try:
            with common.running(command, where) as agent:
                wait_ready(agent, where)
                with busy(loops):
                    row["latency_s"] = rounds_of(agent, where, log)
            row["ok"] = True
        except Failed as error:
            row["why"], row["log"] = str(error), common.log_tail(where)
    return row


def wait_ready(agent: subprocess.Popen[bytes], where: Place) -> None:
    """Until the page is served: by then the kernel's log is open as well."""
    deadline_s = time.monotonic() + LIMIT_S
    while not (where.home / "r" / "address").exists():
        if time.monotonic() > deadline_s or agent.poll() is not None:
            raise Failed("the agent did not start")
        time.sleep(0.02)
    time.sleep(1.0)


def rounds_of(agent: subprocess.Popen[bytes], where: Place, log: Any) -> list[float]:
    """Seconds from each line to its verdict.  Failed when one has none."""
    found = []
    with open(where.log) as said:
        for number in range(LINES):
            began_ns = time.monotonic_ns()
            log.write((LINE % number).encode() + b"\n")
            answered_ns = verdict_of(f"0000:{number:02x}:00", agent, said)
            found.append(round((answered_ns - began_ns) / 1e9, 6))
            time.sleep(GAP_S)
    return found


def verdict_of(device: str, agent: subprocess.Popen[bytes], said: TextIO) -> int:
    """When the agent had a verdict about it, among whatever else it says.  The line carries its
    time: looking late costs nothing."""
    deadline_s, line = time.monotonic() + LIMIT_S, ""
    while time.monotonic() < deadline_s and agent.poll() is None:
        line += said.readline()
        if not line.endswith("\n"):
            time.sleep(common.POLL_S)
            continue
        words, line = line.split(), ""
        if words[:2] == ["verdict", device] and len(words) == 3:
            return int(words[2])
    raise Failed(f"no verdict about {device} within {LIMIT_S:g} s, or the agent ended")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kernel_latency")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    given = parser.parse_args(arguments)
    rounds = 1 if given.quick else given.rounds
    taken: dict[str, list[float]] = {case: [] for case in given.cases}
    worst = 0
    common.become_subreaper()  # before anything is changed: a SIGTERM sets it back
    try:
        with kernel_log() as log:
            results = Results("kernel_latency", given.out)
            for _ in range(rounds):
                for case in given.cases:
                    row = measure(case, log)
                    results.add(row)
                    if not row["ok"]:
                        print(f"{row['case']}: FAIL {row['why']}", file=sys.stderr)
                        worst = 1
                    taken[case] += row.get("latency_s", [])
    except Failed as error:
        print(f"bench.kernel_latency: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"bench.kernel_latency: /dev/kmsg cannot be written here: {error}", file=sys.stderr)
        return 1
    for case, values in taken.items():
        if values:
            p50, p99 = (common.percentile(values, share) * 1000 for share in (0.5, 0.99))
            missed = "  MISSED" if p99 > P99_MS else ""
            worst = worst or int(bool(missed))
            print(f"{case}: {len(values)} lines, p50 {p50:.1f} ms, p99 {p99:.1f} ms (at most "
                  f"{P99_MS:g}){missed}, worst {max(values) * 1000:.1f} ms")
    return worst


if __name__ == "__main__":
    sys.exit(main())
