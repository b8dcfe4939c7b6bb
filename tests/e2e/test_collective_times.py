"""The collectives of a real run, from the rank's call to the agent's metrics."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest
from running import Run, Runs, wait_for
from test_engines import LONG_S, STRATEGIES, train

pytest.importorskip("torch", reason="the trainer's extra is not installed")

SECONDS = re.compile(r'holdfast_train_collective_seconds\{op="(\w+)",ranks="(\d+)",run="(\w+)",'
                     r'tensors="cpu"\} (\S+)')
OPS = {  # what the gradients and weights of four ranks cross by
    "sdp": {("all_to_all", "2"), ("all_gather", "2")},
    "mics": {("all_gather", "2"), ("all_to_all", "2"), ("all_reduce", "2")},
    "pipeline": {("send", "2"), ("recv", "2"), ("all_reduce", "2")},
}
ENDLESS = ("steps=100000", "checkpoint.every=0", "snapshot.enabled=false")
SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
while True:
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def shown(run: Run) -> dict[tuple[str, str], float]:
    """(op, ranks) -> mean seconds, once the agent has some."""
    assert run.process.poll() is None, run.output
    try:
        address = (run.home / "rt" / run.name / "address").read_text().strip()
        url = address if "://" in address else f"http://{address}"
        with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}  # it is not there yet
    return {(op, ranks): float(value) for op, ranks, _, value in SECONDS.findall(text)}


def waits(run: Run) -> Any:
    return run.status().get("collectives", {}).get("wait_s")


@pytest.mark.parametrize("strategy", OPS)
def test_of_the_trainers_strategies_by_kind(runs: Runs, strategy: str) -> None:
    run = train(runs, "t", *STRATEGIES[strategy], *ENDLESS)
    found = wait_for(lambda: (now := shown(run)) and OPS[strategy] <= set(now) and now, LONG_S,
                     run.output)
    assert all(0.0 < seconds < 60.0 for seconds in found.values()), found
    assert wait_for(lambda: waits(run), LONG_S, run.output) < 60.0
    run.kill_all()


def test_of_a_script_in_fsdp(runs: Runs) -> None:
    (runs.home / "sharded.py").write_text(SCRIPT)
    run = runs.start("run", "--standalone", "--nproc-per-node", "2",
                     "--time-collectives", str(runs.home / "sharded.py"))
    found = wait_for(lambda: (now := shown(run)) and len(now) >= 2 and now, LONG_S, run.output)
    assert set(found) == {("all_gather", "2"), ("reduce_scatter", "2")}, found
    assert wait_for(lambda: waits(run), LONG_S, run.output) < 60.0
    run.kill_all()
