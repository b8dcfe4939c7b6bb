"""Logs as the world's trainers, launchers and wrappers write them: more of what classify.py counts.

Owns the forms of progress lines and what a handled warning must not do.  The parts come from
bench/classify_cases.py; the lines of the tools are written from knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from .classify_cases import LINK_DURING, Case, steps, traceback

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
KEY = "KeyError: 'input_ids'"

# One line of each trainer, {0}: the step, {1}: a part of the epoch.  {2} is what ends it.
PROGRESS = {
    "HF Trainer": "{{'loss': 2.{0}, 'grad_norm': 1.2, 'learning_rate': 2e-05, 'epoch': {1}}}\n",
    "tqdm": "\r  5%|\u2588\u2588   | {0}/1000 [00:10<03:10,  5.00it/s]",
    "Lightning": "\rEpoch 0:  12%|##  | {0}/1000 [00:10<03:10,  5.00it/s, v_num=3]",
    "torchvision": "Epoch: [0][{0:5d}/5005]\tTime  0.4 Loss 6.9\n",
    "Megatron-LM": " [2026-11-20 10:01:00] iteration {0:8d}/   78125 | lm loss: 2.6E+00 |\n",
    "torchtitan": "\x1b[32m[titan] 2026-11-20 10:01:00,000 - root - INFO - \x1b[31mstep: {0:2d}  "
                  "\x1b[32mloss:  2.6\x1b[39m\n",
    "DeepSpeed": "[2026-11-20 10:01:00,123] [INFO] [logging.py:96:log_dist] step={0}, skipped=0\n",
    "nanoGPT": "iter {0}: loss 2.3, time 300ms\n",
    "global_step": "INFO global_step={0} loss=2.1\n",
    "train_step": "train_step {0} loss 2.1\n",
    "JSON": '{{"epoch": 0, "step": {0}, "loss": 2.1}}\n',
    "fairseq": '{{"epoch": 1, "num_updates": "{0}", "loss": "2.1"}}\n',
}

# Lines of jobs that go on, which would be blamed if they were believed.
WARNINGS = {
    "fallback": "WARNING: flash_attn not usable: ImportError: No module named flash_attn\n",
    "probe": "INFO no cached index: FileNotFoundError: [Errno 2] No such file or directory: "
             "'idx.npy', building\n",
    "retry": "WARNING caught OutOfMemoryError: CUDA out of memory, halving the batch\n",
    "netrc": "wandb: WARNING PermissionError: [Errno 13] Permission denied: '/home/u/.netrc'\n",
    "NVML": "wandb: WARNING Failed to initialize NVML: Driver/library version mismatch\n",
    "GID": "NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: GID table change(20)\n",
    "EFA": "libfabric:85:core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty "
           "list\n",
}
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nCuda failure {}"
)
CUDA = (
    ("2 'out of memory'", "cuda_oom", "user"),
    ("700 'an illegal memory access was encountered'", "cuda_illegal_address", "user"),
    ("101 'invalid device ordinal'", "cuda_bad_ordinal", "user"),
    ("'invalid device ordinal'", "cuda_bad_ordinal", "user"),
    ("710 'device-side assert triggered'", "cuda_device_assert", "user"),
    ("214 'uncorrectable ECC error encountered'", "cuda_ecc", "infra"),
    ("999 'unknown error'", "nccl_unhandled_cuda", "unknown"),
)
# What tools put before every line; {0}: the rank, {1}: seconds, for those that change.
WRAPPERS = {
    "pdsh": "node{0}: ", "DeepSpeed": "10.0.0.{0}: ", "compose": "worker-{0}  | ",
    "kubectl": "[pod/llama-worker-{0}/pytorch] ", "stern": "llama-worker-{0} pytorch ",
    "journal": "Nov 20 10:00:{1:02d} node{0} python3[12{0}]: ",
    "journal, ISO": "2026-11-20T10:00:{1:02d}+0000 node{0} python3[12{0}]: ",
    "mpirun": "[1,{0}]<stderr>:", "torchrun --role": "[actor{0}]:",
    "SkyPilot": "(worker{0}, rank={0}, pid=123, ip=10.0.0.1) ",
    "logging": "11/20/2026 10:00:{1:02d} - ERROR - __main__ - rank {0} - ",
    "logging, level": "2026-11-20 10:00:{1:02d},123 ERROR w{0} ",
    "Neuron": "2026-Nov-20 10:00:{1:02d}.1234 w{0} ", "epoch": "[17320968{1:02d}.123] w{0} ",
    "Composer": "[2026-11-20 10:00:{1:02d} rank{0}] ",
}
NAMING = ("mpirun", "torchrun --role", "SkyPilot", "logging", "Composer")  # the rank
# What ends a run before, or without, a traceback of its own.
SLURM = "slurmstepd: error: *** {} 4711{} ON node12 CANCELLED AT 2026-11-20T10:00:00{} ***\n"
FIRST = {
    "a syntax error": ('  File "/jobs/train.py", line 12\n    def f(:\n          ^\n'
                       "SyntaxError: invalid syntax\n", "key_or_type", "user"),
    "arguments": ("usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --bs 4"
                  "\n", "script_usage", "user"),
    "no script": ("python3: can't open file '/jobs/trian.py': [Errno 2] No such file or directory"
                  "\n", "script_missing", "user"),
    "Slurm's memory": ("slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the "
                       "step tasks have been OOM Killed.\nsrun: error: node12: task 3: Out Of "
                       "Memory\n" + SLURM.format("STEP", ".0", ""), "slurm_task_oom", "user"),
    "preempted": (SLURM.format("JOB", "", " DUE TO PREEMPTION"), "slurm_preempted", "policy"),
    "cancelled": (SLURM.format("JOB", "", ""), "slurm_cancelled", "policy"),
    "only a step was cancelled": (SLURM.format("STEP", ".0", ""), "", ""),
    "no memory in C++": ("terminate called after throwing an instance of 'std::bad_alloc'\n"
                         "  what():  std::bad_alloc\n", "native_bad_alloc", "user"),
    "a spoilt heap": ("free(): invalid pointer\nFatal Python error: Aborted\n", "heap_corrupted",
                      "unknown"),
    "an abort alone": ("Fatal Python error: Aborted\n", "", ""),
    "a bus error": ("ERROR: Unexpected bus error encountered in worker. This might be caused by "
                    "insufficient shared memory (shm).\n", "shm_bus_error", "user"),
    "an XID": ("[ 1234.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU has fallen off the bus.\n",
               "nvrm_xid", "infra"),
    "an XID of the job's": ("[ 1234.5] NVRM: Xid (PCI:0000:4e:00): 13, pid=1, Graphics\n", "", ""),
    "an XID, then a user's error": ("[ 1234.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=1, GPU\n"
                                    + traceback(KEY), "key_or_type", "user"),
    "a port in use": (traceback(
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: "
        "address already in use"), "port_in_use", "user"),
}
SPOT = "INFO spot interruption notice handler started\n"


def cases() -> Iterator[Case]:
    yield from handled()
    yield from mentioned()
    yield from carried()
    yield from ordered()
    yield from wrapped()
    yield from first_failures()


def handled() -> Iterator[Case]:
    """An error that was logged, whole, then the steps of each trainer."""
    bad = traceback("OSError: [Errno 5] Input/output error: '/data/a'", "ERROR sample 7\n")
    for name, form in PROGRESS.items():
        steps = "".join(form.format(step, step / 50) for step in range(5, 20)) + "\n"
        yield Case(f"handled, then steps of {name}", (("rank0.log", bad + steps),), "", "")
        tagged = "".join(f"[rank0]: {row}\n" for row in (bad + steps).split("\n"))
        yield Case(f"the same behind prefixes: {name}", (("run.log", tagged),), "", "")
        yield Case(f"handled, then the real one: {name}", (
            ("rank0.log", bad + steps + traceback(ECC)),), "cuda_ecc", "infra", 0)
    for name, quiet in (
        ("a dump of settings", "max_steps=1000, warmup_steps=500, eval_steps=50, step_size=3\n"),
        ("shards", "".join(f"\rLoading checkpoint shards:  5%|# | {n}/9 [" for n in range(1, 9))),
    ):
        yield Case(f"{name} is no progress", (("run.log", bad + quiet + "\n"),),
                   "io_error", "storage")


def mentioned() -> Iterator[Case]:
    """A warning, and hours or no step at all later an uncaught error, of this rank or another."""
    hf = "".join(PROGRESS["HF Trainer"].format(step, step / 50) for step in range(5, 40))
    for name, warning in WARNINGS.items():
        for last, root, culprit in ((KEY, "key_or_type", "user"), (ECC, "cuda_ecc", "infra")):
            for between in ("", hf):
                text = warning + between + traceback(last)
                yield Case(f"{name}, {'steps, ' if between else ''}then {root}",
                           (("rank0.log", text),), root, culprit, 0)
        yield Case(f"{name} on rank 0, an error of rank 1", (
            ("rank0.log", "2026-11-20 10:00:00 x\n" + warning),
            ("rank1.log", "2026-11-20 10:30:00 x\n" + traceback(KEY)),
        ), "key_or_type", "user", 1)
    yield Case("a handler of spot notices", (("rank0.log", SPOT + traceback(KEY)),),
               "key_or_type", "user", 0)
    yield Case("a handler of spot notices, and nothing else", (("rank0.log", SPOT),), "", "")
    yield Case("a device's own line, then what the framework made of it", (("rank0.log",
        "ERROR TDRV:log_device_err [ND 1][NC 0] Uncorrectable memory error is detected, metadata: "
        "0x16. Please terminate or replace the instance\n" + traceback("RuntimeError: failed")),),
        "neuron_mem_ue", "infra", 0)
    yield Case("a traceback that Python itself let go", (("rank0.log",
        "Exception ignored in: <function Iterator.__del__ at 0x7f>\n"
        + traceback("AssertionError: can only test a child process")),), "", "")


def carried() -> Iterator[Case]:
    """NCCL says that a call of CUDA's failed, and only in its last line which."""
    for said, root, culprit in CUDA:
        yield Case(f"NCCL carries {said}", (("rank3.log", traceback(NCCL.format(said))),),
                   root, culprit, 3)
        stamped = "".join(f"2026-11-20T10:00:00.1Z stderr F {row}\n"
                          for row in traceback(NCCL.format(said)).splitlines())
        yield Case(f"the same in a container's log: {said}", (("rank3.log", stamped),),
                   root, culprit, 3)
    yield Case("NCCL warns before the traceback", (("rank3.log", "n1:12:34 [3] init.cc:1 NCCL WARN "
               "Cuda failure 2 'out of memory'\n" + traceback(NCCL.partition("\nLast")[0])),),
               "cuda_oom", "user", 3)


def deep(last: str, frames: int) -> str:
    """A traceback of so many frames, as real ones have."""
    rows = "".join(
        f'  File "/x/site-packages/torch/nn/modules/module_{n}.py", line {n}, in _call_impl\n'
        f"    return forward_call(*args, **kwargs)\n" for n in range(frames)
    )
    return f"Traceback (most recent call last):\n{rows}{last}\n"


def ordered() -> Iterator[Case]:
    """The later error stands in the file before."""
    late, early = "2026-11-20 10:30:00,000 ERROR ends\n", "2026-11-20 10:05:00,000 ERROR bad\n"
    for frames in (3, 8, 9, 10, 14, 40):
        for last in ("RuntimeError: the worker gave no answer", ECC):
            yield Case(f"{frames} frames, {last[:20]}", (
                ("rank0.log", steps(1, 9, 0) + late + deep(last, frames)),
                ("rank1.log", steps(1, 9, 0) + early + traceback(KEY)),
            ), "key_or_type", "user", 1)
    yield Case("a chain of deep tracebacks", (
        ("rank0.log", late + deep("ValueError: a", 60) + LINK_DURING + deep("ValueError: b", 60)),
        ("rank1.log", early + traceback(KEY)),
    ), "key_or_type", "user", 1)
    clocks = {
        "Neuron's": "2026-Nov-20 10:{0}:05.000001 1235:1301 ERROR TDRV:x ",
        "a US": "11/20/2026 10:{0}:05 - ERROR - x - ", "syslog's": "Nov 20 10:{0}:05 n1 x[12]: ",
        "torchtitan's": "[titan] 2026-11-20 10:{0}:05,000 - root - ERROR - ",
    }
    timeout = "execution timeout (30000 ms) on Neuron Device 0 NC 0, model x.neff, waiting\n"
    memory = "[ND 1][NC 0] Uncorrectable memory error is detected, metadata: 0x16. Replace it\n"
    for name, clock in clocks.items():
        yield Case(f"by {name} clock", (
            ("rank0.log", clock.format(30) + timeout), ("rank1.log", clock.format("00") + memory),
        ), "neuron_mem_ue", "infra", 1)


def wrapped() -> Iterator[Case]:
    """Two ranks line by line, each behind a wrapper that nobody told about."""
    for name, form in WRAPPERS.items():
        for last, root, culprit in ((KEY, "key_or_type", "user"), (ECC, "cuda_ecc", "infra")):
            chain = traceback("ValueError: first") + LINK_DURING + traceback(last)
            peer = traceback("RuntimeError: [x.cc:1] Connection closed by peer [10.0.0.1]:10895")
            rows = [
                f"{form.format(rank, second)}{row}\n"
                for second, pair in enumerate(zip_longest(peer.split("\n"), chain.split("\n")))
                for rank, row in enumerate(pair) if row is not None
            ]
            yield Case(f"behind {name}: {root}", (("all.log", "".join(rows)),), root, culprit,
                       1 if name in NAMING else None)
    group = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "a.py", line 4, in <module>\n  |     asyncio.run(main())\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
        '    |   File "a.py", line 9, in load\n    |     raise KeyError("input_ids")\n'
        f"    | {KEY}\n    +------------------------------------\n"
    )
    yield Case("an exception group", (("rank0.log", group),), "key_or_type", "user", 0)
    bar = "  5%|#    | 50/1000 [00:10<03:10,  5.00it/s]"
    yield Case("right behind a bar", (("rank0.log", bar + traceback(ECC)),), "cuda_ecc", "infra", 0)
    yield Case("a small class", (("rank0.log", traceback(
        "socket.gaierror: [Errno -3] Temporary failure in name resolution")),),
        "name_resolution", "network", 0)
    small = ("select.error: (9, 'Bad file descriptor')", "zlib.error: Error -3")
    for line in small:
        yield Case(line[:14], (("rank0.log", traceback(line)),), "python_exception", "user", 0)


def first_failures() -> Iterator[Case]:
    for name, (text, root, culprit) in FIRST.items():
        yield Case(name, (("run.log", text),), root, culprit)
