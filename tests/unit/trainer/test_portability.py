"""Checkpoints between strategies and devices: saved under each, loaded under each, trained on.

One table over four ranks that live through all of it: 4 steps under each way of WAYS, saved; then
every file under every way, for two steps more.  What is equal to the last bit: the state as loaded,
the losses of the next step, and the places that an evaluation finds.  The step after that has been
through one optimizer step whose gradients were summed in another order: TOLERANCE.

XLA's processor device is a row and a column of that table, in one process of a Python of its own
(tests/own_python.py).  It computes by other kernels: its losses are TOLERANCE from the others', and
the state as loaded is equal to the last bit there as well.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import PRELOAD
from own_python import XLA, on_xla
from ways import MORE, Way

from holdfast.trainer.standalone import Assignment

WAYS = {
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "fsdp of 2": ("strategy=fsdp", "fsdp.group=2"),
    "mics of 2": ("strategy=mics", "mics.group=2"),
    "mics of 4": ("strategy=mics", "mics.group=4"),
    "pipeline of 2": ("strategy=pipeline", "pipeline.stages=2"),
    "pipeline of 4": ("strategy=pipeline", "pipeline.stages=4"),
    "pipeline of 2, in groups": ("strategy=pipeline", "pipeline.stages=2", "pipeline.group=2"),
}
XLA_CPU = "xla-cpu"
WORLD, SAVED_AT = 4, 4
TOLERANCE = 1e-5  # relative, of the second loss; of the first one too where XLA computed it
LIMIT_S = 240.0  # three models are traced by each rank, on a busy machine


def settings(folder, name):
    return [
        "model=tiny:Searched", "data=blocks:Data", f"steps={SAVED_AT}", "batch=3",
        f"micro_batches={WORLD}", f"work_dir={folder / name}", f"checkpoint.every={SAVED_AT}",
        *WAYS.get(name, ())]


class Rank:
    """One of the four, in a process of its own."""

    def __init__(self, rank, port, folder):
        self.rank, self.port, self.generation = rank, port, 0
        self.ways = {name: Way([*settings(Path(folder), name), "device=cpu"]) for name in WAYS}

    def assignment(self, *resume):
        self.generation += 1
        return Assignment(self.generation, self.rank, self.rank, WORLD, "127.0.0.1", self.port,
                          *resume, run="matrix")

    def save(self):
        """What each way evaluated as it saved, and where that lies."""
        return ({name: way.save(self.assignment()) for name, way in self.ways.items()},
                {name: way.saved() for name, way in self.ways.items()})

    def load(self, paths):
        return {(saved, name): way.load(self.assignment("disk", SAVED_AT, 1, path))
                for saved, path in paths.items() for name, way in self.ways.items()}


def _rank(pipe, *given):
    torch.set_num_threads(1)
    try:
        rank = Rank(*given)
        pipe.send(rank.save())
        pipe.send(rank.load(pipe.recv()))
    except BaseException:
        pipe.send(traceback.format_exc())


class Found(NamedTuple):
    """What came of it; XLA's row and column are missing where there is no Python for it."""

    evaluated: dict  # by who saved: by rank
    loaded: dict  # by (saved, loaded): by rank: tensors that differ, what was evaluated, losses
    no_xla: str


def heard(pipes):
    told = [pipe.recv() if pipe.poll(LIMIT_S) else "no answer" for pipe in pipes]
    bad = [one for one in told if isinstance(one, str)]
    assert not bad, "\n".join(bad)
    return told


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    folder, started, xla, no_xla = tmp_path_factory.mktemp("matrix"), [], None, XLA.missing
    with contextlib.ExitStack() as ends:
        if not no_xla:
            xla = ends.enter_context(
                on_xla("matrix", folder / XLA_CPU, *settings(folder, XLA_CPU)))
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, store.port, str(folder)), daemon=True)
            process.start()
            for end in (ours.close, process.join, process.kill):  # the last one first
                ends.callback(end)
            theirs.close()
            started.append(ours)
        saved = heard(started)
        evaluated = {name: [one[0][name] for one in saved] for name in WAYS}
        paths = dict(saved[0][1])
        if xla is not None:
            told = xla.answer(LIMIT_S)
            evaluated[XLA_CPU], paths[XLA_CPU] = [told["evaluated"]], told["path"]
            xla.ask(json.dumps(paths))
        for pipe in started:
            pipe.send(paths)
        told = heard(started)
        loaded = {pair: [one[pair] for one in told] for pair in told[0]}
        if xla is not None:
            for name, (wrong, again, losses) in xla.answer(LIMIT_S).items():
                seen = {(step, number): loss for step, number, loss in losses}
                loaded[name, XLA_CPU] = [(wrong, again, seen)]
    return Found(evaluated, loaded, no_xla)


def losses(found, pair, step):
    """Of every micro-batch, from whichever rank computed it; one that several computed is equal."""
    told = [(number, loss) for _, _, losses in found.loaded[pair]
            for (at, number), loss in losses.items() if at == step]
    assert len(dict(told)) == WORLD == len(set(told)), told
    return dict(told)


def near(found, pair, step):
    """Whether they are those of ddp from the same file, within TOLERANCE."""
    return losses(found, pair, step) == pytest.approx(
        losses(found, (pair[0], "ddp"), step), rel=TOLERANCE)


def whole(found, pair):
    """Whether each rank holds what the file holds, and evaluates what was evaluated there."""
    before = found.evaluated[pair[0]][0]
    assert before["mrr_at_10"] > 0, pair
    assert all(one == before for one in found.evaluated[pair[0]]), pair
    return all((wrong, again) == ([], before) for wrong, again, _ in found.loaded[pair])


@pytest.mark.parametrize("saved", [*WAYS, XLA_CPU])
def test_what_each_saved_every_other_loads_and_goes_on_from(found, saved):
    if saved == XLA_CPU and found.no_xla:
        pytest.skip(found.no_xla)
    for loaded in WAYS:
        pair = saved, loaded
        assert whole(found, pair), pair
        assert losses(found, pair, SAVED_AT) == losses(found, (saved, "ddp"), SAVED_AT), pair
        assert near(found, pair, SAVED_AT + 1), pair


@pytest.mark.parametrize("saved", [*WAYS, XLA_CPU])
def test_what_each_saved_xla_loads_and_goes_on_from(found, saved):
    if found.no_xla:
        pytest.skip(found.no_xla)
    pair = saved, XLA_CPU
    assert whole(found, pair), found.loaded[pair]
    assert {step for _, _, seen in found.loaded[pair] for step, _ in seen} == set(
        range(SAVED_AT, SAVED_AT + MORE))
    for step in range(SAVED_AT, SAVED_AT + MORE):
        assert near(found, pair, step), (pair, step)
