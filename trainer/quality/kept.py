"""What an evaluation found for each held-out pair, kept with the run: EVALUATIONS/step-*.json.

Owns the file beside the run's checkpoints, its bounds and its proof.  Must not import torch or
numpy: `holdfast parity` and `holdfast promote` read it without them.  One number a pair is kept,
the place of the right answer, from which MRR and recall follow for any cut-off.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint import format as files

EVALUATIONS = "evaluations"
FORMAT = 1
FILES_MAX = 16  # of one run; the oldest go
PAIRS_MAX = 1 << 16  # of one task: the first ones; 0.4 MB of JSON
TASKS_MAX = 16
BYTES_MAX = 16 << 20  # of a file that is read
NAMES_MAX = 10_000  # of a folder that is looked through
_NAME = re.compile(r"step-(\d{9,18})\.gen-(\d{1,18})\.json\Z")


class EvaluationError(Exception):
    """There is no evaluation or verdict to be used; the text says which and why."""


class Task(NamedTuple):
    """One task's pairs: `places[i]` is where pair i's right answer stood, from 1 on."""

    pairs: int  # as many as were evaluated; `places` holds the first PAIRS_MAX of them
    pairs_digest: str
    places: Sequence[int]


class Evaluation(NamedTuple):
    """One evaluation of one run; `weights` is the digest of the weights that were evaluated."""

    run: str
    generation: int
    step: int
    data_digest: str
    weights: str
    tasks: Mapping[str, Task]
    digest: str = ""  # of the file's bytes, once it lies there
    path: str = ""


def save(root: Path, evaluation: Evaluation) -> Path:
    """Writes it durably and lets the oldest go.  Raises OSError."""
    folder = root / EVALUATIONS
    folder.mkdir(parents=True, exist_ok=True)
    tasks = dict(list(evaluation.tasks.items())[:TASKS_MAX])
    value = {
        "format": FORMAT, "run": evaluation.run, "generation": evaluation.generation,
        "step": evaluation.step, "data_digest": evaluation.data_digest,
        "weights": evaluation.weights,
        "tasks": {name: {"pairs": task.pairs, "pairs_digest": task.pairs_digest,
                         "places": list(task.places[:PAIRS_MAX])}
                  for name, task in tasks.items()},
    }
    name = f"{files.directory_name(evaluation.step, evaluation.generation)}.json"
    files.write_file(folder / name, files.to_json(value))
    for old in _listing(folder)[FILES_MAX:]:
        _verdict_of(old).unlink(missing_ok=True)
        old.unlink(missing_ok=True)
    return folder / name


def _verdict_of(path: Path) -> Path:
    return path.with_name(f"parity-{path.name}")


def keep_verdict(evaluation: Evaluation, verdict: Mapping[str, Any]) -> None:
    """The last word of `holdfast parity` on this evaluation, beside it.  Raises OSError."""
    path = Path(evaluation.path)
    files.write_file(_verdict_of(path), files.to_json({**verdict, "of": evaluation.digest}))


def verdict_on(evaluation: Evaluation) -> dict[str, Any]:
    """That word.  Raises EvaluationError when there is none, or it is about other bytes."""
    path = _verdict_of(Path(evaluation.path))
    if not path.exists():
        raise EvaluationError("no parity: run `holdfast parity RUN_A RUN_B` with this run second")
    value = _read_json(path)[1]
    if value.get("of") != evaluation.digest:
        raise EvaluationError(f"{path}: is not about {evaluation.path} as it is now")
    return value


def margins(verdict: Mapping[str, Any]) -> list[str]:
    """By each metric what was found, for people: "mrr@10: within 0.1 % of base, step 40 (PATH)".

    Raises EvaluationError where it does not say that of two evaluations."""
    try:
        first, second, found = verdict["first"], verdict["second"], list[str]()
        if first["digest"] == second["digest"]:
            raise EvaluationError("it is of an evaluation with itself: run `holdfast parity` with "
                                  "another run first")
        for one in verdict["metrics"]:
            size = f"{100 * one['margin']:g} %" if one["relative"] else f"{one['margin']:g}"
            found.append(f"{one['metric']}: {one['verdict']} {size} of {first['run']}, step "
                         f"{first['step']} ({first['path']})")
    except (KeyError, TypeError, ValueError):
        found = []
    if not found:
        raise EvaluationError("its verdict does not name runs, metric and margin: run `holdfast "
                              "parity` again")
    return found


def _listing(folder: Path) -> list[Path]:
    """The evaluations of one run, the newest (generation, step) first."""
    try:
        names = os.listdir(folder)[:NAMES_MAX]
    except OSError:
        return []
    found = [(int(match[2]), int(match[1]), name) for name in names if (match := _NAME.match(name))]
    return [folder / name for _, _, name in sorted(found, reverse=True)]


def find(place: Path, step: int | None = None) -> Path:
    """The evaluation that a person means by a file, a run's checkpoints, or a folder above them.

    The newest, or that of `step`.  Raises EvaluationError."""
    if place.is_file():
        return place
    for folder in (place / EVALUATIONS, place / "checkpoints" / EVALUATIONS, place):
        paths = _listing(folder)
        chosen = [path for path in paths
                  if step is None or int(path.name[5:].partition(".")[0]) == step]
        if chosen:
            return chosen[0]
        if paths:
            raise EvaluationError(
                f"{folder} has no evaluation of step {step}: set eval_every, or take one of "
                + ", ".join(sorted({path.name[5:].partition('.')[0].lstrip('0') or '0'
                                    for path in paths})))
    raise EvaluationError(
        f"{place} holds no evaluation ({EVALUATIONS}/step-*.json): name a run's checkpoint.dir; a "
        "run keeps one where its data has `heldout` and its model `embed`")


def of_checkpoint(checkpoint: Path, step: int, generation: int, weights: str) -> Evaluation:
    """The evaluation of exactly a checkpoint's weights.  Raises EvaluationError with the reason
    why there is none."""
    paths = [path for path in _listing(checkpoint.parent / EVALUATIONS)
             if path.name.startswith(files.directory_name(step, 0)[:-1])]
    if not paths:
        raise EvaluationError(f"no evaluation of step {step} beside it: set eval_every")
    found = [load(path) for path in paths]
    for one in found:
        # A generation comes to a step once.  The last step's may be measured in a later one than
        # it was committed in: then the weights have to say it, which only a whole state does.
        if one.generation == generation and one.weights in ("", weights):
            return one
        if one.generation >= generation and one.weights == weights:
            return one
    raise EvaluationError(f"{paths[0].name}: is of other weights than the checkpoint's")


def load(path: Path) -> Evaluation:
    """Reads and checks one file.  Raises EvaluationError."""
    data, value = _read_json(path)
    try:
        if value["format"] != FORMAT:
            raise EvaluationError(f"{path}: format {value['format']!r}, not {FORMAT}")
        tasks = {str(name): _task(one) for name, one in value["tasks"].items()}
        if not 0 < len(tasks) <= TASKS_MAX:
            raise ValueError("tasks")
        return Evaluation(
            str(value["run"]), int(value["generation"]), int(value["step"]),
            str(value["data_digest"]), str(value["weights"]), tasks, files.digest(data), str(path))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EvaluationError(f"{path}: not an evaluation of the trainer's") from None


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        if not path.is_file():  # a FIFO would be waited for
            raise EvaluationError(f"{path}: no regular file")
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX + 1)
        if len(data) > BYTES_MAX:
            raise EvaluationError(f"{path}: larger than {BYTES_MAX} bytes")
        value = json.loads(data)
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise EvaluationError(f"{path}: not JSON") from None
    if not isinstance(value, dict):
        raise EvaluationError(f"{path}: not a JSON object")
    return data, value


def _task(value: Any) -> Task:
    places = value["places"]
    if not (isinstance(places, list) and len(places) <= PAIRS_MAX
            and all(type(place) is int and 0 < place < 1 << 31 for place in places)):
        raise ValueError("places")
    return Task(int(value["pairs"]), str(value["pairs_digest"]), places)
