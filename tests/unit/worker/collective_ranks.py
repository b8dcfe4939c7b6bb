"""Ranks that train in torch's ways, each process with a tap of its own; run by test_collectives.py.

    python collective_ranks.py RANK WORLD STORE_FILE    # its last line is JSON

Every case is trained twice, without and with the tap, and says whether the weights are alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as imported_before
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from holdfast.worker import page as pages
from holdfast.worker.rank import collectives

STEPS, WIDTH, MICRO_BATCHES = 4, 64, 4
LATE_S, LATE_CALLS = 0.05, 5
ASYNC_CALLS = 7


def digest(module: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


class Ranks:
    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.tap = collectives.Tap([0] * pages.FIELDS)  # type: ignore[arg-type]

    def counted(self) -> dict[str, list[int]]:
        """Kind -> [calls, bytes, nanoseconds, ranks] since it was last asked."""
        found = {}
        for key, row in self.tap.rows.items():
            one = pages.collective_of(key, row)
            if one.calls:
                found[one.kind] = [one.calls, one.size_bytes, one.ns, one.ranks]
            row[:] = [0, 0, 0]
        return found

    def fsdp(self) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(STEPS):
            torch.manual_seed(step * self.world + self.rank)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.found = self.counted()
        return digest(model)

    def pipeline(self) -> str:
        torch.manual_seed(self.rank)
        module = nn.Linear(WIDTH, WIDTH)
        first, last = self.rank == 0, self.rank == self.world - 1
        given, made = (torch.ones(8 // MICRO_BATCHES, WIDTH, requires_grad=wanted)
                       for wanted in (not first, True))
        stage = PipelineStage(module, self.rank, self.world, torch.device("cpu"), given, made)
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(module.parameters(), 0.01)
        data = torch.ones(8, WIDTH)
        for _ in range(STEPS):
            schedule.step(*([data] if first else []), **({"target": data} if last else {}))
            optimizer.step()
            optimizer.zero_grad()
        self.found = self.counted()
        return digest(module)

    def own_calls(self) -> str:
        """Waited for at once, waited for later, and never."""
        number = torch.ones(256)
        imported_before(number)
        works = [dist.all_reduce(torch.ones(256), async_op=True) for _ in range(ASYNC_CALLS)]
        never = dist.all_reduce(torch.ones(256), async_op=True)
        for work in works:
            work.wait()
        while not never.is_completed():
            time.sleep(0.001)  # a poll
        parts = [torch.empty(10) for _ in range(self.world)]
        dist.all_gather(parts, torch.full((10,), float(self.rank)))
        sent, received = torch.ones(100), torch.empty(100)
        group = dist.new_group([0, 1])
        if self.rank < 2:
            for work in dist.batch_isend_irecv([
                    dist.P2POp(dist.isend, sent, 1 - self.rank, group),
                    dist.P2POp(dist.irecv, received, 1 - self.rank, group)]):
                work.wait()
        dist.barrier()
        self.found = self.counted()
        return str((number.sum().item(), [part[0].item() for part in parts]))

    def late(self) -> str:
        """The last rank computes longer, and everybody waits for it."""
        for _ in range(LATE_CALLS):
            if self.rank == self.world - 1:
                time.sleep(LATE_S)  # its work
            dist.all_reduce(torch.ones(16))
        self.found = self.counted()
        return ""

    def wrapped(self) -> str:
        """A script that wraps torch.distributed, and the group's own class, for itself."""
        seen = []

        def mine(original):  # type: ignore[no-untyped-def]
            def call(*given, **named):  # type: ignore[no-untyped-def]
                seen.append(original.__name__)
                return original(*given, **named)
            return call

        kept = dist.all_reduce, vars(dist.ProcessGroup)["allreduce"]
        dist.all_reduce = mine(dist.all_reduce)
        dist.ProcessGroup.allreduce = mine(dist.ProcessGroup.allreduce)
        number = torch.ones(1)
        try:
            dist.all_reduce(number)
            with contextlib.suppress(ValueError, RuntimeError):  # isend is compared by what it is
                dist.P2POp(print, number, 0)
                seen.append("not refused")
            dist.P2POp(dist.isend, number, (self.rank + 1) % self.world)
        finally:
            dist.all_reduce, dist.ProcessGroup.allreduce = kept
        self.found = self.counted()
        return str((seen, number.item()))

    def derived(self) -> str:
        """A group in Python that leaves a method to torch: entered from there, nothing answers.
        A class of its own each time: pybind11 remembers of a class what it does not override."""
        class Derived(dist.ProcessGroup):
            pass

        try:
            Derived(0, 1).allreduce([torch.ones(1)])
        except RecursionError:
            return "endless"
        except RuntimeError:
            self.found = self.counted()
            return "refused"
        return "answered"


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank,
                            world_size=world)
    ranks = Ranks(rank, world)
    cases = ("fsdp", "pipeline", "own_calls", "late", "wrapped", "derived")
    before = {name: getattr(ranks, name)() for name in cases}
    ranks.tap.each_beat()
    ranks.tap.each_beat()  # taps nothing twice
    ranks.tap.open(20)
    ranks.tap.open(40)  # the first window is left out
    said = {}
    for name in cases:
        dist.barrier()
        ranks.counted()
        after = getattr(ranks, name)()
        said[name] = {"alike": after == before[name], "said": after, "found": ranks.found}
    print(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
