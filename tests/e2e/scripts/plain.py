"""A plain torchrun script that keeps no state: DDP over gloo, nothing of Holdfast.  It takes so
many steps, or steps until a file is there."""

import atexit
import itertools
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LAST, FAULT, AT = sys.argv[1], (sys.argv[2:] or [""])[0], 6
dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(LAST)) if LAST.isdecimal() else itertools.count():
    if FAULT == "slow-first" and rank == 1 and step == 0:
        time.sleep(float(sys.argv[3]))
    if rank == 1 and FAULT == "die-first":
        os.kill(os.getpid(), 9)
    if rank == 1 and step == AT:
        if FAULT == "die-often" and restarts < 10:
            os.kill(os.getpid(), 9)
        if FAULT == "loop" and restarts == 0:
            while True:
                pass
        if FAULT == "skip" and restarts == 0:
            dist.all_reduce = lambda *a, **k: None
        if FAULT == "size" and restarts == 0:
            dist.all_reduce(torch.ones(4096))
        if FAULT == "compile":  # a program of a compiler's name, as a build would start it
            subprocess.run([sys.argv[4], sys.argv[3]], check=True)
        if FAULT == "lock":  # as Neuron's runtime waits for another's compile
            while os.path.exists(sys.argv[3]):
                program = sys.argv[3].removesuffix(".lock")
                print(f"[INFO]: Another process must be compiling {program}, been waiting for: 0.1 "
                      "minutes", flush=True)
                time.sleep(1.0)
    if rank == 0 and step == AT and FAULT == "size" and restarts == 0:
        dist.all_reduce(torch.ones(1))
    loss = model(torch.randn(8, 32)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if FAULT == "eval" and step == AT:
        if rank == 0:
            time.sleep(float(sys.argv[3]))
        dist.barrier()
    ended = torch.full((8,), float(os.path.exists(LAST)))
    dist.all_reduce(ended)  # all ranks end behind the same step
    time.sleep(0.05)
    print(f"step {step} rank {rank} restarts {restarts} pid {os.getpid()}", flush=True)
    if ended.any():
        break
if FAULT == "upload" and rank == 1:
    atexit.register(time.sleep, float(sys.argv[3]))
dist.destroy_process_group()
print(f"finished rank {rank} restarts {restarts}", flush=True)
