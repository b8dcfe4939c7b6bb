"""The ranks of one node for bench/engines.py: the trainer's own loop, with a clock and a meter.

    python -m bench.engines_rank FIRST RANKS WORLD MASTER PORT OUT key=value ...

Owns what is measured inside: when each step ended, what had left the node's interface by then, and
the first step's gradients.  One process imports torch and forks its ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def sent_bytes(interface: str = "eth0") -> int:
    """Since the interface is there, by the kernel's own count, with headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def gradients(strategy: Any) -> dict[str, Any]:
    """Of one rank: name -> its rows (fsdp, mics) or all of it (ddp)."""
    held = getattr(strategy, "rows", None) or dict(strategy.model.named_parameters())
    return {name: one.grad.detach().clone() for name, one in held.items() if one.grad is not None}


def rank(out: Path, settings: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    from holdfast.trainer import loop
    from holdfast.trainer.config import load
    from holdfast.trainer.standalone import Standalone

    class Timed(Standalone):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[float, int]] = []

        def step_end(self, _step: int, _loss: float) -> None:
            self.rows.append((time.monotonic(), sent_bytes()))

    plain, kept = loop.build, dict[str, Any]()

    def build(setup: Any) -> Any:
        strategy = plain(setup)
        norm = strategy.norm

        def first() -> float:
            if not kept and getattr(strategy, "wrapped", strategy) is not None:  # no warm-up
                kept.update(gradients(strategy))
            return float(norm())

        strategy.norm = first
        return strategy

    loop.build = build
    timed = Timed()
    loop.train(load(None, settings), timed)
    number = timed.place.rank
    torch.save(kept, out / f"gradients-{number}.pt")
    (out / f"rank-{number}.json").write_text(json.dumps(timed.rows))
    os._exit(0)


def main() -> int:
    first, ranks, world, host, port, out, *settings = sys.argv[1:]
    import holdfast.trainer.engines.sharded
    import holdfast.trainer.loop  # noqa: F401

    children = []
    for local in range(int(ranks)):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(int(first) + local), LOCAL_RANK=str(local), WORLD_SIZE=world,
                MASTER_ADDR=host, MASTER_PORT=port)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
            rank(Path(out), settings)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's own end may wait for threads that a fork has not taken along
