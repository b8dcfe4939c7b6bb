"""What tests run in a Python with torch_xla: one rank, and a JSON line of what it saw.

Not with pytest, which that Python has not.  Started by tests/own_python.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
from ways import Way

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.restore import Held
from holdfast.trainer.checkpoint.write import Checkpoints
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.loop import Generation, prepare
from holdfast.trainer.standalone import Assignment, Standalone

FIRST, MORE = 4, 3


class Alone(Standalone):
    """Without a launcher; keeps what the page would show, in order."""

    def __init__(self):
        super().__init__()
        self.seen, self.losses = [], {}

    def phase(self, name):
        self.seen.append(name)

    def step_begin(self):
        self.seen.append("begin")

    def step_end(self, step, loss):
        self.seen.append("end")
        self.losses[step] = loss

    def report(self, fault, text):
        self.seen.append(text)


class Uneven(tiny.Data):
    """One batch, in mid-training, has a row less than all others."""

    def batch(self, indices):
        self.asked = getattr(self, "asked", 0) + 1
        return super().batch(list(indices)[: -1 if self.asked == 5 else None])


class Turning(tiny.Still):
    """Computes something else from its sixth step on: the first three are the warm-up's."""

    def forward(self, batch):
        self.turns = getattr(self, "turns", 0) + 1
        loss = super().forward(batch)
        return loss * 1.5 if self.turns > 3 + 5 else loss


def prepared(device, folder, *more, steps=FIRST):
    elastic = Alone()
    config = load(None, [
        f"device={device}", "model=tiny:Model", "model_options.width=16", "data=tiny:Data",
        f"steps={steps}", "batch=4", "micro_batches=2", f"checkpoint.every={FIRST}",
        f"work_dir={folder}", *more])
    return prepare(config, elastic), elastic


def generation(job, elastic):
    checkpoints = Checkpoints(
        job.config.checkpoint, job.config.checkpoint_dir, elastic, job.manifest)
    return Generation(job, Held(), checkpoints, elastic)


def trained(device, folder, *more, **named):
    """One run from step 0 to its end, and what was seen of it."""
    job, elastic = prepared(device, folder, *more, **named)
    one = generation(job, elastic)
    try:
        result = one.run(Assignment(1, 0, 0, 1))
    finally:
        one.leave()
    one.checkpoints.close()
    return {"digest": result.digest, "losses": elastic.losses, "seen": elastic.seen}


def portability(folder):
    """Saved by each, loaded by each: the digest as loaded, and the losses of the next steps."""
    still = ("model=tiny:Still",)
    saved, loaded = {}, {}
    for device in ("xla", "cpu"):  # autograd counts the devices once: XLA's must be there by then
        saved[device] = trained(device, folder / device, *still)
    for device in ("xla", "cpu"):
        job, elastic = prepared(device, folder / "none", *still, steps=FIRST + MORE)
        for source in ("xla", "cpu"):
            path = files.listing(folder / source / "checkpoints")[0].path
            elastic.losses = {}
            one = generation(job, elastic)
            one.join(Assignment(2, 0, 0, 1, "", 0, "disk", FIRST, 1, path))
            digest = one.state.digest()
            for _ in range(MORE):
                one.step()
            one.leave()
            loaded[f"{source} to {device}"] = {"digest": digest, "losses": elastic.losses}
    return {"saved": saved, "loaded": loaded}


def shapes(folder):
    """A batch of another shape, refused and padded; and a model that turns into another one."""
    found = {}
    for name, more in {"refused": (), "padded": ("xla.pad=true",)}.items():
        try:
            found[name] = trained("xla", folder / name, "data=on_xla:Uneven", *more)
        except ConfigError as error:
            found[name] = str(error)
    found["turning"] = trained("xla", folder / "turning", "model=on_xla:Turning",
                               "micro_batches=1", steps=8)
    return found


def hangs(folder):
    """A device that does not answer in the third step's update: what the page was told by then."""
    job, elastic = prepared("xla", folder, "checkpoint.every=0", "xla.precompile=true")
    run = job.strategy.graphs.run

    def stuck(asked, phase=""):
        if not phase and elastic.seen.count("end") == 2:
            raise TimeoutError
        run(asked, phase)

    job.strategy.graphs.run = stuck
    try:
        generation(job, elastic).run(Assignment(1, 0, 0, 1))
    except TimeoutError:
        pass
    return {"seen": elastic.seen}


def matrix(_folder, *settings):
    """Saves; then takes the files of everybody, as a line says them, and goes on from each."""
    way = Way([*settings, "device=xla"])
    say({"evaluated": way.save(Assignment(1, 0, 0, 1)), "path": way.saved()})
    loaded = {}
    for name, path in json.loads(sys.stdin.readline()).items():
        wrong, evaluated, losses = way.load(Assignment(2, 0, 0, 1, "", 0, "disk", FIRST, 1, path))
        loaded[name] = wrong, evaluated, [[*at, loss] for at, loss in losses.items()]
    return loaded


def quality(folder, *settings):
    """A training to its end, and a short one with few pairs held out: their evaluations stay."""
    places = {}
    for name, more in {"whole": (), "few": ("steps=5", "data_options.held_out=20")}.items():
        way = Way([*settings, f"work_dir={folder / name}", "device=xla", *more])
        way.save(Assignment(1, 0, 0, 1))
        places[name] = str(way.job.config.checkpoint_dir)
    return places


def say(found):
    print(json.dumps(found), file=ANSWERS, flush=True)


if __name__ == "__main__":
    sys.modules["on_xla"] = sys.modules["__main__"]
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainer prints is no answer
    say(globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
    os._exit(0)  # XLA's threads and gloo's need not end in order
