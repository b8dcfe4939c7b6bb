"""Logs as the world's trainers, launchers and wrappers write them: more of what classify.py counts.

Owns the forms of progress lines and what a handled warning must not do.  The parts come from
bench/classify_cases.py; the lines of the tools are written from knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator

from .classify_cases import Case, traceback

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
}  # fmt: skip

# What is printed on the way by jobs that go on, and what would be blamed if it were believed.
WARNINGS = {
    "fallback": "WARNING: flash_attn not usable: ImportError: No module named flash_attn\n",
    "probe": "INFO no cached index: FileNotFoundError: [Errno 2] No such file or directory: "
             "'idx.npy', building\n",
    "retry": "WARNING caught OutOfMemoryError: CUDA out of memory, halving the batch\n",
    "netrc": "wandb: WARNING PermissionError: [Errno 13] Permission denied: '/root/.netrc'\n",
    "NVML": "wandb: WARNING Failed to initialize NVML: Driver/library version mismatch\n",
    "GID": "NCCL WARN NET/IB : mlx5_3:1 Got non-fatal async event: GID table change(20)\n",
    "EFA": "libfabric:85:core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty "
           "list\n",
}  # fmt: skip
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run "
    "with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nCuda failure {}"
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
SPOT = "INFO spot interruption notice handler started\n"


def cases() -> Iterator[Case]:
    yield from handled()
    yield from mentioned()
    yield from carried()


def handled() -> Iterator[Case]:
    """An error that was logged, whole, then the steps of each trainer."""
    bad = traceback("OSError: [Errno 5] Input/output error: '/data/a'", "ERROR sample 7\n")
    for name, form in PROGRESS.items():
        steps = "".join(form.format(step, step / 50) for step in range(5, 20)) + "\n"
        yield Case(f"handled, then steps of {name}", (("rank0.log", bad + steps),), "", "")
        tagged = "".join(f"[rank0]: {row}\n" for row in (bad + steps).split("\n"))
        yield Case(f"the same behind prefixes: {name}", (("run.log", tagged),), "", "")
        yield Case(f"handled, then the real one: {name}", (
            ("rank0.log", bad + steps + traceback(ECC)),), "cuda_ecc", "infra", 0)  # fmt: skip
    for name, quiet in (
        ("a dump of settings", "max_steps=1000, warmup_steps=500, eval_steps=50, step_size=3\n"),
        ("shards", "".join(f"\rLoading checkpoint shards:  5%|# | {n}/9 [" for n in range(1, 9))),
    ):
        yield Case(f"{name} is no progress", (("run.log", bad + quiet + "\n"),),
                   "io_error", "storage")  # fmt: skip


def mentioned() -> Iterator[Case]:
    """A warning, and hours or no step at all later an uncaught error, of this rank or another."""
    hf = "".join(PROGRESS["HF Trainer"].format(step, step / 50) for step in range(5, 40))
    for name, warning in WARNINGS.items():
        for last, root, culprit in ((KEY, "key_or_type", "user"), (ECC, "cuda_ecc", "infra")):
            for between in ("", hf):
                yield Case(f"{name}, {'steps, ' if between else ''}then {root}", (
                    ("rank0.log", warning + between + traceback(last)),), root, culprit, 0)  # fmt: skip
        yield Case(f"{name} on rank 0, an error of rank 1", (
            ("rank0.log", "2026-11-20 10:00:00 x\n" + warning),
            ("rank1.log", "2026-11-20 10:30:00 x\n" + traceback(KEY)),
        ), "key_or_type", "user", 1)  # fmt: skip
    yield Case("a handler of spot notices", (("rank0.log", SPOT + traceback(KEY)),),
               "key_or_type", "user", 0)  # fmt: skip
    yield Case("a handler of spot notices, and nothing else", (("rank0.log", SPOT),), "", "")
    yield Case("a device's own line, then what the framework made of it", (("rank0.log",
        "ERROR TDRV:log_device_err [ND 1][NC 0] Uncorrectable memory error is detected, metadata: "
        "0x16. Please terminate or replace the instance\n" + traceback("RuntimeError: failed")),),
        "neuron_mem_ue", "infra", 0)  # fmt: skip
    yield Case("a traceback that Python itself let go", (("rank0.log",
        "Exception ignored in: <function Iterator.__del__ at 0x7f>\n"
        + traceback("AssertionError: can only test a child process")),), "", "")


def carried() -> Iterator[Case]:
    """NCCL says that a call of CUDA's failed, and only in its last line which."""
    for said, root, culprit in CUDA:
        yield Case(f"NCCL carries {said}", (("rank3.log", traceback(NCCL.format(said))),),
                   root, culprit, 3)  # fmt: skip
        stamped = "".join(f"2026-11-20T10:00:00.1Z stderr F {row}\n"
                          for row in traceback(NCCL.format(said)).splitlines())  # fmt: skip
        yield Case(f"the same in a container's log: {said}", (("rank3.log", stamped),),
                   root, culprit, 3)  # fmt: skip
    yield Case("NCCL warns before the traceback", (("rank3.log", "n1:12:34 [3] init.cc:1 NCCL WARN "
               "Cuda failure 2 'out of memory'\n" + traceback(NCCL.partition("\nLast")[0])),),
               "cuda_oom", "user", 3)  # fmt: skip
