"""One full slow set of the collectors, again and again: what each costs, agent and children apart.

    python -m bench.telemetry_slow CONFIG ROUNDS      (a child of bench.telemetry)

Owns the rounds.  Each reads every slow collector that is due, as the agent's runner does; then the
core makes one step over the samples.  Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.agent.__main__ import _make_node
from holdfast.agent.config.load import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Now, Observed
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors.contract import Probed

WARM = 2  # the first readings start children and load libraries


def task_cpu_s(pid: int) -> float:
    """Processor time of a process's living threads, to the nanosecond; 0 when it is gone."""
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
    except OSError:
        return total / 1e9
    return total / 1e9


async def rounds_of(path: Path, rounds: int) -> dict[str, Any]:
    loaded = load(path)
    said: list[str] = []
    runner = Runner(loaded.config, lambda part, error: said.append(f"{part}: {error}"))
    node = _make_node("bench", loaded.config.core_settings(), load_runbooks(Path("/none")), b"")
    slow = [entry for entry in runner._entries if not entry.collector.pace.fast]
    gc.collect()
    gc.freeze()  # as the agent does when it has started
    found: dict[str, Any] = {"agent_s": [], "step_s": [], "children_s": {}, "took_s": []}
    try:
        for number in range(WARM + rounds):
            due = [entry for entry in slow if number % entry.collector.pace.every == 0]
            before = {name: task_cpu_s(pid) for name, pid in runner.children().items()}
            began_s, wall_s = time.process_time(), time.monotonic()
            await asyncio.gather(
                runner._read_all([one for one in due if not isinstance(one.collector, Probed)]),
                *(runner._ask(one, one.collector) for one in due
                  if isinstance(one.collector, Probed)),
            )
            runner._gather()
            read_s, took_s = time.process_time() - began_s, time.monotonic() - wall_s
            now = Now(time.clock_gettime(time.CLOCK_BOOTTIME), time.time(), "bench")
            node.step(now, Observed(samples=runner.samples()))
            stepped_s = time.process_time() - began_s - read_s
            if number < WARM:
                continue
            found["agent_s"].append(round(read_s, 6))
            found["step_s"].append(round(stepped_s, 6))
            found["took_s"].append(round(took_s, 6))
            for name, pid in runner.children().items():
                found["children_s"].setdefault(name, []).append(
                    round(task_cpu_s(pid) - before.get(name, 0.0), 6))
    finally:
        for entry in slow:
            if entry.helper is not None:
                await entry.helper.close()
        runner.close()
    found["collectors"] = {entry.collector.name: len(entry.last)
                           for entry in slow if entry.health.up}
    found["absent"] = sorted(entry.collector.name for entry in slow if not entry.health.up)
    found["samples"] = len(runner.samples())
    return {**found, "troubles": said[:10]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(rounds_of(Path(sys.argv[1]), int(sys.argv[2])))), flush=True)
    os._exit(0)  # a thread that hangs in a collector must not keep the bench
