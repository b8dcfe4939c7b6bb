"""Dies of what a GPU with bad memory makes NCCL print; the second time of a mistake of its own."""

import os
import sys
import time

rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PEER = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1251, "
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
print(f"iteration 1 rank {rank}", flush=True)
if restarts == 0 and rank == 1:
    print(ECC, file=sys.stderr, flush=True)
    os.abort()
if restarts == 0:
    print(PEER, file=sys.stderr, flush=True)
if restarts == 1 and rank == 0:
    raise ValueError("a mistake of its own")
time.sleep(60)
