"""10,000 deliveries of Alertmanager's webhook in a minute: how many are lost, and what they take.

A node's agent with a token, over TCP, as Alertmanager speaks to it; eight senders at an even pace.
Alerts of 200 fingerprints fire and are resolved again and again.  Lost is what was not answered
with 200, and any alert of the last round that the agent does not know as it ended.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from . import common

TOKEN = "operator-token-of-this-bench"
SENDERS, FINGERPRINTS = 8, 200  # an agent keeps 256 alerts that wait; more are sent again
CONFIG = """[agent]
state_dir = "{home}/state"
runtime_dir = "{home}/run"
listen = "127.0.0.1:0"
[api]
tokens_file = "{home}/tokens"
"""


def delivery(number: int) -> bytes:
    state = "firing" if number // FINGERPRINTS % 2 == 0 else "resolved"
    return json.dumps({
        "version": "4", "status": state, "receiver": "holdfast", "groupKey": "{}",
        "alerts": [{
            "status": state, "fingerprint": f"{number % FINGERPRINTS:016x}",
            "labels": {"alertname": "Bench", "instance": f"node-{number % 50}"},
            "annotations": {"summary": "a line of some length, as people write them"},
            "startsAt": f"2026-11-22T{10 + number // FINGERPRINTS // 2 % 12:02}:00:00Z",
            "endsAt": "0001-01-01T00:00:00Z"}]}).encode()


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Sender(threading.Thread):
    """Sends every eighth delivery at its time, and notes how long each answer took."""

    def __init__(self, place: tuple[str, int], first: int, count: int, begin_s: float,
                 every_s: float) -> None:
        super().__init__()
        self.place, self.begin_s, self.every_s = place, begin_s, every_s
        self.numbers = range(first, count, SENDERS)
        self.lost, self.took_s = 0, []  # type: int, list[float]

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self.place, timeout=30)
        for number in self.numbers:
            time.sleep(max(0.0, self.begin_s + number * self.every_s - time.monotonic()))
            sent_s = time.monotonic()
            try:
                connection.request("POST", "/api/v1/alerts", delivery(number), {
                    "Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                self.lost += answer.status != 200
            except OSError:
                self.lost += 1
                connection.close()
            self.took_s.append(time.monotonic() - sent_s)


def measured(count: int, seconds: float, home: Path) -> dict[str, object]:
    (home / "tokens").write_text(f'"{TOKEN}" = "operator"\n')
    (home / "tokens").chmod(0o600)
    (home / "agent.toml").write_text(CONFIG.format(home=home))
    with open(home / "log", "wb") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "holdfast.agent", "--config", str(home / "agent.toml")],
            stdout=log, stderr=log)
    try:
        address = home / "run/address"
        while not address.exists():
            if agent.poll() is not None:
                raise common.Failed((home / "log").read_text())
            time.sleep(0.05)
        host, _, port = address.read_text().strip().removeprefix("http://").rpartition(":")
        time.sleep(3.0)
        before, sizes = resident_bytes(agent.pid), []
        ticks = os.sysconf("SC_CLK_TCK")

        def cpu_s() -> float:
            fields = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks

        spent_s, begin_s = cpu_s(), time.monotonic() + 0.2
        senders = [Sender((host, int(port)), one, count, begin_s, seconds / count)
                   for one in range(SENDERS)]
        for one in senders:
            one.start()
        while any(one.is_alive() for one in senders):
            sizes.append(resident_bytes(agent.pid))
            time.sleep(0.5)
        took_s = sorted(took for one in senders for took in one.took_s)
        half = len(sizes) // 2
        return {
            "bench": "webhooks", "deliveries": count,
            "seconds": round(time.monotonic() - begin_s, 1),
            "lost": sum(one.lost for one in senders), "answer_p50_ms": round(
                1e3 * took_s[len(took_s) // 2], 2),
            "answer_p99_ms": round(1e3 * took_s[int(len(took_s) * 0.99)], 2),
            "agent_cpu_s": round(cpu_s() - spent_s, 2),
            "rss_before_mb": round(before / 2**20, 1),
            "rss_half_mb": round(max(sizes[:half]) / 2**20, 1),
            "rss_end_mb": round(max(sizes[half:]) / 2**20, 1)}
    finally:
        agent.terminate()
        agent.wait(10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as home:
        row = measured(options.count, options.seconds, Path(home))
    print(json.dumps(row))
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return 1 if row["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
