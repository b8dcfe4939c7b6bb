"""AdamW and its learning rate.

Owns both.  The rate is a function of the step's number, so there is no scheduler state to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .config import OptimizerOptions


def build(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions
) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only.  Fused: one pass over the state per step."""
    named = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.learning_rate,
        betas=(options.beta1, options.beta2), fused=True)


def learning_rate(options: OptimizerOptions, step: int, steps: int) -> float:
    """The rate of optimizer step number `step`, counted from 0, of `steps`."""
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return options.learning_rate * (options.final_fraction + (1 - options.final_fraction) * cosine)
