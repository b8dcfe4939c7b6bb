"""`holdfast verify DIR`: proves checkpoints by their digests, without torch.

Owns what is proven and shown; layout and proof are in trainer/checkpoint/format.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from holdfast.trainer.checkpoint import format
from holdfast.worker import exits

from .text import BAD, GOOD, Failure, Line, Span, field, line, print_json, show


class Verdict(NamedTuple):
    name: str
    problems: tuple[str, ...]


def verify(options: argparse.Namespace) -> int:
    """0 when every checkpoint is good, 2 when one is bad; 1 when there is none."""
    root = Path(options.directory)
    if options.directory.startswith("s3://"):
        raise Failure("checkpoints on S3 cannot be verified by this version")
    verdicts = [
        Verdict(path.name, tuple(str(problem) for problem in format.verify(path)))
        for path in directories(root)]
    bad = [one for one in verdicts if one.problems]
    if options.json:
        print_json([one._asdict() for one in verdicts])
    else:
        show(report(verdicts))
    return exits.BAD_CHECKPOINT if bad else exits.DONE


def directories(root: Path) -> list[Path]:
    """The checkpoint itself, or every one in a directory of them, newest first."""
    try:
        with os.scandir(root):
            pass
    except OSError as error:  # absent, no directory, or closed to this user: not an empty one
        raise Failure(f"{root}: {error.strerror}") from error
    if format.parse_name(root.resolve().name):
        return [root]
    found = format.listing(root)
    if found:
        return [Path(one.path) for one in found]
    raise Failure(f"{root} holds no committed checkpoint (step-*.gen-*/{format.COMMIT})")


def report(verdicts: list[Verdict]) -> list[Line]:
    lines: list[Line] = []
    for one in verdicts:
        said = Span("bad", BAD) if one.problems else Span("good: every byte is proven", GOOD)
        lines.append(line(f"{one.name}  ", said))
        lines += [row for problem in one.problems for row in field("", problem, indent=4)]
    return lines
