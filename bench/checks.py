"""`holdfast check` from outside: how long a round takes, and bandwidths beside a plain script's.

Owns five cases.  `gate`: a run's start with and without the gate, in turns.  `round`: the whole
command, nothing cached, with what each check took, and a bare import of torch right behind it.
`failing`: a round in which `tensor` finds a wrong bit and one in which it does not, in turns.
`health`: the answer from the cache that Slurm's HealthCheckProgram gets.  `busbw`: six operations
over two gloo ranks, by the command and by checks_script.py in turns, one pair a row; of either the
median and the best of its five blocks, since on a busy machine the others measure who else ran.

    python -m bench.checks [--runs 10] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import common
from .common import BENCH, Place, Results

LIMIT_S = 120.0
SIZE, RANKS, BLOCK_S = 16 << 20, 2, 0.002
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
COMMAND = [sys.executable, "-m", "holdfast.agent.cli", "check"]
HEALTH_MOST_S = 1.0
FLIP = "HOLDFAST_CHECK_FLIP_BIT"  # the bit of a result that `tensor` is to find wrong
# One thread is what a rank is measured with; without byte code every start compiles us anew.
NOT_AN_OPERATORS = ("OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")


def run(command: Sequence[str], where: Place) -> tuple[float, subprocess.CompletedProcess[str]]:
    begin_s = time.monotonic()
    environ = {key: value for key, value in where.environ.items() if key not in NOT_AN_OPERATORS}
    done = subprocess.run(list(command), cwd=where.home, env=environ, capture_output=True,
                          text=True, timeout=LIMIT_S, check=False)
    return time.monotonic() - begin_s, done


def _children_cpu_s() -> float:
    """Which a busy machine changes less than the time that passes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def whole_round(where: Place) -> dict[str, Any]:
    begin_s = _children_cpu_s()
    took_s, done = run([*COMMAND, "--json", "--python", sys.executable], where)
    cpu_s = _children_cpu_s() - begin_s
    if done.returncode not in (0, 1):
        return {"ok": False, "why": (done.stdout + done.stderr)[-400:]}
    checks = json.loads(done.stdout)["checks"]
    begin_s = _children_cpu_s()
    import_s, _ = run([sys.executable, "-c", "import torch"], where)
    return {"ok": True, "took_s": took_s, "import_torch_s": import_s, "cpu_s": cpu_s,
            "import_torch_cpu_s": _children_cpu_s() - begin_s,
            "checks": {one["check"]: round(one["took_s"], 4) for one in checks}}


def failing(where: Place) -> dict[str, Any]:
    """Both with nothing cached and no history."""
    row: dict[str, Any] = {"ok": True, "why": ""}
    turns = [("passing", "ok", {}), ("failing", "critical", {FLIP: "7"})]
    random.shuffle(turns)
    for name, expected, more in turns:
        state = {"HOLDFAST_STATE_DIR": str(where.home / name)}
        begin_s = _children_cpu_s()
        took_s, done = run([*COMMAND, "--json", "--python", sys.executable],
                           where._replace(environ={**where.environ, **state, **more}))
        checks = json.loads(done.stdout)["checks"] if done.returncode in (0, 1, 2) else []
        (tensor,) = [one for one in checks if one["check"] == "tensor"] or [
            {"status": "not made", "took_s": 0.0}]
        row |= {f"{name}_s": took_s, f"{name}_cpu_s": _children_cpu_s() - begin_s,
                f"{name}_tensor_s": tensor["took_s"]}
        if tensor["status"] != expected:
            row |= {"ok": False, "why": f"{name}: {tensor['status']} {done.stderr[-300:]}"}
    return row


def health(where: Place) -> dict[str, Any]:
    """Of a cache that is young enough, so that nothing is made anew beside it."""
    run([*COMMAND, "clock", "disk"], where)
    took_s, done = run([*COMMAND, "--for", "slurm-health"], where)
    return {"ok": done.returncode == 0 and took_s < HEALTH_MOST_S, "took_s": took_s,
            "why": "" if done.returncode == 0 else done.stderr[-400:]}


def busbw(where: Place) -> dict[str, Any]:
    """Bytes a second of either, in turns."""
    _, ours = run([*COMMAND, "collectives", "--json", "--sizes", str(SIZE), "--ranks", str(RANKS),
                   "--python", sys.executable], where)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    _, plain = run([sys.executable, str(BENCH / "checks_script.py"), str(RANKS), str(SIZE),
                    str(BLOCK_S), str(port)], where)
    if ours.returncode not in (0, 1) or plain.returncode:
        return {"ok": False, "why": (ours.stdout + ours.stderr + plain.stderr)[-400:]}
    (check,) = json.loads(ours.stdout)["checks"]
    by_check = {one["name"]: (one["value"], max(one["samples"])) for one in check["measures"]}
    half, whole = (RANKS - 1) / RANKS, 1.0
    factors = dict(zip(OPERATIONS, (2 * half, half, half, half, whole, whole)))
    by_script = {name: tuple(SIZE / took_s * factors[name] for took_s in took)
                 for line in plain.stdout.splitlines() for name, took in json.loads(line).items()}
    return {"ok": True, "why": "", "bytes": SIZE,
            "check_bytes_per_s": {name: [round(one) for one in by_check[name]]
                                  for name in OPERATIONS},
            "script_bytes_per_s": {name: [round(one) for one in by_script[name]]
                                   for name in OPERATIONS}}


def gate(where: Place) -> dict[str, Any]:
    """A run of nothing, its start gated or not, in turns; the node's verdicts are fresh for both,
    which the first run sees to.  Without torch in it: nothing hides what the gate adds."""
    took_s: dict[str, float] = {}
    pair = [("off", "[]"), ("on", '["passive"]')]
    random.shuffle(pair)
    for turn, (name, words) in enumerate((("warm", '["passive"]'), *pair)):
        config = where.home / f"{name}.toml"
        config.write_text(f'[checks]\ngate = {words}\npaths = ["{where.home}"]\n')
        where.environ["HOLDFAST_CONFIG"] = str(config)
        took_s[name], done = run([*COMMAND[:-1], "run", "--run", f"g{turn}", "--no-python",
                                  "/bin/true"], where)
        if done.returncode:
            return {"ok": False, "why": (done.stdout + done.stderr)[-400:]}
    return {"ok": True, "off_s": took_s["off"], "on_s": took_s["on"],
            "added_s": round(took_s["on"] - took_s["off"], 4)}


CASES = {"gate": gate, "round": whole_round, "failing": failing, "health": health, "busbw": busbw}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.checks")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("checks", options.out)
    failed = 0
    for _ in range(1 if options.quick else options.runs):
        for name in options.cases:
            with common.place(name) as where:
                load = os.getloadavg()[0]
                row = {"case": f"checks_{name}", "why": "", "load": load, **CASES[name](where)}
            results.add(row)
            failed += not row["ok"]
            print(name, {key: value for key, value in row.items() if key not in ("case",)},
                  flush=True)
    print(f"rows: {results.path}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
