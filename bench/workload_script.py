"""A plain DDP script, the reference workload: it knows torchrun's environment and nothing else.

4 layers, width 256, 4 heads, vocabulary 8192 (5.3 M parameters), AdamW, 4 texts x 64 tokens a
rank, gloo.  Rank 0 writes model and optimizer every 5 steps (torch.save, then rename); every rank
resumes from that file.  At each finished step a rank appends `monotonic_ns rank step pid` to a
file, so that runs under torchrun and under Holdfast are measured by one method.  The process whose
id stands in the file --raises raises behind its next step, and says in RAISES.at when.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS, BATCH = 8192, 256, 4, 4, 64, 4


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Contrastive: the first half of the texts against the second."""
        pooled = self.head(self.layers(self.embed(tokens)).mean(1))
        first, second = nn.functional.normalize(pooled, dim=-1).chunk(2)
        return nn.functional.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))


def batch_of(step: int, rank: int) -> torch.Tensor:
    """The same tokens for the same step and rank, before and after a restart."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    return torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=generator)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".tmp")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, temporary)
    os.replace(temporary, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def raise_if_named(order: Path) -> None:
    if order.read_text() == str(os.getpid()):
        now = order.with_name(f"{order.name}.tmp")
        now.write_text(str(time.monotonic_ns()))
        now.rename(f"{order}.at")
        raise RuntimeError("an error of the script's own")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--steps-file", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints, 0 = none")
    parser.add_argument("--raises", type=Path, help="names the process that is to raise")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Encoder()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    checkpoint = options.dir / "checkpoint.pt"
    first = load(checkpoint, model, optimizer)
    log = os.open(options.steps_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for step in range(first, options.steps):
        loss = ddp(batch_of(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(log, b"%d %d %d %d\n" % (time.monotonic_ns(), rank, step + 1, os.getpid()))
        if rank == 0 and options.every and (step + 1) % options.every == 0:
            save(checkpoint, step + 1, model, optimizer)
        if options.raises is not None and options.raises.exists():
            raise_if_named(options.raises)
    if rank == 0:
        digest = hashlib.sha256()
        for parameter in model.state_dict().values():
            digest.update(parameter.numpy().tobytes())
        print("digest", digest.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
