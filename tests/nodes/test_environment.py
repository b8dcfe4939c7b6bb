"""The environment of ranks over two nodes, variable by variable beside real torchrun's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Nodes
from .worlds import World

WRITES = ("import json, os, sys; from pathlib import Path\n"
          "whole = Path(sys.argv[1], os.environ['RANK'])\n"
          "draft = whole.with_suffix('.draft')\n"
          "draft.write_text(json.dumps(dict(os.environ))); draft.rename(whole)\n")
SHAPE = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--role", "worker")
# What differs, and why: the table of docs/hooks.md.
OTHER_VALUE = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
OURS_ALONE = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
              "TORCH_FR_BUFFER_SIZE"}
THEIRS_ALONE = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
OURS = ("HOLDFAST_", "PYTHONPATH")  # of the command, not of the rank


@pytest.fixture()
def world() -> Iterator[World]:
    with Nodes(3, weight=16) as nodes:
        made = World(nodes)
        made.start_store()
        yield made


def seen(folder: Path) -> dict[int, dict[str, str]]:
    return {int(file.name): json.loads(file.read_text())
            for file in folder.iterdir() if file.suffix == ""}


def test_ranks_find_what_torchrun_would_have_told_them(world: World) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    script = world.shared / "writes.py"
    script.write_text(WRITES)
    found = {}
    for which in ("torchrun", "holdfast"):
        folder = world.shared / which
        folder.mkdir()
        started = []
        for number in range(2):
            node = world.nodes[number]
            environ = {key: value for key, value in world.environ(number).items()
                       if key != "OMP_NUM_THREADS"}
            if which == "torchrun":
                command = [sys.executable, "-m", "torch.distributed.run", *SHAPE,
                           "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint",
                           f"{world.nodes[0].address}:29500", "--local-addr", node.address,
                           "--rdzv-conf", f"is_host={str(not number).lower()}"]
            else:
                command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "run", "--run", "job",
                           "--preload", "none", "--node-rank", str(number), *SHAPE]
            started.append(node.start([*command, str(script), str(folder)], environ,
                                      output="job.out"))
        codes = [process.wait(120) for process in started]
        assert codes == [0, 0], world.said()
        found[which] = seen(folder)
    assert set(found["torchrun"]) == set(found["holdfast"]) == set(range(4))
    for rank in range(4):
        theirs, ours = found["torchrun"][rank], found["holdfast"][rank]
        names = {name for name in theirs.keys() | ours.keys() if not name.startswith(OURS)}
        differ = {name: (theirs.get(name), ours.get(name)) for name in names
                  if theirs.get(name) != ours.get(name)}
        assert set(differ) == OTHER_VALUE | OURS_ALONE | THEIRS_ALONE, differ
        assert not OURS_ALONE & theirs.keys() and not THEIRS_ALONE & ours.keys(), differ
        assert theirs.keys() >= OTHER_VALUE <= ours.keys()
