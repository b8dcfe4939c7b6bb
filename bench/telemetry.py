"""What watching a node costs: 8 GPUs, 8 InfiniBand ports and 192 cores, read and shown by an agent.

Owns the measurements, from outside the agent: processor time of a full slow set and of a steady
window, memory, how long /metrics takes, and Debian's node exporter beside it for the host part.
bench/telemetry_node.py is the node, bench/telemetry_slow.py the slow set.

    python -m bench.telemetry            # about six minutes
    python -m bench.telemetry --quick    # about a minute and a half
    python -m bench.telemetry --cases slow_set page
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.collectors import ALL

from . import common, memory, telemetry_node
from .common import BENCH, Failed, Place, Results
from .telemetry_node import Node

LIMIT_S = 60.0
SCRAPE_S = 15.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BYTES_MAX = 16 << 20
AGAIN = 20  # scrapes of one text, after the scrape for which it was rendered
ACCELERATORS = ("nvidia", "neuron", "amd", "compile_cache", "rdma")
EXPORTERS = ("prometheus-node-exporter", "node_exporter")
# The promises, by the name of a number in a row: at most this.
GOALS = {
    "slow_set_cpu_ms": 60.0, "agent_core_percent": 1.0, "agent_rss_mb": 64.0,
    "rendered_p99_ms": 5.0, "render_p99_ms": 60.0,
}


class Size(NamedTuple):
    """How much is measured."""

    slow_sets: int
    window_s: float  # whole scrape intervals
    renders: int
    beside_s: float


FULL, QUICK = Size(40, 120.0, 100, 60.0), Size(5, 15.0, 10, 15.0)


# ------------------------------------------------------------------------------------ processes


class Watched(NamedTuple):
    """A process that serves /metrics."""

    pid: int
    port: int


@contextmanager
def agent(where: Place, settings: dict[str, Any]) -> Iterator[Watched]:
    """The agent as the unit starts it, ready and with every collector read once."""
    config = telemetry_node.config_file(where.home / "agent.toml", settings)
    command = [sys.executable, "-m", "holdfast.agent", "--config", str(config),
               "--state", str(where.home / "s"), "--runtime", str(where.home / "r")]
    address = where.home / "r" / "address"
    with common.running(command, where) as process:
        wait_for(process, address.exists, where, "the agent's page")
        watched = Watched(process.pid, int(address.read_text().rpartition(":")[2]))
        wait_for(process, lambda: all_read(watched), where, "a first reading of every collector")
        yield watched


def wait_for(
    process: subprocess.Popen[bytes], condition: Callable[[], bool], where: Place, what: str
) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise Failed(f"{what} never came: {' | '.join(common.log_tail(where))}")
        time.sleep(0.1)


def all_read(watched: Watched) -> bool:
    """A collector that was read has taken some time."""
    times = [line.rpartition(" ")[2] for line in scrape(watched)[0].decode().splitlines()
             if line.startswith("holdfast_collector_duration_seconds{")]
    return bool(times) and all(float(one) > 0 for one in times)


def scrape(watched: Watched) -> tuple[bytes, float]:
    """(text, seconds) of one GET on a connection of its own, as Prometheus does after a pause."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", watched.port, timeout=LIMIT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read(BYTES_MAX)
        if response.status != 200:
            raise Failed(f"/metrics: status {response.status}")
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"/metrics does not answer: {error!r}") from error
    finally:
        connection.close()
    return text, time.monotonic() - began_s


def series_of(text: bytes) -> int:
    return sum(1 for line in text.splitlines() if line and not line.startswith(b"#"))


def absent_of(text: bytes) -> list[str]:
    """Collectors whose source is not on the node: what they would cost is not in the row."""
    return sorted(re.findall(r'^holdfast_collector_up\{collector="(\w+)"\} 0', text.decode(), re.M))


def steps_of(text: bytes) -> int | None:
    """Steps of the agent's state machine so far; None of whoever has none."""
    found = re.search(r"^holdfast_agent_steps_total (\d+)", text.decode(), re.M)
    return int(found[1]) if found else None


def name_of(pid: int) -> str:
    """A collector's child by its collector."""
    words = memory.words_of(pid)
    if "holdfast.collectors" in words[:-1]:
        return words[words.index("holdfast.collectors") + 1]
    return os.path.basename(words[0]) if words and words[0] else "other"


def cpu_of(pid: int) -> dict[str, float]:
    """Seconds so far: of the process, of each child that lives, and of those that ended."""
    fields = common.stat_fields(pid)
    found = {"itself": (int(fields[11]) + int(fields[12])) / TICKS_PER_S,
             "ended children": (int(fields[13]) + int(fields[14])) / TICKS_PER_S}
    for child in common.descendants(pid):
        try:
            fields = common.stat_fields(child)
        except OSError:
            continue  # it ended: its parent has its time
        name = name_of(child)
        found[name] = found.get(name, 0.0) + sum(map(int, fields[11:15])) / TICKS_PER_S
    return found


def memory_of(pid: int) -> dict[str, dict[str, float]]:
    """RSS and PSS in MB, by process."""
    found = {}
    for one in (pid, *common.descendants(pid)):
        try:
            kept = memory.rollup(one)
        except OSError:
            continue
        name = "itself" if one == pid else name_of(one)
        found[name] = {"rss_mb": round(kept["Rss"], 1), "pss_mb": round(kept["Pss"], 1),
                       "private_mb": round(kept["Private_Clean"] + kept["Private_Dirty"], 1)}
    return found


def window(watched: Watched, seconds: float) -> dict[str, Any]:
    """Processor time over `seconds` with a scrape every 15 s, the first at the begin.  The agent's
    steps and the machine's load say why a window was dear; they are asked for outside of it."""
    steps, load_start = steps_of(scrape(watched)[0]), os.getloadavg()[0]
    before, began_s = cpu_of(watched.pid), time.monotonic()
    scrapes = 0
    while (now_s := time.monotonic()) < began_s + seconds:
        if now_s >= began_s + scrapes * SCRAPE_S:
            text, _ = scrape(watched)
            scrapes += 1
        time.sleep(0.05)  # the window is a length of time
    took_s = time.monotonic() - began_s
    after = cpu_of(watched.pid)
    used = {name: value - before.get(name, 0.0) for name, value in after.items()}
    made = steps_of(scrape(watched)[0])
    return {
        "window_s": round(took_s, 2), "scrapes": scrapes, "series": series_of(text),
        "steps": None if steps is None or made is None else made - steps,
        "load_start": round(load_start, 2), "load_end": round(os.getloadavg()[0], 2),
        "absent": absent_of(text), "page_kb": round(len(text) / 1e3, 1),
        "core_percent": {name: round(100 * value / took_s, 3) for name, value in used.items()},
        "memory": memory_of(watched.pid),
    }


# ------------------------------------------------------------------------------------ cases


def slow_set(where: Place, node: Node, size: Size) -> dict[str, Any]:
    config = telemetry_node.config_file(where.home / "agent.toml", node.settings())
    command = [sys.executable, "-m", "bench.telemetry_slow", str(config), str(size.slow_sets)]
    with common.running(command, where) as process:
        ended = common.wait_exit(process, LIMIT_S + 5 * size.slow_sets)
    if ended != 0:
        raise Failed(f"ended with {ended}: {' | '.join(common.log_tail(where))}")
    found: dict[str, Any] = json.loads(common.log_text(where).splitlines()[-1])
    children = [sum(one) for one in zip(*found["children_s"].values(), strict=True)]
    return {
        **found, "slow_set_cpu_ms": milliseconds(found["agent_s"], 0.5),
        "slow_set_step_cpu_ms": milliseconds(found["step_s"], 0.5),
        "slow_set_children_cpu_ms": milliseconds(children, 0.5),
    }


def steady(where: Place, node: Node, size: Size) -> dict[str, Any]:
    with agent(where, node.settings()) as watched:
        row = window(watched, size.window_s)
    return {**row, "agent_core_percent": row["core_percent"]["itself"],
            "agent_rss_mb": row["memory"]["itself"]["rss_mb"]}


def page(where: Place, node: Node, size: Size) -> dict[str, Any]:
    """Each round waits for the next snapshot: its first scrape has the page rendered, the others
    get the same text, by which they are told apart."""
    render_s, rendered_s, last = [], [], b""
    with agent(where, node.settings()) as watched:
        for _ in range(size.renders):
            time.sleep(1.0)  # a tick of the agent
            for _ in range(1 + AGAIN):
                text, took_s = scrape(watched)
                (rendered_s if text == last else render_s).append(round(took_s, 6))
                last = text
    if not rendered_s:
        raise Failed("every scrape had the page rendered anew")
    return {
        "series": series_of(last), "page_kb": round(len(last) / 1e3, 1),
        "render_s": render_s, "rendered_s": rendered_s,
        **{f"{name}_p{share * 100:.0f}_ms": milliseconds(values, share)
           for name, values in (("render", render_s), ("rendered", rendered_s))
           for share in (0.5, 0.99)},
    }


def beside(where: Place, node: Node, size: Size) -> dict[str, Any]:
    """The host part alone, on this machine's own /proc and /sys: ours, then the node exporter."""
    off = [one.name for one in ALL if one.name in ACCELERATORS]
    settings = {key: value for key, value in node.settings().items()
                if not key.startswith("collectors.")}
    with agent(where, settings | {"collectors.disable": off}) as watched:
        row: dict[str, Any] = {"holdfast": window(watched, size.beside_s)}
    tool = next(filter(None, map(shutil.which, EXPORTERS)), None)
    if tool is None:
        why = "no node exporter here (Debian package prometheus-node-exporter): ours alone"
        return {**row, "node_exporter": None, "note": why}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with common.running([tool, f"--web.listen-address=127.0.0.1:{port}"], where) as process:
        wait_for(process, lambda: answers(port), where, "the node exporter's page")
        row["node_exporter"] = window(Watched(process.pid, port), size.beside_s)
    return row


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


CASES: dict[str, Callable[[Place, Node, Size], dict[str, Any]]] = {
    "slow_set": slow_set, "steady": steady, "page": page, "beside": beside,
}


def measure(name: str, size: Size) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"telemetry_{name}", "ok": False, "why": ""}
    with common.place("telemetry") as where:
        try:
            node = telemetry_node.build(where.home / "node")
            where.environ.update(node.environ())
            row |= CASES[name](where, node, size)
        except (OSError, Failed, subprocess.TimeoutExpired) as error:
            return {**row, "why": str(error)[:500]}
    goals = {goal: most for goal, most in GOALS.items() if goal in row}
    missed = [goal for goal, most in goals.items() if row[goal] > most]
    return {**row, "ok": True, "goals": goals, "missed": missed}


def milliseconds(values: list[float], share: float) -> float:
    return round(1000 * common.percentile(values, share), 2)


def show(row: dict[str, Any]) -> None:
    print(f"{row['case']}: {'ok' if row['ok'] else 'FAIL'} {row['why']}{row.get('note', '')}")
    for key, value in row.items():
        if isinstance(value, float) and key.endswith(("_ms", "_percent", "_mb")):
            goal = f"  (at most {row['goals'][key]:g})" if key in row["goals"] else ""
            missed = "  MISSED" if key in row["missed"] else ""
            print(f"    {key:26s} {value:9.2f}{goal}{missed}")
    for who, part in (("", row), ("holdfast ", row.get("holdfast")),
                      ("node_exporter ", row.get("node_exporter"))):
        if part and "core_percent" in part:
            kept = part["memory"].get("itself", {})
            cores = ", ".join(f"{name} {value:.2f} %" for name, value in
                              part["core_percent"].items() if value)
            print(f"    {who}{part['series']} series, rss {kept.get('rss_mb')} MB, "
                  f"pss {kept.get('pss_mb')} MB; of a core: {cores}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.telemetry", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short window of each")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("telemetry", options.out)
    worst = 0
    common.become_subreaper()  # before the node is made: a SIGTERM takes it away
    for name in options.cases:
        row = measure(name, QUICK if options.quick else FULL)
        results.add(row)
        show(row)
        worst = max(worst, int(not row["ok"] or bool(row["missed"])))
    print(f"rows: {results.path}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
