"""The built-in data set in a process whose optimizer step may be broken in the middle: whoever
takes the file that says so changes a weight, writes its rank beside it and stays until its
generation is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.trainer.example.data import CodeSearch as Data  # noqa: F401
from holdfast.worker import elastic


def half_a_step(optimizer, *_):
    order = Path(os.environ["TEARS"])
    try:
        order.unlink()
    except FileNotFoundError:
        return
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].add_(1.0)
    written = order.with_suffix(".new")
    written.write_text(os.environ["RANK"])
    written.rename(order.with_suffix(".torn"))
    while True:
        elastic.phase("optimizer")  # raises Broken once the group is
        time.sleep(0.01)


register_optimizer_step_pre_hook(half_a_step)
