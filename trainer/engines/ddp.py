"""Data parallel training: torch's DDP around the model, and one micro-batch through it.

Owns how gradients are summed.  Must not know of steps, data or generations.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Wrapped = DistributedDataParallel
# torch 2.13 renamed it.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def wrap(model: nn.Module, device: torch.device) -> Wrapped:
    """DDP whose gradients sum in the same order in every step of every generation."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        # DDP rebuilds its buckets after its first backward, so the first steps after a
        # restart would sum in another order: with 3 and more ranks the weights would differ
        # in the last bit from a run that never failed.  This turns the rebuilding off.
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        init_sync=False,  # restore has proven that all ranks hold the same bytes
        # Buffers: broadcast by the loop, in the step that they belong to.
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )


def forward_backward(
    wrapped: Wrapped, batch: Mapping[str, Tensor], weight: float, summing: bool,
    look: Callable[[float], None],
) -> float:
    """Adds the gradients of one micro-batch, and sums them over all ranks when `summing`.

    Returns the loss; `look(loss)` is called before the backward pass and may raise.
    """
    with contextlib.nullcontext() if summing else wrapped.no_sync():
        loss = wrapped(batch)
        value = float(loss.detach())
        look(value)
        (loss * weight).backward()
    return value
