"""Runs a script under torchrun with a store prefix of its own for each restart.

torchrun's workers meet in the agent's store, which keeps what the dead ones wrote: a restarted
rank may read its predecessor's address and never come back.  This wrapper, and not the script,
sets a fresh prefix, so that torchrun is also measured at its best.  The prefix is the restart's
number, which each node counts by itself: a node that joins later would look elsewhere.  So over
nodes the agent's store is left alone (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): then every rendezvous
names a new one, in rank 0's worker, and nothing is prefixed.

With --gloo-limit a collective gives up after so many seconds, and not after torch's 30 minutes:
without it ranks wait for one whose machine is gone.  They have torch's time to find each other.

    python -m torch.distributed.run ... fresh_prefix.py [--gloo-limit SECONDS] SCRIPT ARGS
"""

from __future__ import annotations

import datetime
import os
import runpy
import sys
from typing import Any

import torch.distributed as dist


def main() -> None:
    words, limit_s = sys.argv[1:], 0.0
    if words[0] == "--gloo-limit":
        limit_s, words = float(words[1]), words[2:]
    sys.argv = words
    original = dist.init_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        store, rank, world = next(iter(dist.rendezvous("env://")))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"restart-{attempt}", store)
        original(backend, store=store, rank=rank, world_size=world, **options)
        if limit_s:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=limit_s))

    setattr(dist, "init_process_group", init_process_group)  # noqa: B010 - a patch
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
