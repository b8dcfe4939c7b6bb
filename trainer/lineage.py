"""A new run from another one's weights: `init_from`, told apart from resuming.

Owns the way of weights alone into a model that is at step 0.  Must not read the optimizer of the
other run: resuming goes on with it, this begins anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .checkpoint import format as files
from .checkpoint import portable
from .config import Config, ConfigError
from .state import State

NAMED_MAX = 5  # of the names that are missing or too many


def check(config: Config) -> None:
    """Raises ConfigError where resuming was meant."""
    if not config.init_from:
        return
    source, own = Path(config.init_from).absolute(), config.checkpoint_dir
    if source == own or own in source.parents:
        raise ConfigError([
            f"init_from = {config.init_from!r} lies in checkpoint.dir: a run resumes from there by "
            "itself, with its optimizer; unset init_from, or set another checkpoint.dir"])


def begin(config: Config, state: State) -> dict[str, Any]:
    """Puts the weights of `init_from` into the state, as much as it holds of them; returns where
    they are from.  Raises ConfigError naming what does not fit."""
    if not config.init_from:
        return {"from": "nothing"}
    try:
        found = portable.read(Path(config.init_from))
    except files.CheckpointError as error:
        raise ConfigError([f"init_from: {error}"]) from None
    wanted = {name.removeprefix(files.WEIGHTS): spec for name, spec in state.specs.items()
              if name.startswith(files.WEIGHTS)}
    given = {place.name: place for place in found.places}
    problems = [
        f"init_from: {given[name].shape} of {name} is not this model's {spec.shape}: set "
        "model_options as they were"
        for name, spec in wanted.items() if name in given and given[name].shape != spec.shape]
    for names, said in ((wanted.keys() - given.keys(), "has no"),
                        (given.keys() - wanted.keys(), "has, and this model has not,")):
        if names:
            some = ", ".join(sorted(names)[:NAMED_MAX])
            problems.append(f"init_from: {config.init_from} {said} {some} ({len(names)} in all): "
                            "set the model that wrote it")
    if problems:
        raise ConfigError(problems)
    state.bytes()  # what lies on the accelerator is changed in host memory, then carried back
    for name, spec in wanted.items():
        tensor = portable.tensor(given[name]).to(spec.dtype).contiguous()
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        kind = str(spec.dtype).removeprefix("torch.")
        state.fill([files.Entry(files.WEIGHTS + name, kind, spec.shape, 0, data.nbytes)], data, {})
    state.written()
    return {"from": "weights", **found.origin}
