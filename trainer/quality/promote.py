"""A checkpoint made the one that is served: proven, found equally good, known, then at once.

Owns what must hold and how the copy appears.  Must not import torch.  DEST is there whole or not
at all: it is written beside its place, synced, proven again, and renamed; what is there already is
never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint import format as files
from ..checkpoint import tensors
from . import kept

NOTE = "promotion.json"
# Of the run manifest: without one of these nobody could make the run again.
NEEDED = ("git", "packages", "python", "torch", "config", "data_digest", "seed", "environment")
COPY_BYTES = 4 << 20


class Refused(Exception):
    """It must not be promoted; `reasons` are all of them."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def promote(checkpoint: Path, target: Path) -> dict[str, Any]:
    """Returns what is kept in NOTE, whose `parity` says by which metric and margin it is as good as
    which other run.  Raises Refused with every reason, OSError where the disk does not let it."""
    reasons = []
    if os.path.lexists(target):
        reasons.append(f"{target} is there: what was promoted is never replaced; give a new name")
    problems = [str(problem) for problem in files.verify(checkpoint)]
    reasons += [f"not verified: {problem}" for problem in problems]
    if problems:  # nothing that it says of itself can be believed
        raise Refused(reasons)
    manifest = files.read_manifest(checkpoint)
    about = manifest.get("run_manifest")
    about = about if isinstance(about, dict) else {}
    reasons += [f"manifest not complete: {key} is missing" for key in NEEDED
                if about.get(key) in (None, "", {}, [])]
    evaluated, verdict = None, dict[str, Any]()
    try:
        evaluated = kept.of_checkpoint(checkpoint, manifest["step"], manifest["generation"],
                                       tensors.weights_digest(checkpoint, manifest))
        verdict = kept.verdict_on(evaluated)
        if verdict.get("verdict") != "within":
            reasons.append(f"parity not passed: {verdict.get('verdict')}")
        else:
            kept.margins(verdict)
    except kept.EvaluationError as error:
        reasons.append(f"parity not passed: {error}")
    if reasons or evaluated is None:
        raise Refused(reasons)
    note = {"source": str(checkpoint.absolute()), "step": manifest["step"],
            "generation": manifest["generation"], "run": manifest.get("run"),
            "weights": evaluated.weights, "parity": verdict, "promoted_wall_s": time.time()}
    _place(checkpoint, target, [files.MANIFEST, files.COMMIT,
                                *(item["file"] for item in manifest["shards"])], note)
    return note


def _place(checkpoint: Path, target: Path, names: list[str], note: dict[str, Any]) -> None:
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.promoting")
    with _alone(target.parent):
        shutil.rmtree(temporary, ignore_errors=True)  # of one that was ended half way
        try:
            temporary.mkdir()
            for name in names:
                _copy(checkpoint / name, temporary / name)
            files.write_file(temporary / NOTE, files.to_json(note))
            problems = files.verify(temporary)
            if problems:
                raise Refused([f"not verified: the copy's {problem}" for problem in problems])
            files.sync_directory(temporary)
            if os.path.lexists(target):
                raise Refused([f"{target} has just come: what was promoted is never replaced"])
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files.sync_directory(target.parent)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One promotion into a folder at a time.  The lock ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused([f"another promotion into {folder} goes on: try again later"]) from None
        yield
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, open(target, "xb") as writing:
        shutil.copyfileobj(reading, writing, COPY_BYTES)
        writing.flush()
        os.fsync(writing.fileno())
