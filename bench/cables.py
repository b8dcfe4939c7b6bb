"""The links of nodes that are network namespaces: shaped inside, and watched as they are used.

Owns what bench/engines.py does to links beside the harness, and counts of their bytes over time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .common import ROOT, Failed

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import NETNS, Nodes

INSIDE_MBIT = 3200.0
LOOK_S = 0.02  # from one look at the nodes' cables to the next
STREAM = """
import socket, threading, time
listener, size = socket.create_server(("127.0.0.1", 0)), 64 << 20
def send():
    with socket.create_connection(listener.getsockname()) as one:
        one.sendall(bytes(size))
threading.Thread(target=send, daemon=True).start()
one, got, begin = listener.accept()[0], 0, time.monotonic()
while got < size:
    got += len(one.recv(1 << 20))
print(8 * size / 1e6 / (time.monotonic() - begin))
"""
LOOK = """
import json, sys, time
while True:
    found = {}
    for line in open("/proc/self/net/dev"):
        name, _, numbers = line.partition(":")
        if name.strip()[:1] == "p":
            found[name.strip()] = int(numbers.split()[0])
    print(json.dumps([time.monotonic(), found]), flush=True)
    time.sleep(float(sys.argv[1]))
"""


def inside(nodes: Nodes) -> float:
    """Shapes the links inside each node; what a plain stream over one then moves, in Mbit/s."""
    for node in nodes:
        done = node.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate",
                         f"{INSIDE_MBIT:g}mbit", "burst", "256k", "latency", "50ms"])
        if done.returncode:
            raise Failed(f"tc: {done.stderr}")
    return float(nodes[0].run([sys.executable, "-c", STREAM]).stdout)


@contextmanager
def sent_so_far(nodes: Nodes) -> Iterator[list[tuple[float, list[int]]]]:
    """Looks at what each node has sent so far; filled when the context ends: (when, by node)."""
    seen: list[tuple[float, list[int]]] = []
    looking = subprocess.Popen(
        ["nsenter", f"--net={NETNS / nodes.owner}-sw", sys.executable, "-c", LOOK, str(LOOK_S)],
        stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert looking.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(looking.stdout), daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        looking.kill()
        looking.wait(10)
        reader.join(10)
        for line in lines[:-1]:  # the last may be cut
            when, ports = json.loads(line)
            seen.append((when, [ports[f"p{node.number}"] for node in nodes]))


def apart_in_time(
    seen: Sequence[tuple[float, list[int]]], ends_s: Sequence[float], sent: Sequence[int]
) -> float:
    """Within the steps behind the first."""
    of_steps = [counts for when, counts in seen if ends_s[0] <= when <= ends_s[-1]]
    first = of_steps[0]
    return max(max(own) - min(own) for counts in of_steps
               for own in [[now - then for now, then in zip(counts, first)]]) / max(sent)
