"""The trainer without a launcher: every call it makes is there, and a lost peer ends in its words.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import test_checkpoint as runs
import torch.distributed as dist

import holdfast.trainer.loop
from holdfast.trainer.engines.ddp import DataParallel
from holdfast.trainer.standalone import GenerationLost, Standalone
from holdfast.worker import elastic

clean_group = runs.clean_group
TRAINER = Path(holdfast.trainer.loop.__file__).parent
CALLED = sorted({name for path in TRAINER.rglob("*.py") for name in re.findall(
    r"\belastic\.([a-z_]+)\(", path.read_text())})


class Loses(DataParallel):
    """The connection to a peer, in the first step."""

    def run(self, micro_batches, look, skip):
        raise dist.DistBackendError("NCCL communicator was aborted")


def parameters(function):
    return [(one.name, one.kind, one.default)
            for one in inspect.signature(function).parameters.values()]


def test_there_are_calls():
    assert {"ready", "raised", "park", "phase", "snapshot_buffer"} <= {*CALLED}


@pytest.mark.parametrize("name", CALLED)
def test_what_the_trainer_calls_is_taken_alike_without_a_launcher(name):
    assert parameters(getattr(Standalone(), name)) == parameters(getattr(elastic, name))


def test_a_lost_peer_is_said_where_nobody_plans_another_generation(tmp_path):
    with pytest.raises(GenerationLost, match="at step 0: peer_lost: NCCL communicator was aborted"):
        runs.run(tmp_path, f"strategy={__name__}:Loses")
