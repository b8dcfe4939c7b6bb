"""Logs of dead runs with the root that a person would name: what bench/classify.py counts.

Owns the cases.  Each is {file: text} with the expected signature ("" = none: only consequences),
the culprit and, where one is to be named, the rank.  The wording of single lines comes from the
catalogue's samples; what stands around them (tracebacks, prefixes, the other ranks) is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

CARRIED = {"nccl_watchdog_cuda": "cuda_ecc"}
FRAMES = (
    '  File "train.py", line 88, in <module>\n    main()\n'
    '  File "train.py", line 61, in main\n    raise RuntimeError("CUDA error: out of memory")\n'
)
WATCHDOG = (
    "[rank{0}]:[E1120 10:10:0{0}.426415540 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=4096, "
    "NumelOut=4096, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.\n"
)
GLOO = (
    "Traceback (most recent call last):\n" + FRAMES + "RuntimeError: [../third_party/gloo/gloo/"
    "transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895\n"
)
BACKEND = (
    "Traceback (most recent call last):\n" + FRAMES + "torch.distributed.DistBackendError: NCCL "
    "error in: ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error, "
    "NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
    "remote process exiting prematurely.\n"
)
CLOSING = (
    "W1120 10:10:09.102000 77 torch/distributed/elastic/multiprocessing/api.py:897] Sending "
    "process 812914 closing signal SIGTERM\n"
)
SUMMARY = (
    "E1120 10:10:10.620000 77 torch/distributed/elastic/multiprocessing/api.py:869] failed "
    "(exitcode: 1) local_rank: 1 (pid: 2630) of binary: /usr/bin/python\n"
    "Traceback (most recent call last):\n" + FRAMES + "torch.distributed.elastic.multiprocessing."
    "errors.ChildFailedError: \n=====\ntrain.py FAILED\n-----\n"
)
STORE = "[rank0]:[W1120 10:10:08.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=9)\n"
LINK_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
LINK_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


class Case(NamedTuple):
    name: str
    files: tuple[tuple[str, str], ...]
    root: str
    culprit: str
    rank: int | None = None  # None: not judged


class Fault(NamedTuple):
    """A last line, as a rank prints it."""

    line: str
    root: str
    culprit: str


FAULTS = (
    Fault("ValueError: expected a batch of 8, got 7", "python_exception", "user"),
    Fault("KeyError: 'input_ids'", "key_or_type", "user"),
    Fault("mypkg.errors.BadShard: shard 12 has no index", "python_exception", "user"),
    Fault("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a "
          "total capacity of 79.11 GiB", "cuda_oom", "user"),
    Fault("RuntimeError: CUDA error: uncorrectable ECC error encountered", "cuda_ecc", "infra"),
    Fault("RuntimeError: CUDA error: device-side assert triggered", "cuda_device_assert", "user"),
    Fault("OSError: [Errno 5] Input/output error: '/data/k400/train'", "io_error", "storage"),
    Fault("ModuleNotFoundError: No module named 'apex'", "import_error", "user"),
    Fault("AssertionError: Rank 1: found NaN in local grad norm in backward pass before "
          "data-parallel communication collective. Device: 1, node: n1", "megatron_nan_grad",
          "data"),
    Fault("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard_0001.bin'",
          "file_missing", "user"),
)


def traceback(last: str, head: str = "") -> str:
    return f"{head}Traceback (most recent call last):\n{FRAMES}{last}\n"


def prefixed(text: str, prefix: str) -> str:
    return "".join(f"{prefix}{row}\n" for row in text.splitlines())


def steps(first: int, last: int, minute: int) -> str:
    return "".join(
        f"2026-11-20 10:{minute:02d}:{step % 60:02d},120 step {step} loss 2.{step}\n"
        for step in range(first, last)
    )


def woven(texts: list[str]) -> str:
    """One line of each in turn, as a terminal shows several ranks."""
    rows = [text.splitlines() for text in texts]
    longest = max(len(one) for one in rows)
    return "".join(
        f"{one[index]}\n" for index in range(longest) for one in rows if index < len(one)
    )


def shapes(fault: Fault) -> Iterator[Case]:
    """One fault of rank 1 in every way that people keep logs."""
    own, cut = traceback(fault.line), fault.line[:12]
    yield Case(f"files: {cut}", (
        ("rank0.log", steps(1, 9, 0) + STORE + GLOO), ("rank1.log", steps(1, 9, 0) + own),
    ), fault.root, fault.culprit, 1)
    yield Case(f"cascade first: {cut}", (
        ("0/stderr.log", BACKEND + WATCHDOG.format(0)), ("1/stderr.log", steps(1, 9, 0) + own),
    ), fault.root, fault.culprit, 1)
    yield Case(f"rank prefixes: {cut}", (("run.log", woven([
        prefixed(steps(1, 9, 0) + GLOO, "[rank0]: "), prefixed(steps(1, 9, 0) + own, "[rank1]: "),
    ]) + CLOSING + SUMMARY),), fault.root, fault.culprit, 1)
    yield Case(f"local prefixes, coloured: {cut}", (("run.log", woven([
        prefixed(BACKEND, "\x1b[36m[default0]:\x1b[0m"),
        prefixed(own, "\x1b[31m[default1]:\x1b[0m"),
    ]) + SUMMARY),), fault.root, fault.culprit, 1)
    yield Case(f"srun labels: {cut}", (("slurm-4711.out", woven([
        prefixed(GLOO, "0: "), prefixed(own, "1: "),
    ]) + "srun: error: node12: task 1: Exited with exit code 1\n"),),
        fault.root, fault.culprit, 1)
    yield Case(f"no prefixes, woven: {cut}", (("run.log", steps(1, 9, 0) + woven([
        GLOO, own, GLOO, BACKEND]) + CLOSING + SUMMARY),), fault.root, fault.culprit)
    yield Case(f"a script's own logger: {cut}", (("rank1.log", prefixed(
        steps(1, 9, 0)[27:] + own, "2026-11-20 10:00:09,120 - ")),),
        fault.root, fault.culprit, 1)
    yield Case(f"container log: {cut}", (("run.log", prefixed(
        steps(1, 9, 0) + own + CLOSING, "2026-11-20T10:00:00.123456789Z stderr F ")),),
        fault.root, fault.culprit)
    yield Case(f"chain, then a consequence: {cut}", (
        ("rank1.log", own + LINK_DURING + BACKEND), ("rank0.log", WATCHDOG.format(0)),
    ), "" if fault.root in GENERIC else fault.root, fault.culprit, 1)
    yield Case(f"chain, wrapped: {cut}", (
        ("rank1.log", own + LINK_CAUSE + traceback("RuntimeError: training failed")),
        ("rank0.log", GLOO),
    ), "python_exception" if fault.root in GENERIC else fault.root,
        "user" if fault.root in GENERIC else fault.culprit, 1)


# A handled KeyError before a failing collective is how caches are written: no root by itself.
GENERIC = ("python_exception", "key_or_type", "import_error", "file_missing")


def others() -> Iterator[Case]:
    yield Case("all wait, none says why", tuple(
        (f"rank{rank}.log", WATCHDOG.format(rank)) for rank in range(4)), "", "")
    yield Case("only consequences", (("rank0.log", GLOO), ("rank2.log", BACKEND)), "", "")
    yield Case("only torchrun's summary", (("run.log", CLOSING + SUMMARY),), "", "")
    yield Case("healthy", (("rank0.log", steps(1, 50, 0)),), "", "")
    yield Case("an error that was handled", (("rank0.log", steps(1, 9, 0) + traceback(
        "ValueError: bad sample, skipped", "ERROR:root:sample 7\n") + steps(9, 30, 1)),), "", "")
    yield Case("a handled error, then the real one", (("rank0.log", traceback(
        "OSError: [Errno 5] Input/output error: '/data/a'") + steps(9, 30, 1)
        + traceback("RuntimeError: CUDA error: an illegal memory access was encountered")),),
        "cuda_illegal_address", "user")
    yield Case("the earlier of two, by clock", (
        ("rank0.log", steps(40, 44, 5) + traceback("ValueError: second")),
        ("rank1.log", steps(1, 9, 0) + traceback("ValueError: first")),
    ), "python_exception", "user", 1)
    link = ("2026-11-20 10:01:02 node7:101:222 [3] transport/net_ib/p2p.cc:648 NCCL WARN NET/IB: "
            "Got completion from peer 10.1.1.1<40554> with status=IBV_WC_RETRY_EXC_ERR(12) "
            "opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) vendor_err=129 hca mlx5_1\n")
    yield Case("a link, and nothing else", (("rank0.log", link + BACKEND),),
               "nccl_ib_wc_error_named", "network", 0)
    yield Case("a link's words because a peer crashed", (
        ("rank0.log", link + BACKEND),
        ("rank1.log", "2026-11-20 10:01:03 Fatal Python error: Segmentation fault\n"),
    ), "segfault_py", "unknown", 1)
    yield Case("a link long before a person gave up", (
        ("rank0.log", link), ("rank1.log", steps(1, 3, 30) + traceback("KeyboardInterrupt")),
    ), "nccl_ib_wc_error_named", "network", 0)
    yield Case("junk around it", (("rank3.log", "\x00\x01\ufffd" * 4000 + "\n" + "x" * 200_000
               + "\n" + traceback("TypeError: 'int' object is not iterable")),),
               "key_or_type", "user", 3)
    yield Case("a line of 1 MB", (("rank0.log", "y" * 1_000_000
               + " RuntimeError: CUDA error: device-side assert triggered " + "z" * 99 + "\n"),),
               "cuda_device_assert", "user", 0)
    yield Case("worker of a loader", (("rank0.log", traceback(
        "KeyError: Caught KeyError in DataLoader worker process 0.") + "Original "
        + traceback("KeyError: 'pixel_values'")),), "key_or_type", "user", 0)
    unhandled = ("ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure "
                 "999 'unknown error'\n")
    yield Case("a user's error, and NCCL's words about it in a file before", (
        ("rank0.log", unhandled), ("rank1.log", traceback("ValueError: bad shape")),
    ), "python_exception", "user", 1)
    yield Case("a GPU's error, and an unknown exception in a file before", (
        ("rank0.log", traceback("RuntimeError: the group is gone")),
        ("rank1.log", traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered")),
    ), "cuda_ecc", "infra", 1)
    yield Case("exit by the kernel", (("run.log", CLOSING + SUMMARY.replace(
        "exitcode: 1", "exitcode: -9")),), "", "")


def from_sample(identity: str, role: str, culprit: str, sample: str, number: int) -> Case:
    """A catalogue's sample alone: its root, or none for what is never a root."""
    carried = CARRIED.get(identity)
    root = carried or (identity if role == "root" else "")
    expected = "infra" if carried else culprit
    return Case(f"{identity} {number}", (("run.log", sample + "\n"),), root,
                expected if root else "")


def variants() -> list[Case]:
    from . import classify_forms  # which builds its logs from the parts here

    return [*(case for fault in FAULTS for case in shapes(fault)), *others(),
            *classify_forms.cases()]
