"""Checkpoints between strategies: saved under each, loaded under each, and trained on.

One table over four ranks that live through all of it: 4 steps under each way of WAYS, saved; then
every file under every way, for two steps more.  What is equal to the last bit: the state as loaded,
the losses of the next step, and the places that an evaluation finds.  The step after that has been
through one optimizer step whose gradients were summed in another order: TOLERANCE.
"""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import PRELOAD

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.restore import Held, read_into
from holdfast.trainer.checkpoint.write import Checkpoints
from holdfast.trainer.config import load
from holdfast.trainer.loop import Generation, prepare
from holdfast.trainer.standalone import Assignment, Standalone
from holdfast.trainer.state import State

WAYS = {
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "mics of 2": ("strategy=mics", "mics.group=2"),
    "mics of 4": ("strategy=mics", "mics.group=4"),
    "pipeline of 2": ("strategy=pipeline", "pipeline.stages=2"),
    "pipeline of 4": ("strategy=pipeline", "pipeline.stages=4"),
    "pipeline of 2, in groups": ("strategy=pipeline", "pipeline.stages=2", "pipeline.group=2"),
}
WORLD, SAVED_AT, MORE = 4, 4, 2
TOLERANCE = 1e-5  # relative, of the second loss
LIMIT_S = 240.0  # three models are traced by each rank, on a busy machine


class Alone(Standalone):
    """Without a launcher, and without an environment that names a place."""

    def __init__(self):
        self.told = []

    def report(self, fault, text):
        self.told.append(text)


class Watched(Generation):
    """Keeps the loss of each micro-batch, wherever it was computed."""

    def __init__(self, *given):
        super().__init__(*given)
        self.losses = {}

    def look(self, number, loss):
        self.losses[self.held.step, number] = loss
        super().look(number, loss)


class Rank:
    """One of the four, in a process of its own."""

    def __init__(self, rank, port, folder):
        self.rank, self.port, self.folder = rank, port, Path(folder)
        self.elastic, self.generation = Alone(), 0
        self.jobs = {name: prepare(self.config(name)) for name in WAYS}

    def config(self, name):
        return load(None, [
            "model=tiny:Searched", "data=blocks:Data", f"steps={SAVED_AT}", "batch=3",
            f"micro_batches={WORLD}", f"work_dir={self.folder / name}", "device=cpu",
            f"checkpoint.every={SAVED_AT}", *WAYS[name]])

    def assignment(self, *resume):
        self.generation += 1
        return Assignment(self.generation, self.rank, self.rank, WORLD, "127.0.0.1", self.port,
                          *resume, run="matrix")

    def begin(self, name):
        job = self.jobs[name]
        checkpoints = Checkpoints(job.config.checkpoint, job.config.checkpoint_dir, self.elastic,
                                  job.manifest)
        return Watched(job, Held(), checkpoints, self.elastic)

    def save(self, name):
        generation = self.begin(name)
        result = generation.run(self.assignment())
        generation.leave()
        generation.checkpoints.close()
        return result.evaluation

    def load(self, name, path):
        """What a rank sees that loads this file under this way."""
        generation = self.begin(name)
        generation.join(self.assignment("disk", SAVED_AT, 1, str(path)))
        state = generation.state
        whole = State(state.specs, torch.device("cpu"))
        read_into(path, whole)
        wrong = [one.name for one in state.entries if not _same(one, state, whole)]
        evaluated = generation.evaluate()
        for _ in range(MORE):
            generation.step()
        generation.group.any(False)  # nobody leaves while another needs him
        generation.leave()
        return wrong, evaluated, generation.losses

    def all(self):
        saved = {name: self.save(name) for name in WAYS}
        paths = {name: Path(files.listing(self.folder / name / "checkpoints")[0].path)
                 for name in WAYS}
        return saved, {(first, second): self.load(second, paths[first])
                       for first in WAYS for second in WAYS}


def _same(entry, state, whole):
    """Whether these bytes of a tensor are those of the whole one."""
    (other,) = (one for one in whole.entries if one.name == entry.name)
    first = other.offset + entry.begin
    return state.bytes(entry.offset, entry.offset + entry.nbytes) == whole.bytes(
        first, first + entry.nbytes)


def _rank(pipe, *given):
    torch.set_num_threads(1)
    try:
        pipe.send(Rank(*given).all())
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By rank: what was evaluated as it was saved, and what (saved, loaded) came to."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    folder, started = tmp_path_factory.mktemp("matrix"), []
    try:
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            started.append((ours, context.Process(
                target=_rank, args=(theirs, rank, store.port, str(folder)), daemon=True)))
            started[-1][1].start()
            theirs.close()
        told = [pipe.recv() if pipe.poll(LIMIT_S) else "no answer" for pipe, _ in started]
    finally:
        for pipe, process in started:
            process.kill()
            process.join(5)
            pipe.close()
    bad = [one for one in told if isinstance(one, str)]
    assert not bad, "\n".join(bad)
    return told


def losses(found, pair, step):
    """Of every micro-batch, from whichever rank computed it; one that several computed is equal."""
    told = [(number, loss) for _, loaded in found
            for (at, number), loss in loaded[pair][2].items() if at == step]
    assert len(dict(told)) == WORLD == len(set(told)), told
    return dict(told)


@pytest.mark.parametrize("saved", WAYS)
def test_what_each_saved_every_other_loads_and_goes_on_from(found, saved):
    plain = saved, "ddp"
    for loaded in WAYS:
        pair = saved, loaded
        assert [one[1][pair][0] for one in found] == [[]] * WORLD, pair  # tensors that differ
        assert losses(found, pair, SAVED_AT) == losses(found, plain, SAVED_AT), pair
        assert losses(found, pair, SAVED_AT + 1) == pytest.approx(
            losses(found, plain, SAVED_AT + 1), rel=TOLERANCE), pair
        for evaluated, again in ((one[0][saved], one[1][pair][1]) for one in found):
            assert evaluated == again and evaluated["mrr_at_10"] > 0, pair
