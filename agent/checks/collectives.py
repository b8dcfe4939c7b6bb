"""Collective tests over a node's local ranks: exact results first, then nccl-tests' bandwidths.

Owns the operations, what each rank must hold afterwards, and the table.  Ranks are children of this
check's own child: one a device, by nccl; on the processor a few, by gloo.  Bandwidths are those of
nccl-tests (doc/PERFORMANCE.md), so that they compare with published ones: algbw is the operation's
size over its time, and busbw that times a factor which makes it the load of a link.  Imports torch
and the standard library.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import device as devices
from . import isolate, vendor

RANKS_ON_CPU = 2
RANK_S = 100.0
SIZES_CPU, SIZES_CUDA = (1 << 20,), (1 << 20, 1 << 24, 1 << 28)
TYPES_BYTES = 1 << 16  # every type is tried at this size, or at a smaller one that is asked for
WARM_UP, BLOCKS = 2, 5
BLOCK_S = 0.002  # a block of repeats takes at least this, so that one does not measure the clock
REPEATS_MAX = 64
NCCL_TEST = "all_reduce_perf"
# Each by what the operation does with it; sums stay below 256, which bfloat16 holds exactly.
TYPES = (torch.float32, torch.int32, torch.int64, torch.float64, torch.bfloat16, torch.float16)
WORDS = {"float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16",
         "int32": "int32", "int64": "int64"}
ROW = "%11s %12s %8s %6s %5s %9s %7s %7s %6s"
HEAD = (
    "#" + (ROW % ("size", "count", "type", "redop", "root", "time", "algbw", "busbw",
                  "#wrong"))[1:],
    "#" + (ROW % ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""))[1:].rstrip(),
)


class Operation(NamedTuple):
    """`run(sent, received, rank, n)` makes it once; `expected(rank, n, count, type)` is what
    `received` must hold; `sent` and `received` have `count` elements times these."""

    name: str
    run: Callable[[torch.Tensor, torch.Tensor, int, int], None]
    expected: Callable[[int, int, int, torch.dtype], torch.Tensor]
    factor: Callable[[int], float]
    sends: Callable[[int], int]
    receives: Callable[[int], int]
    redop: str = "none"
    root: int = -1


def pattern(rank: int, count: int, of: torch.dtype) -> torch.Tensor:
    """What a rank sends: small numbers, of which each rank and place has its own."""
    return ((torch.arange(count) * 3 + rank * 5) % 7).to(of)


def _sum(n: int, count: int, of: torch.dtype) -> torch.Tensor:
    total = torch.zeros(count, dtype=torch.int64)
    for rank in range(n):
        total += pattern(rank, count, torch.int64)
    return total.to(of)


def _all_reduce(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    dist.all_reduce(received)


def _all_gather(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    dist.all_gather_into_tensor(received, sent)


def _reduce_scatter(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    dist.reduce_scatter_tensor(received, sent)


def _all_to_all(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    dist.all_to_all_single(received, sent)


def _broadcast(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    dist.broadcast(received, 0)


def _sendrecv(sent: torch.Tensor, received: torch.Tensor, rank: int, n: int) -> None:
    """To the next rank and from the one before, as sendrecv_perf does it."""
    both = [dist.P2POp(dist.isend, sent, (rank + 1) % n),
            dist.P2POp(dist.irecv, received, (rank - 1) % n)]
    for one in dist.batch_isend_irecv(both):
        one.wait()


# The factors, and what counts as the size, are those of nccl-tests.
OPERATIONS = (
    Operation("all_reduce", _all_reduce, lambda r, n, count, of: _sum(n, count, of),
              lambda n: 2 * (n - 1) / n, lambda n: 1, lambda n: 1, "sum"),
    Operation("all_gather", _all_gather,
              lambda r, n, count, of: torch.cat([pattern(one, count // n, of) for one in range(n)]),
              lambda n: (n - 1) / n, lambda n: -n, lambda n: 1),
    Operation("reduce_scatter", _reduce_scatter,
              lambda r, n, count, of: _sum(n, count, of).chunk(n)[r].clone(),
              lambda n: (n - 1) / n, lambda n: 1, lambda n: -n, "sum"),
    Operation("all_to_all", _all_to_all,
              lambda r, n, count, of: torch.cat([pattern(one, count, of).chunk(n)[r]
                                                 for one in range(n)]),
              lambda n: (n - 1) / n, lambda n: 1, lambda n: 1),
    Operation("broadcast", _broadcast, lambda r, n, count, of: pattern(0, count, of),
              lambda n: 1.0, lambda n: 1, lambda n: 1, root=0),
    Operation("sendrecv", _sendrecv, lambda r, n, count, of: pattern((r - 1) % n, count, of),
              lambda n: 1.0, lambda n: 1, lambda n: 1),
)


def collectives(options: dict[str, Any]) -> dict[str, Any]:
    """Every operation over every size, and, small, over every type."""
    here = devices.kind()
    if here == "xla":
        return _by_nccom_test(options)
    n = int(options.get("ranks") or (torch.cuda.device_count() if here == "cuda" else 0))
    if here == "cuda" and n < 2:
        return {"said": "one accelerator: nothing to be exchanged within the node"}
    n = n or RANKS_ON_CPU
    sizes = sorted(options.get("sizes") or (SIZES_CUDA if here == "cuda" else SIZES_CPU))
    folder = tempfile.mkdtemp(prefix="holdfast-check-")
    begun, rows, problems = time.monotonic(), {}, []

    def rank_of(rank: int) -> Callable[[], Any]:
        return lambda: _rank(rank, n, here, sizes, folder)

    calls = [isolate.Call("rank %d" % rank, isolate.answering(rank_of(rank)), RANK_S)
             for rank in range(n)]
    try:
        for event in isolate.run_all(calls, n):
            if event.ended and event.problem:
                problems.append("%s: %s" % (event.name, event.problem))
                break  # the others would wait for it until their deadline
            if not event.ended:
                rows[event.name] = event.value
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if problems or len(rows) < n:
        return {"unknown": problems or ["not every rank answered"]}
    found = _answer(list(rows.values()), n, here, time.monotonic() - begun)
    if here == "cuda" and vendor.program(NCCL_TEST):
        return _with_nccl_tests(found, sizes, n)
    return found


def _by_nccom_test(options: dict[str, Any]) -> dict[str, Any]:
    """Between Neuron cores AWS' own test, which needs no graph of ours."""
    if devices.has_neuron() and vendor.program("nccom-test"):
        return vendor.nccom_test(options, ("allr",), options.get("sizes") or ())
    return {"unknown": ["nccom-test is not installed (aws-neuronx-tools), and XLA devices have no "
                        "other collective test here"]}


def _with_nccl_tests(ours: dict[str, Any], sizes: Sequence[int], ranks: int) -> dict[str, Any]:
    """The vendor's all-reduce of the same sizes over as many devices in place of ours, where it has
    an answer: its numbers are those that people compare."""
    theirs = vendor.nccl_tests({}, (NCCL_TEST,), sizes, ranks)
    if not theirs["measures"] and not theirs["critical"]:
        return ours
    named = {(one["name"], one["subject"]) for one in theirs["measures"]}
    kept = [one for one in ours["measures"] if (one["name"], one["subject"]) not in named]
    return {**ours, "measures": kept + theirs["measures"], "table": ours["table"] + theirs["table"],
            "critical": ours["critical"] + theirs["critical"],
            "said": "%s; all_reduce by %s" % (ours["said"], NCCL_TEST)}


def _rank(rank: int, n: int, here: str, sizes: list[int], folder: str) -> list[dict[str, Any]]:
    """One rank's rows."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n))
    device = "cuda:%d" % rank if here == "cuda" else "cpu"
    if here == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if here == "cuda" else "gloo", rank=rank, world_size=n,
                            store=dist.FileStore(os.path.join(folder, "store"), n),
                            timeout=timedelta(seconds=RANK_S))
    found = []
    for operation in OPERATIONS:
        print("%s of rank %d" % (operation.name, rank), flush=True)
        for of in TYPES:
            found.append(_row(operation, of, min(sizes[0], TYPES_BYTES), rank, n, device, False))
        for size in sizes:
            found.append(_row(operation, TYPES[0], size, rank, n, device, True))
    dist.barrier()
    dist.destroy_process_group()
    return [one for one in found if one]


def _row(operation: Operation, of: torch.dtype, size: int, rank: int, n: int, device: str,
         timed: bool) -> dict[str, Any]:
    """One operation at one size and type; {} where this backend has none of it."""
    width = torch.empty((), dtype=of).element_size()
    count = max(n, size // width // n * n)
    sends = pattern(rank, count // n if operation.sends(n) < 0 else count, of).to(device)
    received = sends.clone() if operation.name in ("all_reduce", "broadcast") else torch.zeros(
        count // n if operation.receives(n) < 0 else count, dtype=of, device=device)
    try:
        operation.run(sends, received, rank, n)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if any(word in str(error).lower() for word in ("support", "invalid scalar", "implement")):
            return {}
        raise
    wrong = int((received.cpu() != operation.expected(rank, n, count, of)).sum())
    row = {"op": operation.name, "bytes": count * width, "count": count,
           "type": WORDS[str(of).split(".")[-1]], "redop": operation.redop,
           "root": operation.root, "wrong": wrong, "blocks": []}
    if timed:
        row["blocks"] = _blocks(operation, sends, received, rank, n, device)
    return row


def _blocks(operation: Operation, sent: torch.Tensor, received: torch.Tensor, rank: int, n: int,
            device: str) -> list[float]:
    """Seconds of one operation, of each block of repeats."""

    def block(repeats: int) -> float:
        dist.barrier()
        devices._wait(device)
        begin_s = time.perf_counter()
        for _ in range(repeats):
            operation.run(sent, received, rank, n)
        devices._wait(device)
        return (time.perf_counter() - begin_s) / repeats

    once_s = min(block(1) for _ in range(WARM_UP))
    wanted = torch.tensor([min(REPEATS_MAX, 1 + int(BLOCK_S / max(once_s, 1e-7)))], device=device)
    dist.all_reduce(wanted, dist.ReduceOp.MAX)  # every rank must make as many
    return [block(int(wanted)) for _ in range(BLOCKS)]


def _answer(ranks: list[list[dict[str, Any]]], n: int, here: str, took_s: float) -> dict[str, Any]:
    """The ranks' rows as one: the mean of their times, as nccl-tests has it, and every error."""
    table = ["# %d ranks on %s, %s over %s, torch %s" % (
        n, socket.gethostname(), "nccl" if here == "cuda" else "gloo", here, torch.__version__)]
    measures, wrong, name = [], [], ""
    factors = {one.name: one.factor(n) for one in OPERATIONS}
    for rows in zip(*ranks):
        row = rows[0]
        errors = sum(one["wrong"] for one in rows)
        if errors:
            bad = [str(rank) for rank, one in enumerate(rows) if one["wrong"]]
            wrong.append("%s of %s: %d elements are wrong on rank %s" % (
                row["op"], row["type"], errors, ", ".join(bad)))
        if row["op"] != name:
            name = row["op"]
            table += ["#", "# %s" % name, *HEAD]
        took, busbw = None, None
        if row["blocks"]:
            blocks = [statistics.fmean(block) for block in zip(*(one["blocks"] for one in rows))]
            rates = [row["bytes"] / block * factors[name] for block in blocks]
            took, busbw = statistics.median(blocks), statistics.median(rates)
            measures.append({"name": name, "value": busbw, "unit": "B/s", "samples": rates,
                             "subject": "%d bytes" % row["bytes"]})
        table.append(_line(row, took, busbw, errors))
    total = sum(one["wrong"] for rows in ranks for one in rows)
    table.append("# Out of bounds values : %d %s" % (total, "FAILED" if total else "OK"))
    largest = max((one["value"] for one in measures), default=0.0)
    return {"said": "%d operations over %d ranks, every element as it must be, busbw up to "
                    "%.3g GB/s, in %.1f s" % (len(factors), n, largest / 1e9, took_s),
            "critical": wrong, "measures": measures, "table": table}


def _line(row: dict[str, Any], took_s: float | None, busbw: float | None, errors: int) -> str:
    rates = ("-", "-", "-")
    if took_s is not None and busbw is not None:
        rates = ("%.1f" % (took_s * 1e6), "%.2f" % (row["bytes"] / took_s / 1e9),
                 "%.2f" % (busbw / 1e9))
    return ROW % (row["bytes"], row["count"], row["type"], row["redop"], row["root"], *rates,
                  errors)
