"""tiny:Model, with an optimizer step that the test can break in the middle."""

from __future__ import annotations

import tiny
import torch

IN_RANK = None  # the rank's FakeElastic


def _in_the_middle(optimizer, *_):
    """Called by torch once the weights are being changed."""
    if IN_RANK is not None and IN_RANK.now is not None:
        with torch.no_grad():
            before = optimizer.param_groups[0]["params"][0].clone()
            optimizer.param_groups[0]["params"][0].add_(1.0)  # half a step
        IN_RANK._fault("torn")
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].copy_(before)


class Model(tiny.Model):
    pass
