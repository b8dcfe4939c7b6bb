"""What the harness's tests measure from within a node; prints one number.

    probe.py send|connect ADDRESS, packets ADDRESS COUNT, sink, echo, count, cpu-share
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

PORT, BYTES, WAIT_S, QUIET_S = 4711, 6 << 20, 10.0, 1.0


def sink() -> int:
    """Takes one stream to its end, and says so."""
    with socket.create_server(("", PORT)) as server:
        server.settimeout(WAIT_S)
        print("ready", flush=True)
        stream, _ = server.accept()
        with stream:
            total = 0
            while part := stream.recv(1 << 16):
                total += len(part)
            stream.sendall(b"!")
    return total


def send(address: str) -> float:
    """Mbit/s."""
    with socket.create_connection((address, PORT), timeout=WAIT_S) as stream:
        begin_s = time.perf_counter()
        stream.sendall(bytes(BYTES))
        stream.shutdown(socket.SHUT_WR)
        stream.recv(1)
        return BYTES * 8e-6 / (time.perf_counter() - begin_s)


def connect(address: str) -> float:
    """Seconds until a connection stands, which is one way there and back."""
    begin_s = time.perf_counter()
    with socket.create_connection((address, PORT), timeout=WAIT_S):
        return time.perf_counter() - begin_s


def echo() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", PORT))
        print("ready", flush=True)
        while True:
            packet, origin = server.recvfrom(64)
            print("came", flush=True)
            with contextlib.suppress(OSError):
                server.sendto(packet, origin)


def packets(address: str, count: int) -> float:
    """The share that comes back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.settimeout(0.002)
        seen: set[bytes] = set()
        last_s, number = time.monotonic(), 0
        while len(seen) < count and (number < count or time.monotonic() < last_s + QUIET_S):
            if number < count:
                asked.sendto(b"%d" % number, (address, PORT))
                number, last_s = number + 1, time.monotonic()
            with contextlib.suppress(OSError):  # no answer yet
                seen.add(asked.recv(64))
                last_s = time.monotonic()
    return len(seen) / count


def count() -> int:
    while True:
        print(time.monotonic(), flush=True)
        time.sleep(0.01)


def cpu_share() -> float:
    """Of one processor that this process gets while it wants all of it: the best of a few windows,
    since others may want it too."""
    best = 0.0
    for _ in range(5):
        begin_s, used_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - begin_s < 0.1:
            pass
        best = max(best, (time.process_time() - used_s) / (time.perf_counter() - begin_s))
    return best


if __name__ == "__main__":
    asked = {"sink": sink, "send": send, "echo": echo, "packets": packets, "count": count,
             "cpu-share": cpu_share, "connect": connect}[sys.argv[1]]
    print(json.dumps(asked(*(int(one) if one.isdecimal() else one for one in sys.argv[2:]))))
