"""Strategies of a user's own: `own:Plain` does what ddp does, the others fail in ways of theirs."""

from __future__ import annotations

from holdfast.trainer.engines.ddp import DataParallel
from holdfast.trainer.engines.strategy import Layout, Place


class Plain(DataParallel):
    def lay_out(self, labels):
        places = tuple(Place(data=rank, words=f"mine {rank}") for rank in range(len(labels)))
        return Layout(places, data=len(labels), words=f"own: {len(labels)} ranks")


class FailsAtOnce(DataParallel):
    def __init__(self, setup):
        raise KeyError("no such thing")


class FailsInAStep(DataParallel):
    def run(self, micro_batches, look, skip):
        raise RuntimeError("my mistake")
