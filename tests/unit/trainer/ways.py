"""A way to train in the matrix of portability: saved under, and loaded under.

Needs torch and the trainer alone: test_portability.py has it in its ranks, on_xla.py in a Python
with torch_xla.
"""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.restore import Held, read_into
from holdfast.trainer.checkpoint.write import Checkpoints
from holdfast.trainer.config import load
from holdfast.trainer.loop import Generation, prepare
from holdfast.trainer.standalone import Standalone
from holdfast.trainer.state import State

MORE = 2  # steps behind a loading


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


class Way:
    """Prepared once in a process, for any number of generations."""

    def __init__(self, settings):
        self.job, self.elastic = prepare(load(None, settings)), Alone()

    def begin(self):
        checkpoints = Checkpoints(self.job.config.checkpoint, self.job.config.checkpoint_dir,
                                  self.elastic, self.job.manifest)
        return Watched(self.job, Held(), checkpoints, self.elastic)

    def save(self, assignment):
        """Trains to the end; what was evaluated there."""
        generation = self.begin()
        result = generation.run(assignment)
        generation.leave()
        generation.checkpoints.close()
        return result.evaluation

    def saved(self):
        return files.listing(self.job.config.checkpoint_dir)[0].path

    def load(self, assignment):
        """Tensors that are not those of the file, what is evaluated, and the next losses."""
        generation = self.begin()
        generation.join(assignment)
        state = generation.state
        whole = State(state.specs, torch.device("cpu"))
        read_into(Path(assignment.resume_path), whole)
        wrong = [one.name for one in state.entries if not _same(one, state, whole)]
        evaluated = generation.evaluate()
        for _ in range(MORE):
            generation.step()
        generation.group.any(False)  # nobody leaves while another needs him
        generation.leave()
        return wrong, evaluated, generation.losses


def _same(entry, state, whole):
    """Whether these bytes of a tensor are those of the whole one."""
    (other,) = (one for one in whole.entries if one.name == entry.name)
    first = other.offset + entry.begin
    return state.bytes(entry.offset, entry.offset + entry.nbytes) == whole.bytes(
        first, first + entry.nbytes)
