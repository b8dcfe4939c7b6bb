"""`holdfast verify` and `holdfast promote`: checkpoints proven, and made the ones that are served.

Owns what is proven and shown; layout and proof are in trainer/checkpoint/format.py, what a
promotion asks for in trainer/quality/promote.py.  Without torch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from holdfast.trainer.checkpoint import format
from holdfast.trainer.quality import kept
from holdfast.trainer.quality import promote as promotion
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


def promote(options: argparse.Namespace) -> int:
    """0 when it is there; 2 when something forbids it, and everything that does is named."""
    source, target = Path(options.checkpoint), Path(options.target)
    try:
        note = promotion.promote(source, target)
    except promotion.Refused as refused:
        if options.json:
            print_json({"promoted": "", "refused": refused.reasons})
        else:
            show([line(f"{source}  ", Span("refused", BAD))]
                 + [row for one in refused.reasons for row in field("", one, indent=4)])
        return exits.BAD_CHECKPOINT
    except (format.CheckpointError, OSError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise Failure(f"{source} cannot be promoted to {target}: {said}") from None
    if options.json:
        print_json({"promoted": str(target), "refused": [], **note})
    else:
        show([line(f"{target}  ", Span("promoted", GOOD), f": step {note['step']} of "
                   f"{note['run']}, verified, equally good, and known")]
             + [row for one in kept.margins(note["parity"]) for row in field("", one, indent=4)])
    return exits.DONE


def carry(options: argparse.Namespace) -> int:
    """Weights to a file of other tools', or from one into a checkpoint."""
    from holdfast.trainer.checkpoint import portable

    source, target = Path(options.source), Path(options.target)
    try:
        if options.what == "export":
            number, place = portable.export(source, target), target
        else:
            place = portable.bring(source, target)
            number = len(portable.of_checkpoint(place).places)
    except ImportError as error:
        raise Failure(f"no {error.name}, which reads and writes .pt: install holdfast[trainer], or "
                      "name a .safetensors file") from None
    except (format.CheckpointError, OSError) as error:
        said = f"{target}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise Failure(said, exits.BAD_CHECKPOINT) from None
    if options.json:
        print_json({"path": str(place), "tensors": number})
    else:
        show([line(f"{place}  ", Span(f"{number} tensors", GOOD))])
    return exits.DONE


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
