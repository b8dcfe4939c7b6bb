"""The tests of one node among its peers, beside torch: how it computes and exchanges.

Owns what one rank does in a test, and the loop that serves one test after another: torch is
imported once for all of them, and each runs in a child that may hang (isolate.py).  Which tests
there are, and what their outcomes mean, is said elsewhere (agent/core/checks).  Imports torch and
the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import collectives, isolate
from . import device as devices

EXACT_BYTES = 64 << 10  # every operation is compared at this size
PAIR_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
GROUP_BYTES = {"cpu": 256 << 10, "cuda": 64 << 20}
PAIRED = ("all_reduce", "sendrecv")  # the rest of them is made by all together
TIMED = ("all_reduce", "all_gather", "reduce_scatter")  # of a group; of a pair only the first
KILL_S = 2.0  # a test says by itself that it is late; what does not is ended
MEMORY_BYTES = 16 << 30
SIOCGIFADDR = 0x8915
PR_SET_PDEATHSIG, SIGKILL = 1, 9


def serve(descriptor: int) -> None:
    """Commands are lines of JSON on the standard input, and end with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    for line in sys.stdin:
        command = json.loads(line)
        function = {"compute": compute, "exchange": exchange}[command["do"]]
        call = isolate.Call(command["do"], _telling(function, command),
                            command["deadline_s"] + KILL_S,
                            MEMORY_BYTES if kind() == "cpu" else 0)
        answer: dict[str, Any] = {}
        for event in isolate.run_all([call], 1):
            if event.ended:
                problem = event.problem or ("" if answer else "it gave no answer")
                isolate.write_line(descriptor, {"id": command["id"], "problem": problem,
                                                "answer": answer})
            elif "port" in event.value:
                isolate.write_line(descriptor, {"id": command["id"], **event.value})
            else:
                answer = event.value


def kind() -> str:
    """Hosts of XLA devices test each other's processors and network, by gloo."""
    return "cuda" if devices.kind() == "cuda" else "cpu"


def _telling(function: Callable[..., dict[str, Any]],
             command: dict[str, Any]) -> Callable[[int], None]:
    def call(descriptor: int) -> None:
        isolate.write_line(descriptor, function(command, descriptor))

    return call


def compute(command: dict[str, Any], _: int) -> dict[str, Any]:
    """Known answers on every device, and the rate of products on the slowest."""
    if command["threads"]:
        torch.set_num_threads(command["threads"])
    seed = os.environ.get(devices.FLIP_VARIABLE, "")
    flip = devices.flipped(int(seed)) if seed.isdecimal() else None
    found, critical, unknown = devices.on_each(lambda device: (
        devices.known_answers(device, flip), _sustained(device, command["seconds"])))
    wrong = [one for of, _ in found for one in of] + critical
    if unknown and not wrong:
        raise RuntimeError("; ".join(unknown))  # it came to no end: nothing is said of the node
    return {"wrong": wrong, "rate": min((rate for _, rate in found), default=0.0)}


def _sustained(device: str, seconds: float) -> float:
    """Operations a second over the whole time: a quota lets single products pass at full speed."""
    size = 256 if device == "cpu" else 8192
    a = torch.ones(size, size, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    torch.mm(a, b, out=out)
    devices._wait(device)
    begin_s, count = time.perf_counter(), 0
    while time.perf_counter() - begin_s < seconds:
        torch.mm(a, b, out=out)
        devices._wait(device)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - begin_s)


def exchange(command: dict[str, Any], descriptor: int) -> dict[str, Any]:
    """One node's part in a test: a rank here, or one an accelerator, each in a child of its own."""
    each = command["ranks"]
    if each == 1:
        return _rank(command, 0, descriptor, "")
    folder = tempfile.mkdtemp(prefix="holdfast-check-")
    answers: dict[str, dict[str, Any]] = {}
    calls = [isolate.Call("rank %d" % local, functools.partial(_told, command, local, folder),
                          command["deadline_s"] + KILL_S / 2) for local in range(each)]
    try:
        for event in isolate.run_all(calls, each):
            if event.ended and event.problem:
                raise RuntimeError("%s here: %s" % (event.name, event.problem))
            if not event.ended and "port" in event.value:
                isolate.write_line(descriptor, event.value)
            elif not event.ended:
                answers[event.name] = event.value
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(answers) < each:
        raise RuntimeError("not every rank here answered")
    wrong = {name for one in answers.values() for name in one["wrong"]}
    rate = min(one["rate"] for one in answers.values())
    first = answers["rank 0"]
    return {**first, "wrong": sorted(wrong), "rate": rate if command["pair"] else first["rate"]}


def _told(command: dict[str, Any], local: int, folder: str, descriptor: int) -> None:
    isolate.write_line(descriptor, _rank(command, local, descriptor, folder))


def _rank(command: dict[str, Any], local: int, descriptor: int, folder: str) -> dict[str, Any]:
    """One rank of a group: every operation exact, then some of them timed.

    The first rank serves the group's store at its node's own address, and tells its port before it
    joins: to the other nodes by the descriptor, to the other ranks here by a file of the folder.
    """
    each, here = command["ranks"], kind()
    rank, n = command["rank"] * each + local, command["n"] * each
    interface = interface_of(command["address"])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    torch.set_num_threads(1)
    place = local if each > 1 else command["rail"]
    if here == "cuda":
        torch.cuda.set_device(place)
    limit = timedelta(seconds=command["deadline_s"])
    store = _store(command, rank, n, limit, descriptor, folder)
    print("joining", flush=True)
    dist.init_process_group("nccl" if here == "cuda" else "gloo", rank=rank, world_size=n,
                            store=store, timeout=limit)
    device = "cuda:%d" % place if here == "cuda" else "cpu"
    begin_s = time.monotonic()
    rows = _rows(command, rank, n, device, here)
    gathered: list[Any] | None = [None] * n if rank == 0 else None
    if command["pair"]:
        dist.barrier()
        timed = next(one for one in rows if one["blocks"])
        return {"wrong": [one["op"] for one in rows if one["wrong"]],
                "rate": timed["bytes"] / min(timed["blocks"]), "bytes": timed["bytes"]}
    dist.gather_object(rows, gathered)
    dist.barrier()
    found = collectives._answer(gathered, n, here, time.monotonic() - begin_s) if gathered else {}
    rates = {one["name"]: one["value"] for one in found.get("measures", ())}
    size = max((one["bytes"] for one in rows if one["blocks"]), default=0)
    return {"wrong": [one["op"] for one in rows if one["wrong"]], "bytes": size,
            "rate": rates.get(TIMED[0], 0.0), "rates": rates, "table": found.get("table", [])}


def _rows(command: dict[str, Any], rank: int, n: int, device: str,
          here: str) -> list[dict[str, Any]]:
    """A pair is timed by an all-reduce: each side sends as much as it gets, in steps, so that the
    slower direction decides."""
    size = command["bytes"] or (PAIR_BYTES if command["pair"] else GROUP_BYTES)[here]
    first = collectives.TYPES[0]
    found = []
    for operation in collectives.OPERATIONS:
        if command["pair"] and operation.name not in PAIRED:
            continue
        print("%s of rank %d" % (operation.name, rank), flush=True)
        timed = operation.name in (TIMED[:1] if command["pair"] else TIMED)
        if timed:
            found.append(collectives._row(operation, first, size, rank, n, device, timed=True))
        else:
            found.append(collectives._row(operation, first, EXACT_BYTES, rank, n, device,
                                          timed=False))
    return [one for one in found if one]


def _store(command: dict[str, Any], rank: int, n: int, limit: timedelta, descriptor: int,
           folder: str) -> dist.Store:
    if command["store"] is not None:
        host, port = command["store"]
        return dist.TCPStore(host, port, n, False, timeout=limit)
    host, told = command["address"], os.path.join(folder, "port")
    if rank:
        return dist.TCPStore(host, _read_port(told, limit), n, False, timeout=limit)
    # By itself the store would listen on every address.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen(n * 4)
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, n, True, timeout=limit, wait_for_workers=False,
                          master_listen_fd=listener.detach())
    if folder:
        with open(told + ".new", "w") as file:
            file.write(str(port))
        os.rename(told + ".new", told)
    isolate.write_line(descriptor, {"port": port})
    return store


def _read_port(told: str, limit: timedelta) -> int:
    """Once the first rank here has written it."""
    limit_s = time.monotonic() + limit.total_seconds()
    while time.monotonic() < limit_s:
        try:
            with open(told) as file:
                return int(file.read())
        except FileNotFoundError:
            time.sleep(0.01)
    raise TimeoutError("the first rank here serves no store")


def interface_of(address: str) -> str:
    """The network interface that has this address; the backends choose by its name."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an address of this kind
                found = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise ValueError("no interface here has the address %s" % address)
